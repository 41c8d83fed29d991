"""The [metrics] and [profile] sections. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

TRACKERS = {"wandb": "recipes.metrics.tracking:Tracker", "tensorboard": "recipes.metrics.tracking:TensorBoard"}
"""What opens each tracker, beside those of plug-ins: see tracker() in recipes/plugins/register.py."""
COLUMNS = """step tokens stage time loss grad_norm lr matrix_lr z_loss balance_loss router_z_loss step_seconds
data_seconds eta_seconds epochs tokens_per_second tokens_per_second_per_device tflops_per_device mfu mfu_full
attention_length peak_memory_gib reserved_memory_gib allocation_retries allocation_failures gpu_utilization
gpu_power_watts skipped documents goodput wall_seconds stragglers plan validation_loss validation_average_loss"""


@dataclass(frozen=True)
class MetricsConfig:
    """How often metrics are logged, and where; metrics.jsonl is always written."""

    every: Annotated[int, Ge(1)] = 10
    """Log every this many steps; only at these steps does the loop wait for the device."""
    grad_norms: bool = False
    """Also log the gradient norm of embedding, head, norms, attention, feed-forward and routers, each by itself."""
    attention_logits: bool = False
    """Also log attention_logit/LAYER, the largest since the last row; costs a product of queries and keys per step."""
    by_source: bool = True
    """Also log loss/NAME and tokens/NAME of each source of a data.mixture."""
    wandb: bool = False
    """Also log to Weights & Biases; without an API key or a server the run stays offline, for `wandb sync` later."""
    wandb_project: Annotated[str, MinLen(1)] = "shardwright"
    """Name of the Weights & Biases project."""
    tensorboard: bool = False
    """Also write for TensorBoard, to `tensorboard` in the run folder; needs the package tensorboard."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Where rows also go, by name: those of plug-ins, and the two above, which need no name here."""
    picture: bool = True
    """Write report.html and report.md, as scripts/plot.py does, at validations and when the run ends."""
    calibrated_by: str = ""
    """File, as of --plan --calibrated-by, for the plan that a finished run is compared with; a CPU has none."""


@dataclass(frozen=True)
class ProfileConfig:
    """Traces of torch.profiler and a breakdown of their step time, written to `profile` in the run folder."""

    trace_steps: Annotated[int, Ge(0)] = 0
    """Consecutive steps to trace on rank 0; 0 = none. One is enough if all steps are alike."""
    after: Annotated[int, Ge(0)] = 10
    """Steps to run before the first trace, counted from the start or resume: the first steps compile."""
