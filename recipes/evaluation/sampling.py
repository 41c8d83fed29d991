"""Chooses the next token. V vocabulary."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.errors import UserError


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
