"""The [optimizer] and [schedule] sections. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, without weight decay on norms and embeddings."""

    lr: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate."""
    betas: tuple[Annotated[float, Interval(ge=0, lt=1)], Annotated[float, Interval(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the denominator of the update."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled weight decay of the weight matrices."""
    grad_clip: Annotated[float, Ge(0)] = 1.0
    """Clip gradients to this global norm; 0 = off."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage precision of both moments; "bfloat16" halves their memory, with updates still computed in float32."""


Phase = Annotated[int, Ge(0)] | Annotated[float, Interval(gt=0, lt=1)]
"""Steps, or a share of the run."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the run, relative to optimizer.lr."""

    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """After warm-up: "wsd" holds, then decays linearly over decay_steps; "cosine" and "linear" decay throughout."""
    warmup_steps: Phase = 0
    """Steps of linear warm-up from 0; a number below 1 is a share of run.steps, rounded, but at least one step."""
    decay_steps: Phase = 0
    """wsd: steps of the final decay, or their share of run.steps."""
    min_lr_ratio: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Final learning rate of the decay, as a fraction of optimizer.lr."""

    def phases(self, steps: int) -> tuple[int, int]:
        """The steps of warm-up and decay of a run of so many steps."""
        written = self.warmup_steps, self.decay_steps
        warmup, decay = (max(1, round(x * steps)) if isinstance(x, float) else x for x in written)
        asked = sum(x * steps if isinstance(x, float) else x for x in written)
        over = warmup + decay - steps if asked <= steps + 1e-6 else 0
        if over > 0:  # only because shares were rounded up
            return (warmup, decay - over) if isinstance(written[1], float) else (warmup - over, decay)
        return warmup, decay

    def learning_rate(self, step: int, *, peak: float, steps: int) -> float:
        """The learning rate of optimizer step `step` (from 0) out of `steps`.

        Warm-up rises linearly and reaches `peak` at its last step. A decay would reach min_lr_ratio x peak at step
        `steps`, one past the last, so that no step is wasted at a rate of zero.
        """
        warmup, decay = self.phases(steps)
        if step < warmup:
            return peak * (step + 1) / warmup
        if self.kind == "constant":
            return peak
        start = steps - decay if self.kind == "wsd" else warmup
        progress = max(0, step - start) / max(1, steps - start)  # 0 at the start of the decay, 1 at `steps`
        share = (1 + math.cos(math.pi * progress)) / 2 if self.kind == "cosine" else 1 - progress
        return peak * (self.min_lr_ratio + (1 - self.min_lr_ratio) * share)
