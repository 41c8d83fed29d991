"""The learning rate as a function of the step. Imports no torch."""

import math

from recipes.optimization.config import ScheduleConfig


def learning_rate(step: int, *, peak: float, steps: int, schedule: ScheduleConfig) -> float:
    """The learning rate of optimizer step `step` (from 0) out of `steps`.

    Warm-up rises linearly and reaches `peak` at its last step. A decay would reach min_lr_ratio x peak at step `steps`,
    one past the last, so that no step is wasted at a rate of zero.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    start = steps - schedule.decay_steps if schedule.kind == "wsd" else schedule.warmup_steps
    progress = max(0, step - start) / max(1, steps - start)  # 0 at the start of the decay, 1 at `steps`
    share = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * share)
