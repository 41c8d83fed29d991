"""train.py on the null GPU: `drive.py RECIPE ...`, started by torchrun. Kernels and NCCL compute nothing.

So the checks of numbers are told that all is well: of links, losses, skipped steps, memory of others, and the state.
"""

import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from torch import Tensor, nn

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
    recipes.training.trainer.require_sound_state = sound(recipes.training.trainer.require_sound_state)
    StepGuard.skipped = none_skipped  # type: ignore[assignment, method-assign]
    recorder: Any = recipes.training.recorder.Recorder
    recorder._reduce = finite(recorder._reduce)
    losses: Any = recipes.evaluation.losses
    losses.summed_loss = one_token(losses.summed_loss)
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


def none_skipped(guard: StepGuard) -> Iterator[tuple[int, float]]:
    """No step, in the place of StepGuard.skipped()."""
    guard._judged = []
    return iter(())


def finite(reduce: Any) -> Any:
    """Recorder._reduce() with numbers that can be logged."""

    def reduced(recorder: Any, loss: Tensor) -> Any:
        mean, times, memory = reduce(recorder, loss)
        numbers = [[abs(number) if abs(number) < 1e6 else 0.0 for number in part] for part in ([mean], times, memory)]
        return numbers[0][0], numbers[1], numbers[2]

    return reduced


def one_token(summed: Any) -> Any:
    """losses.summed_loss() as if there were one token."""

    def one(model: nn.Module, micro_batches: Iterable[Any], **named: Any) -> tuple[float, int]:
        summed(model, micro_batches, **named)
        return 0.0, 1

    return one


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
