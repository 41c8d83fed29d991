"""A model opened to generate with, and its text as it comes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from models.config import TextFacts
from recipes.data.text.tokenizer import Tokenizer, text_library

# Tokens that are decoded together; beyond this, tokens whose text is complete are dropped.
WINDOW_TOKENS = 16
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
