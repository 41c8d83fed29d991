"""The [checkpoint] section. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: Annotated[int, Ge(0)] = 0
    """Save a checkpoint every this many steps, and after the last; 0 = never."""
    keep: Annotated[int, Ge(1)] = 2
    """How many of the newest checkpoints to keep."""
    keep_every: Annotated[int, Ge(0)] = 0
    """Also keep every checkpoint whose step is a multiple of this; 0 = none."""
    asynchronous: bool = True
    """Write checkpoints in the background, from a copy in host memory, while training continues; false = wait."""
    resume: Literal["auto", "never"] = "auto"
    """"auto" resumes from the newest checkpoint of this run; "never" refuses a run folder that has results."""
    export_hf: bool = False
    """After the last step, write the weights to `hf` in the run folder, in the format of Hugging Face transformers."""
