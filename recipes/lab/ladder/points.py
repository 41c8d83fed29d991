"""A finished run of a ladder. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """What a law is fitted to."""

    rung: str
    seed: int
    parameters: int
    """N: ModelConfig.non_embedding_params()."""
    tokens: int
    """D."""
    flops: float
    """Of the whole run, forward and backward."""
    loss: float
    """On the validation text at the end, nats per token."""
    curve: tuple[tuple[float, float], ...] = ()
    """(share of the steps, validation loss), ascending."""
