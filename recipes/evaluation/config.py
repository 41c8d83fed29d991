"""The [validation] section. Imports no torch."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, MinLen

TASK = "validation_task/"
"""Prefix of the columns of metrics.jsonl with scores on tasks."""


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on text that is not trained on."""

    every: Annotated[int, Ge(0)] = 0
    """Validate every this many steps, and after the last; 0 = never."""
    batches: Annotated[int, Ge(1)] = 8
    """Global batches per validation and source, always the same ones."""
    source: str = ""
    """Text to validate on, as in data.source; "" = the documents that data.validation_fraction holds out."""
    sources: dict[Annotated[str, MinLen(1)], Annotated[str, MinLen(1)]] = field(default_factory=dict)
    """Several texts instead of `source`, each with a name for its loss, such as {web = "web.jsonl", ...}."""
    sample_tokens: Annotated[int, Ge(0)] = 0
    """Tokens of sample text to generate at six validations or fewer and at the end of the run; 0 = none."""
    tasks: tuple[Annotated[str, MinLen(1)], ...] = ()
    """Tasks of the lm-evaluation-harness to evaluate at each validation: names, YAML files and folders of them."""
    task_limit: Annotated[int, Ge(0)] = 0
    """Documents of each task; 0 = all."""
    average: Annotated[int, Ge(0)] = 0
    """Validate the average of the newest so many checkpoints, too, this step's weights included; 0 = none."""
    job: str = ""
    """Evaluate each checkpoint beside the run: "process" (CPU), "process 6,7" (GPUs), "slurm OPTIONS" (of sbatch)."""
    ladder: str = ""
    """A ladder.json of scripts/ladder.py: the report puts what small runs predict beside the losses."""

    @property
    def texts(self) -> dict[str, str]:
        """Name -> source of each text that the run validates on; "" is the name of a single one."""
        return (self.sources or {"": self.source}) if self.every or self.sample_tokens or self.job else {}
