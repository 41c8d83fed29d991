"""Chooses the next token. V vocabulary."""

import math

import torch
from torch import Tensor

from parallel.errors import UserError


def next_token(
    logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, generator: torch.Generator
) -> int:
    """Draw one token from its logits (V,) with the probabilities of odds(); at temperature 0, take the most likely one.

    The generator is on the CPU, so that a seed draws the same tokens on every kind of device.
    """
    logits = logits.float().cpu()
    if temperature == 0:
        return int(logits.argmax())
    chances = odds(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    return int(torch.multinomial(chances, 1, generator=generator))


def odds(logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """softmax(logits / temperature) over the tokens that remain, (V,) -> (V,).

    top_k keeps this many of the most likely tokens (0 = all; more if the last ones tie). top_p then keeps the fewest
    most likely ones whose probabilities add up to it (nucleus sampling: Holtzman et al. 2020), as in transformers.
    """
    logits = logits / temperature
    if 0 < top_k < len(logits):
        logits[logits < logits.topk(top_k).values[-1]] = -math.inf
    if top_p < 1:
        likeliest, order = logits.sort(descending=True)
        chances = likeliest.softmax(dim=-1)
        before = chances.cumsum(dim=-1) - chances  # of all more likely tokens
        before[0] = 0.0  # exactly, so that one token always remains
        logits[order[before >= top_p]] = -math.inf
    return logits.softmax(dim=-1)


def check_sampling(*, max_tokens: int, temperature: float, top_k: int, top_p: float, seed: int) -> None:
    """Raises one UserError that lists every value out of range."""
    # Logits divided by a smaller temperature could overflow float32.
    usable = temperature == 0 or 1e-3 <= temperature < math.inf
    problems = [
        f"{name} = {value}: must be {rule}"
        for name, value, rule, holds in (
            ("max_tokens", max_tokens, "1 or more", max_tokens >= 1),
            ("temperature", temperature, "0 (greedy), or 0.001 or more", usable),
            ("top_k", top_k, "1 or more, or 0 for all tokens", top_k >= 0),
            ("top_p", top_p, "above 0 and at most 1", 0 < top_p <= 1),
            ("seed", seed, "0 or more, and below 2^63", 0 <= seed < 2**63),
        )
        if not holds
    ]
    if problems:
        raise UserError("\n".join(problems))
