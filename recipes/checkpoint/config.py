"""What a recipe says of checkpoints. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: Annotated[int, Ge(0)] = 0
    """Steps between checkpoints, and one at the end; 0 = none."""
    keep: Annotated[int, Ge(1)] = 2
    """Newest checkpoints to keep."""
    keep_every: Annotated[int, Ge(0)] = 0
    """Keep those at every so many steps too; 0 = none."""
    asynchronous: bool = True
    """Write a checkpoint while training goes on from a copy in the host's memory; false = wait for the disk."""
    resume: Literal["auto", "never"] = "auto"
    """"auto" continues from the newest checkpoint of this run; "never" refuses a folder that has one."""
    export_hf: bool = False
    """At the end, write the weights to `hf` in the folder of the run, as Hugging Face transformers reads them."""
