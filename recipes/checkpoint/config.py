"""The [checkpoint] section of a recipe. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: Annotated[int, Ge(0)] = 0
    """Steps between checkpoints; one more is saved at the end. 0 = save none."""
    keep: Annotated[int, Ge(1)] = 2
    """How many of the newest checkpoints to keep."""
    keep_every: Annotated[int, Ge(0)] = 0
    """Also keep the checkpoints whose step is a multiple of this; 0 = none."""
    asynchronous: bool = True
    """Write checkpoints from a copy in host memory while training continues; false = wait for the disk."""
    resume: Literal["auto", "never"] = "auto"
    """"auto" continues from the newest checkpoint of this run; "never" refuses a run folder that has one."""
    export_hf: bool = False
    """At the end, write the weights to `hf` in the run folder, in the format of Hugging Face transformers."""
