"""A model opened to generate with, how its next token is chosen, and its text as it comes. V vocabulary."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from models.config import TextFacts
from parallel.errors import UserError
from recipes.data.text.tokenizer import Tokenizer, text_library

# Tokens that are decoded together; beyond this, tokens whose text is complete are dropped.
WINDOW_TOKENS = 16
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes invalid or incomplete UTF-8 to."""
LONGEST_INCOMPLETE = 3
"""A UTF-8 character has up to four bytes, of which three may have arrived."""


@dataclass(frozen=True)
class Sampling:
    """How many tokens follow a prompt at most, and how each is drawn."""

    max_tokens: int
    temperature: float = 1.0
    """0 = always the most likely token."""
    top_k: int = 0
    """Draw from this many of the most likely tokens (0 = all; more if the last ones tie)."""
    top_p: float = 1.0
    """Draw from the fewest most likely ones of those whose probabilities add up to this (nucleus sampling: Holtzman et
    al. 2020), as in transformers."""
    seed: int = 0
    """The same seed gives the same tokens."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that the text has already are less likely (Keskar et al. 2019), as in transformers."""

    def require_possible(self) -> None:
        """Raises one UserError that lists every value out of range."""
        # Logits divided by a smaller temperature could overflow float32.
        usable = self.temperature == 0 or 1e-3 <= self.temperature < math.inf
        problems = [
            f"{name} = {getattr(self, name)}: must be {rule}"
            for name, rule, holds in (
                ("max_tokens", "1 or more", self.max_tokens >= 1),
                ("temperature", "0 (greedy), or 0.001 or more", usable),
                ("top_k", "1 or more, or 0 for all tokens", self.top_k >= 0),
                ("top_p", "above 0 and at most 1", 0 < self.top_p <= 1),
                ("seed", "0 or more, and below 2^63", 0 <= self.seed < 2**63),
            )
            if not holds
        ]
        if problems:
            raise UserError("\n".join(problems))


def next_token(logits: Tensor, sampling: Sampling, *, generator: torch.Generator, seen: Collection[int] = ()) -> int:
    """Draw one token from its logits (V,) with the probabilities of odds(); at temperature 0, take the most likely one.

    The generator is on the CPU, so that a seed draws the same tokens on every kind of device. seen: the tokens of the
    text, to which the repetition penalty applies.
    """
    logits = logits.float().cpu()
    if sampling.repetition_penalty != 1 and seen:
        ids = torch.tensor(sorted(set(seen)))
        penalty = torch.tensor(sampling.repetition_penalty)
        logits = logits.index_copy(0, ids, logits[ids] * torch.where(logits[ids] < 0, penalty, 1 / penalty))
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(odds(logits, sampling), 1, generator=generator))


def odds(logits: Tensor, sampling: Sampling) -> Tensor:
    """softmax(logits / temperature) over the tokens that remain, (V,) -> (V,)."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        logits[logits < logits.topk(sampling.top_k).values[-1]] = -math.inf
    if sampling.top_p < 1:
        likeliest, order = logits.sort(descending=True)
        chances = likeliest.softmax(dim=-1)
        before = chances.cumsum(dim=-1) - chances  # of all more likely tokens
        before[0] = 0.0  # exactly, so that one token always remains
        logits[order[before >= sampling.top_p]] = -math.inf
    return logits.softmax(dim=-1)


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

    @cached_property
    def _spelled_out(self) -> Tokenizer:
        return replace(self.tokenizer, backend=text_library(self.tokenizer.json, spelled_out=True))

    def prompt_ids(self, text: str) -> list[int]:
        """The tokens of a text at the beginning of a document."""
        # The config of a model trained with a beginning token names it, and then its tokenizer adds it. Models trained
        # here see none, whatever their tokenizer would add.
        tokenizer, special = self.tokenizer, self.encoder_decoder
        if self.as_pairs:
            tokenizer = self._spelled_out
        else:
            special |= self.facts.bos_token_id is not None
        ids = tokenizer.ids(text, special=special)
        tokenizer.require_rows(ids)
        # A document starts after the end of another one.
        return ids if ids or self.as_pairs else [self.tokenizer.end_of_document]

    def stop_ids(self) -> set[int]:
        """Every token that can end a text."""
        return {self.tokenizer.end_of_document, *self.ends}


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
        end = text[-LONGEST_INCOMPLETE:]  # may still become one character when further bytes arrive
        ready = len(text) - len(end) + len(end.rstrip(INCOMPLETE))
        if ready > shown:
            yield text[shown:ready]
            shown = ready
        # A token that decodes to whole characters by itself can start the next window.
        if len(window) > WINDOW_TOKENS and shown == len(text) and INCOMPLETE not in decode(window[-1:]):
            window = window[-1:]
            shown = len(decode(window))
    if rest := decode(window)[shown:]:
        yield rest
