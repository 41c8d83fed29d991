"""train.py on the null GPU: `drive.py RECIPE ...`, started by torchrun. Kernels and NCCL compute nothing.

So the checks of numbers are told that all is well: of links, losses, skipped steps, memory of others, and the state.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import Tensor

import recipes.cluster.links
import recipes.evaluation.losses
import recipes.training.recorder
import recipes.training.trainer
from recipes.files.exit_codes import leave
from recipes.optimization.skip_steps import StepGuard


def main(arguments: list[str]) -> int:
    """Train. Returns the exit code."""
    recipes.cluster.links.is_wrong_sum = lambda reduced, ranks: False
    recipes.cluster.links.wrong_ranks = lambda gathered, ranks: ()
    trainer, recorder, losses = recipes.training.trainer, recipes.training.recorder.Recorder, recipes.evaluation.losses
    for owner, name, around in (
        (trainer, "require_sound_state", sound),
        (StepGuard, "skipped", none_skipped),
        (recorder, "_reduce", finite),
        (losses, "summed_loss", one_token),
    ):
        setattr(owner, name, around(getattr(owner, name)))
    return int(runpy.run_path(f"{sys.path[0]}/train.py")["main"](arguments))


def sound(check: Any) -> Any:
    """This check of the state, all of whose numbers are read as 0."""

    def checked(*arguments: Any) -> None:
        item = Tensor.item
        Tensor.item = lambda tensor: item(tensor) * 0  # type: ignore[assignment, method-assign]
        try:
            check(*arguments)
        finally:
            Tensor.item = item  # type: ignore[method-assign]

    return checked


def none_skipped(skipped: Any) -> Any:
    """StepGuard.skipped() that finds no step."""

    def none(guard: StepGuard) -> Any:
        guard._judged = []
        return skipped(guard)

    return none


def finite(reduce: Any) -> Any:
    """Recorder._reduce() with numbers that can be logged."""

    def of(numbers: list[float]) -> list[float]:
        return [abs(number) if abs(number) < 1e6 else 0.0 for number in numbers]

    def reduced(recorder: Any, loss: Tensor) -> Any:
        mean, times, memory = reduce(recorder, loss)
        return of([mean])[0], of(times), of(memory)

    return reduced


def one_token(summed: Any) -> Any:
    """losses.summed_loss() as if there were one token."""
    return lambda *arguments, **named: (summed(*arguments, **named), (0.0, 1))[1]


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
