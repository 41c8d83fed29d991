"""The twins of the cases of tests/parallel/combinations.py, in two steps, and what tests ask of them."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from parallel.dist import on_main, start, stop
from parallel.mesh import build_mesh
from recipes.lab.prove.compare import Comparison
from recipes.lab.prove.prove import against_one_process
from recipes.lab.prove.twin import LENGTH, WORDS, Twin, twins_of, write_words
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.training import trainer
from recipes.training.build import Built, build
from recipes.training.process import Process
from recipes.training.step import train_step
from tests.compiling import compiling_in_turn, graphs_only
from tests.parallel.combinations import COVERING, GENERATED, processes_of, refusal_of
from tests.processes import run_processes
from tests.proofs import recipe_of


def twin_of(case: str, folder: Path = Path()) -> Twin:
    """The twin of a case. folder: where write_words() has written, and runs go, each to one of its own."""
    recipe = recipe_of(case, folder)
    [twin] = twins_of(recipe, folder, on_gpu=False, processes=processes_of(case), nodes=1)
    return shortened(twin).with_values("", **{"run.name": case})


def shortened(twin: Twin) -> Twin:
    """Two steps of the same with as few micro-batches as can be several, all of which count."""
    rows = twin.degrees.data_parallel * twin.recipe.batch.micro_batch_size
    few = {"run.steps": 2, "run.loss_spike_z": 0.0, "checkpoint.every": 0}
    few |= {"batch.global_batch_size": 2 * twin.degrees.pipeline * rows}
    few |= {"validation.every": 2, "validation.batches": 1, "validation.average": 0}
    return twin.with_values("-short", **few)


# Proofs


@contextmanager
def lean() -> Iterator[None]:
    """Runs neither look for versions, nor measure links, nor collect garbage when they begin and end."""
    without = mock.patch.object(trainer, "without_garbage_collection", nullcontext)
    with mock.patch.object(Process, "environment", lambda *_, **__: {}), without:
        yield


def compare_cases(
    cases: list[str],
    folder: Path,
    generated: Collection[str] = GENERATED,
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Comparison]:
    """How far the twins of cases are from one process, in the processes that call this, which are as many as theirs.

    Args:
        cases: of one number of processes.
        folder: an empty one, or that of other cases.
        generated: the cases that run generated code; of others, that are compiled, the graphs run.
        fault: puts something wrong in place.
    """
    world, found = start("cpu", seed=0), []
    on_main(world, partial(write_words, folder))
    for case in cases:
        torch._dynamo.reset()
        with lean(), fault(), compiling_in_turn() if case in generated else graphs_only():
            found.append(against_one_process(twin_of(case, folder), world).comparison)
    stop()
    return found


class Compared(dict[str, Comparison]):
    """Case -> how far it is from one process.

    The first test that asks for a case compares with it all those of as many processes that CI proves, or that it does
    not. A test that asks for what this torch refuses is skipped.
    """

    def __init__(self, cases: dict[int, list[str]], folder: Path) -> None:
        super().__init__()
        self._cases, self._folder, self._begun = cases, folder, set[tuple[int, bool]]()

    def __missing__(self, case: str) -> Comparison:
        skip_refused(case)
        processes, covers = processes_of(case), case in COVERING
        assert (processes, covers) not in self._begun, f"comparing cases of {processes} processes has failed before"
        self._begun.add((processes, covers))
        some = [one for one in self._cases[processes] if (one in COVERING) == covers and not refusal_of(one)]
        self.update(zip(some, run_processes(processes, compare_cases, some, self._folder)[0], strict=True))
        return self[case]


def each_case(cases: dict[int, list[str]]) -> list[Any]:
    """The cases as values of a test's argument, those that CI leaves out with a mark."""
    marks = {case: () if case in COVERING else pytest.mark.exhaustive for some in cases.values() for case in some}
    return [pytest.param(case, marks=mark) for case, mark in marks.items()]


def skip_refused(case: str) -> None:
    if reason := refusal_of(case):
        pytest.skip(reason)


def require_proved(comparison: Comparison) -> None:
    first = comparison.first
    assert not comparison.is_wrong, f"{first}, {first and first.error}: {comparison.why}"


# Single steps


def built_for(case: str) -> Built:
    """What a run of the case's twin trains, in a process group that this starts."""
    world, twin = start("cpu", seed=0), twin_of(case)
    return build(twin.recipe, world, mesh=build_mesh(twin.degrees, device_type="cpu"))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of four rows."""
    tokens = torch.randint(1, WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:].clone()


def take_step(built: Built, step: int, batch: tuple[Tensor, Tensor], *, rows: int = 1, rate: float = 1e-3) -> float:
    """The gradient norm of a step on this process's rows of a batch, so many of them in a micro-batch."""
    inputs, targets = (whole[built.mesh.data_rank :: built.mesh.data_ranks] for whole in batch)
    micro_batches = [(inputs[n : n + rows], targets[n : n + rows], None) for n in range(0, len(inputs), rows)]
    guard, clock = StepGuard(built.mesh, device=inputs.device, max_skipped_steps=3), RunClock(inputs.device)
    return train_step(built, micro_batches, step=step, learning_rate=rate, guard=guard, clock=clock).norm.item()
