"""What a recipe says of what is measured. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, MinLen


@dataclass(frozen=True)
class MetricsConfig:
    """What is measured and where it goes; metrics.jsonl is always written."""

    every: Annotated[int, Ge(1)] = 10
    """Steps between logged steps, the only ones at which the loop waits for the device."""
    wandb: bool = False
    """Send metrics to Weights & Biases; without an API key the run is kept offline."""
    wandb_project: Annotated[str, MinLen(1)] = "shardwright"
    """Weights & Biases project."""


@dataclass(frozen=True)
class ProfileConfig:
    """Traces by torch.profiler and where their steps' time goes, written to `profile` in the run's folder."""

    trace_steps: Annotated[int, Ge(0)] = 0
    """Steps to trace on rank 0, one after the other; 0 = none. One is enough where steps are alike."""
    after: Annotated[int, Ge(0)] = 10
    """Steps to take first, from where the run starts or goes on: the first ones compile."""
