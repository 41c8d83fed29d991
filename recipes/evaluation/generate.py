"""Text from a model on one device, token by token with a key/value cache.

V vocabulary, T tokens.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from models.cache import KeyValueCache
from models.config import TextFacts
from models.decoder import Decoder
from parallel.errors import UserError
from recipes.data.text.tokenizer import Tokenizer
from recipes.evaluation.sampling import check_sampling, next_token
from recipes.weights.convert import load_weights
from recipes.weights.locate import find_weights

# Tokens of a prompt in one forward pass: enough to keep a device busy, and bounds the logits in memory.
PREFILL_TOKENS = 512
# Tokens kept at hand to be decoded together; with a few more than this, those that are through are let go.
WINDOW_TOKENS = 16
# New tokens that the cache has room for at first; it grows when there are more.
FIRST_TOKENS = 4096
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of bytes that are not, or not yet, UTF-8."""
LONGEST_INCOMPLETE = 3
"""A character has up to four bytes in UTF-8; the first three may be there already."""


@dataclass(frozen=True)
class OpenedModel:
    """A model ready to generate, with its tokenizer."""

    model: Decoder
    tokenizer: Tokenizer
    facts: TextFacts

    def prompt_ids(self, text: str) -> list[int]:
        """The tokens of a text that begins a document."""
        # A model that was trained with a token at the beginning of each text says so; then its tokenizer adds it.
        # Those that we train see none, whatever their tokenizer could add.
        ids = self.tokenizer.backend.encode(text, add_special_tokens=self.facts.bos_token_id is not None).ids
        return ids or [self.tokenizer.end_of_document]  # after which a document begins

    def stop_ids(self) -> set[int]:
        """Every token that may end a text."""
        ends = self.facts.eos_token_id
        return {self.tokenizer.end_of_document, *(ends if isinstance(ends, tuple) else () if ends is None else (ends,))}


def open_model(path: str | Path, *, dtype: torch.dtype, device: torch.device) -> OpenedModel:
    """Load a Hugging Face folder, a checkpoint, or a run's newest checkpoint onto one device.

    Raises UserError where that is not possible.
    """
    weights = find_weights(path)
    tokenizer = weights.tokenizer
    with torch.device("meta"):
        model = Decoder(weights.model)
    model = model.to(dtype).to_empty(device=device)
    load_weights(model, weights)
    return OpenedModel(model, tokenizer, weights.facts)


def choose_device(device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """What was asked for, or a GPU where there is one, and bfloat16 there. Raises UserError for no device of ours."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        if found.type not in ("cpu", "cuda", "mps"):
            raise UserError(f"device {name!r}: must be cpu, cuda or mps")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        raise UserError(f"no device {name!r} here: {str(error).splitlines()[0]}") from None
    return found, getattr(torch, dtype or ("float32" if found.type == "cpu" else "bfloat16"))


def continue_text(
    opened: OpenedModel,
    prompt: str,
    *,
    log: Callable[[str], object],
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
) -> tuple[int, float]:
    """Say the prompt, and then its continuation in pieces as they come. Returns its tokens, and the seconds it took.

    Stops at the end of a document. Arguments as in generate().
    """
    started = time.perf_counter()
    ids = opened.prompt_ids(prompt)
    made: list[int] = []

    def noted() -> Iterator[int]:
        for token in generate(
            opened.model,
            ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_ids=opened.stop_ids(),
        ):
            made.append(token)
            yield token

    log(prompt)
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
    """Yield the tokens that follow the prompt, one by one: `max_tokens` of them, or fewer if one of `stop_ids` comes.

    A stop token is not yielded. Sampling as in next_token; the same seed gives the same tokens. model: plain, on one
    device, not sharded. Raises UserError for an empty prompt, or where the model's logits are no numbers.
    """
    check_sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if not prompt_ids:
        raise UserError("the prompt has no tokens; there must be one at least to go on from")
    device = model.embedding.weight.device
    longest = len(prompt_ids) + max_tokens - 1  # nothing follows the last token
    room = min(longest, len(prompt_ids) + FIRST_TOKENS)
    cache = _cache(model, room)
    generator = torch.Generator().manual_seed(seed)
    new = torch.tensor([prompt_ids], device=device)  # (1, T)
    for _ in range(max_tokens):
        if cache.length + new.shape[1] > room:
            room = min(longest, 2 * room)
            cache = _cache(model, room, copy=cache)
        with torch.no_grad():  # not around the yield: it would hold for the caller too
            for piece in new.split(PREFILL_TOKENS, dim=1):
                logits = model(piece, cache=cache)[0, -1]  # (V,)
        if not logits.isfinite().all():
            raise UserError(f"after {cache.length} tokens the model's logits are no numbers: its weights are spoiled")
        token = next_token(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if token in stop_ids:
            return
        yield token
        new = torch.tensor([[token]], device=device)  # (1, 1)


def _cache(model: Decoder, room: int, *, copy: KeyValueCache | None = None) -> KeyValueCache:
    """An empty cache for so many tokens, or one with what is in another."""
    weight = model.embedding.weight
    cache = KeyValueCache(model.config, batch=1, max_length=room, dtype=weight.dtype, device=weight.device)
    for old, new in zip(copy.layers if copy else (), cache.layers, strict=False):
        new.append(old.key[:, :, : old.length], old.value[:, :, : old.length])
    return cache


def stream_text(
    ids: Iterable[int], decode: Callable[[Sequence[int]], str], *, after: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text of the ids as they come, never half a character; `after`: the ids before them, not repeated.

    Byte-level tokenizers spread characters over several tokens, and some drop the space at a text's beginning: so a few
    tokens are decoded together, and only what is new is yielded.
    """
    window = list(after[-WINDOW_TOKENS:])
    shown = len(decode(window))  # characters of the window's text that are out
    for token in ids:
        window.append(token)
        text = decode(window)
        ready = len(text) - _incomplete(text)
        if ready > shown:
            yield text[shown:ready]
            shown = ready
        # A token that is whole characters by itself can begin the next window.
        if len(window) > WINDOW_TOKENS and shown == len(text) and INCOMPLETE not in decode(window[-1:]):
            window = window[-1:]
            shown = len(decode(window))
    if rest := decode(window)[shown:]:
        yield rest


def _incomplete(text: str) -> int:
    """How many characters at the end may still turn into one when further bytes come."""
    end = text[-LONGEST_INCOMPLETE:]
    return len(end) - len(end.rstrip(INCOMPLETE))
