"""Work that all processes of a run do together on its checkpoints, and whose errors all of them raise."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from parallel.errors import UserError
from recipes.checkpoint.errors import Damage
from recipes.checkpoint.folder import reason

Value = TypeVar("Value")


def from_main(value: Value, *, group: dist.ProcessGroup) -> Value:
    """The value that rank 0 has, on every process."""
    values = [value]
    dist.broadcast_object_list(values, group=group)
    return values[0]


def run_on_all(work: Callable[[], None], *, group: dist.ProcessGroup) -> None:
    """Run this on every process. It must not communicate. If one process raises an error, all do.

    The error is Damage only if no process has an error of another kind, which an older checkpoint would not avoid.
    """
    mine: tuple[bool, str] = (False, "")
    cause: Exception | None = None
    try:
        work()
    except UserError as error:
        mine = isinstance(error, Damage), str(error)
    except Exception as error:  # a bug, or out of memory
        mine, cause = (False, reason(error)), error
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine, group=group)
    problems = sorted((is_damage, text) for is_damage, text in answers if text)
    if problems:
        is_damage, text = problems[0]
        raise (Damage if is_damage else UserError)(text) from cause
