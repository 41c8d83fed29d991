"""The [checkpoint] section. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

VALIDATION = "validation"
"""The key of a checkpoint's progress with the values of the validation at its step, by column of metrics.jsonl."""
AVERAGED = "averaged"
"""The key of a checkpoint's progress with the steps whose average its validation scored."""
AVERAGE_LOSS = "validation_average_loss"
"""The column of metrics.jsonl with the loss of that average, /NAME if there are several texts."""
KEEP_BEST = "keep_best"
"""The key of a checkpoint's progress with what its run kept the best of."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: Annotated[int, Ge(0)] = 0
    """Save a checkpoint every this many steps, and after the last; 0 = never."""
    keep: Annotated[int, Ge(1)] = 2
    """How many of the newest checkpoints to keep."""
    keep_every: Annotated[int, Ge(0)] = 0
    """Also keep every checkpoint whose step is a multiple of this; 0 = none."""
    keep_best: str = ""
    """Also keep the best checkpoint by a column of metrics.jsonl: "validation_loss", "max:validation_task/x/acc"."""
    asynchronous: bool = True
    """Write checkpoints in the background, from a copy in host memory, while training continues; false = wait."""
    memory_every: Annotated[int, Ge(0)] = 0
    """Also keep the state in the memory of the nodes every this many steps, in two nodes each; 0 = never."""
    memory_folder: Annotated[str, MinLen(1)] = "/dev/shm"
    """A folder of every node's own, in memory or on a fast disk, for what memory_every keeps."""
    remote: str = ""
    """Also copy checkpoints to a server, such as "s3://bucket/runs", in the background; resume there without a disk."""
    resume: Literal["auto", "never"] = "auto"
    """"auto" resumes from the newest checkpoint of this run; "never" refuses a run folder that has results."""
    export_hf: bool = False
    """After the last step, write the weights to `hf` in the run folder, in the format of Hugging Face transformers."""


@dataclass(frozen=True)
class Best:
    """What checkpoints are compared by: checkpoint.keep_best."""

    row: str
    """A column of metrics.jsonl."""
    highest: bool
    has_direction: bool
    """Whether "min:" or "max:" was written; otherwise the lowest is the best."""

    @classmethod
    def named(cls, text: str) -> "Best":
        """The comparison that a value of checkpoint.keep_best asks for."""
        direction, colon, row = text.partition(":")
        if colon and direction in ("min", "max"):
            return cls(row, direction == "max", True)
        return cls(text, False, False)

    def of(self, values: Iterable[tuple[int, float]]) -> tuple[int, float] | None:
        """The best (step, value) of these, oldest first; of equal ones the oldest. None if there are none."""
        return min(values, key=lambda one: -one[1] if self.highest else one[1], default=None)
