"""Generates text with a model on one device, token by token, with a key/value cache. V vocabulary, T tokens."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tokenizers
import torch
from torch import nn

from models.cache import KeyValueCache
from models.config import TextFacts
from models.decoder import Decoder
from models.transformers_config import TransformersConfig
from parallel.dist import let_segments_grow
from parallel.errors import UserError
from recipes.data.text.tokenizer import Tokenizer
from recipes.evaluation.sampling import check_sampling, next_token
from recipes.weights.convert import load_weights
from recipes.weights.locate import Weights, find_weights

# Prompt tokens per forward pass: enough to keep a device busy, and a bound on the memory of the logits.
PREFILL_TOKENS = 512
# Tokens that are decoded together; beyond this, tokens whose text is complete are dropped.
WINDOW_TOKENS = 16
# New tokens that fit into the cache at first; it grows when there are more.
FIRST_TOKENS = 4096
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes invalid or incomplete UTF-8 to."""
LONGEST_INCOMPLETE = 3
"""A UTF-8 character has up to four bytes, of which three may have arrived."""


@dataclass(frozen=True)
class OpenedModel:
    """A model ready to generate, with its tokenizer."""

    model: nn.Module
    """A Decoder, or a model of transformers."""
    tokenizer: Tokenizer
    facts: TextFacts
    ends: tuple[int, ...] = ()
    """Tokens that end a text, besides the end of a document."""
    encoder_decoder: bool = False
    """Whether it answers a prompt, instead of continuing it."""
    as_pairs: bool = False
    """Whether special tokens that a prompt spells out are these tokens, as in the prompts of pairs and chats."""

    def prompt_ids(self, text: str) -> list[int]:
        """The tokens of a text at the beginning of a document."""
        # The config of a model trained with a beginning token names it, and then its tokenizer adds it. Models trained
        # here see none, whatever their tokenizer would add.
        if self.as_pairs:
            library = tokenizers.Tokenizer.from_str(self.tokenizer.json)
            library.no_truncation()
            return list(library.encode(text, add_special_tokens=self.encoder_decoder).ids)
        special = self.facts.bos_token_id is not None or self.encoder_decoder
        ids = self.tokenizer.backend.encode(text, add_special_tokens=special).ids
        return ids or [self.tokenizer.end_of_document]  # a document starts after it

    def stop_ids(self) -> set[int]:
        """Every token that can end a text."""
        return {self.tokenizer.end_of_document, *self.ends}


def open_model(path: str | Path | Weights, *, dtype: torch.dtype, device: torch.device) -> OpenedModel:
    """Load a Hugging Face folder, a checkpoint, or a run's newest one onto a device. Raises UserError if impossible."""
    weights = path if isinstance(path, Weights) else find_weights(path)
    if isinstance(weights.model, TransformersConfig):
        from recipes.evaluation.by_transformers import open_exported

        return open_exported(weights, dtype=dtype, device=device)
    tokenizer = weights.tokenizer
    with torch.device("meta"):
        model = Decoder(weights.model)
    model = model.to(dtype).to_empty(device=device)
    load_weights(model, weights)
    return OpenedModel(model, tokenizer, weights.facts, weights.ends)


def choose_device(device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """The given device and type; by default a GPU if there is one, with bfloat16. Raises UserError if unusable."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        if found.type not in ("cpu", "cuda", "mps"):
            raise UserError(f"device {name!r}: must be cpu, cuda or mps")
        if found.type == "cuda":
            let_segments_grow()  # the cache of keys and values is copied into larger ones
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        raise UserError(f"device {name!r} is not available: {str(error).splitlines()[0]}") from None
    return found, getattr(torch, dtype or ("float32" if found.type == "cpu" else "bfloat16"))


def continue_text(
    opened: OpenedModel,
    prompt: str,
    *,
    log: Callable[[str], object],
    log_prompt: Callable[[str], object] | None = None,
    **sampling: Any,
) -> tuple[int, float]:
    """Pass prompt and continuation to `log`, piece by piece, to the end of a document. Returns (new tokens, seconds).

    log_prompt: receives the prompt instead of `log`.
    sampling: max_tokens and the optional arguments of generate().
    """
    started = time.perf_counter()
    ids = opened.prompt_ids(prompt)
    made: list[int] = []

    def noted() -> Iterator[int]:
        for token in generate(cast(Decoder, opened.model), ids, stop_ids=opened.stop_ids(), **sampling):
            made.append(token)
            yield token

    (log_prompt or log)(prompt)
    for piece in stream_text(noted(), opened.tokenizer.decode, after=ids):
        log(piece)
    return len(made), time.perf_counter() - started


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """Yield the tokens after the prompt. Raises UserError for no prompt, wrong arguments, and NaN or infinite logits.

    Args:
        model: a plain model on one device, not sharded.
        prompt_ids: the tokens of the prompt, at least one.
        max_tokens: how many tokens to generate at most.
        temperature, top_k, top_p: as in next_token().
        seed: the same seed gives the same tokens.
        stop_ids: tokens that end the text; they are not yielded.
    """
    check_sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if not prompt_ids:
        raise UserError("the prompt has no tokens; at least one is needed")
    device = model.embedding.weight.device
    longest = len(prompt_ids) + max_tokens - 1  # the last token is not fed back
    capacity = min(longest, len(prompt_ids) + FIRST_TOKENS)
    cache = _cache(model, capacity)
    generator = torch.Generator().manual_seed(seed)
    new = torch.tensor([prompt_ids], device=device)  # (1, T)
    for _ in range(max_tokens):
        if cache.length + new.shape[1] > capacity:
            capacity = min(longest, 2 * capacity)
            cache = _cache(model, capacity, copy=cache)
        with torch.no_grad():  # not around the yield, where it would apply to the caller too
            for piece in new.split(PREFILL_TOKENS, dim=1):
                logits = model(piece, cache=cache)[0, -1]  # (V,)
        if not logits.isfinite().all():
            raise UserError(f"after {cache.length} tokens the logits are NaN or infinite: the weights are unusable")
        token = next_token(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if token in stop_ids:
            return
        yield token
        new = torch.tensor([[token]], device=device)  # (1, 1)


def _cache(model: Decoder, capacity: int, *, copy: KeyValueCache | None = None) -> KeyValueCache:
    """A cache for `capacity` tokens, empty or with the contents of `copy`."""
    weight = model.embedding.weight
    cache = KeyValueCache(model.config, batch=1, max_length=capacity, dtype=weight.dtype, device=weight.device)
    for old, new in zip(copy.layers if copy else (), cache.layers, strict=False):
        new.append(old.key[:, :, : old.length], old.value[:, :, : old.length])
    return cache


def stream_text(
    ids: Iterable[int], decode: Callable[[Sequence[int]], str], *, after: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text of the ids as they arrive, in whole characters. after: the ids before them, not repeated.

    Byte-level tokenizers spread a character over several tokens, and some drop the space at the start of a text. So a
    few tokens are decoded together, and only the new text is yielded.
    """
    window = list(after[-WINDOW_TOKENS:])
    shown = len(decode(window))  # characters of the window's text already yielded
    for token in ids:
        window.append(token)
        text = decode(window)
        ready = len(text) - _incomplete(text)
        if ready > shown:
            yield text[shown:ready]
            shown = ready
        # A token that decodes to whole characters by itself can start the next window.
        if len(window) > WINDOW_TOKENS and shown == len(text) and INCOMPLETE not in decode(window[-1:]):
            window = window[-1:]
            shown = len(decode(window))
    if rest := decode(window)[shown:]:
        yield rest


def _incomplete(text: str) -> int:
    """How many characters at the end may still become one character when further bytes arrive."""
    end = text[-LONGEST_INCOMPLETE:]
    return len(end) - len(end.rstrip(INCOMPLETE))
