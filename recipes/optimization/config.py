"""What a recipe says of the optimizer and of the learning rate. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW. No weight decay on norms and embeddings."""

    lr: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate."""
    betas: tuple[Annotated[float, Interval(ge=0, lt=1)], Annotated[float, Interval(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the denominator of the update."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled weight decay of the matrices."""
    grad_clip: Annotated[float, Ge(0)] = 1.0
    """Gradients are scaled down to this global norm; 0 = off."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which both moments are kept; "bfloat16" halves them, and the arithmetic stays float32."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the run, as a share of optimizer.lr."""

    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """After warm-up: "wsd" holds, then falls linearly over decay_steps; "cosine" and "linear" fall all the way."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps of linear warm-up from 0."""
    decay_steps: Annotated[int, Ge(0)] = 0
    """wsd: length of the final decay."""
    min_lr_ratio: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Where the decay ends, as a share of optimizer.lr."""
