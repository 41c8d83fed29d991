"""What is wrong with checkpoint.keep_best, and what to write instead. Imports no torch."""

from collections.abc import Collection, Iterator, Mapping

from parallel.errors import UserError, listed
from recipes.checkpoint.config import AVERAGE_LOSS, Best, CheckpointConfig
from recipes.evaluation.config import TASK, ValidationConfig


def best_problems(checkpoint: CheckpointConfig, validation: ValidationConfig) -> Iterator[str]:
    """What is wrong with checkpoint.keep_best, if it is not empty."""
    best = Best.named(checkpoint.keep_best)
    if not checkpoint.every or not validation.every:
        yield 'needs checkpoints and validations; write checkpoint.every and validation.every, or keep_best = ""'
        return
    if checkpoint.every % validation.every:
        yield (
            f"needs a validation at every saved step; write a checkpoint.every that is a multiple of"
            f" validation.every = {validation.every}, instead of {checkpoint.every}"
        )
    if best.row.startswith(TASK):
        if validation.job:
            yield 'names a score that is known after its checkpoint is saved; write a loss, or validation.job = ""'
        if not validation.tasks:
            yield "names a task, but there are none; write [validation] tasks"
        if not best.has_direction:
            yield f'does not say which scores are better; write "max:{best.row}", or "min:" for the lowest'
        return
    kinds = ("validation_loss", AVERAGE_LOSS) if validation.average else ("validation_loss",)
    rows = [f"{kind}/{name}" if name else kind for kind in kinds for name in validation.texts]
    if best.row not in rows:
        yield f'is not a row of this run; write {_quoted(rows)}, or "max:{TASK}TASK/METRIC"'
    elif best.highest:
        yield f'would keep the worst checkpoint: lower losses are better; write "{best.row}"'


def require_row(keep_best: str, rows: Mapping[str, bool | None]) -> None:
    """Raises UserError if keep_best names a score that the tasks do not have, or keeps the worst.

    rows: "TASK/METRIC" -> whether a higher value is better, None where that is not known.
    """
    best = Best.named(keep_best)
    if not best.row.startswith(TASK):
        return
    name = best.row.removeprefix(TASK)
    if name not in rows:
        raise UserError(f"checkpoint.keep_best = {keep_best!r}: the tasks have {_quoted([TASK + row for row in rows])}")
    if rows[name] not in (None, best.highest):
        better = "higher" if rows[name] else "lower"
        word = "max" if rows[name] else "min"
        raise UserError(f"checkpoint.keep_best = {keep_best!r}: {better} values are better; write '{word}:{best.row}'")


def _quoted(rows: Collection[str]) -> str:
    return listed((f'"{row}"' for row in rows), last="or")
