"""Runs of a pipeline: what they log, validate and sample is that of one process, and bad steps are skipped by all."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.dist import start, stop
from recipes.evaluation.opened import Sampling
from recipes.evaluation.scoring import Prompt, Scored, continuations, log_likelihoods
from recipes.recipe.schema import Recipe
from tests.meshes import mesh_degrees
from tests.processes import run_processes
from tests.training import change, rows, training

pytestmark = pytest.mark.slow

ALONE = "1.1.1.1.1"
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zbv": 2}
"""pipeline.schedule -> its stages on each process."""
EQUAL = ("loss", "grad_norm", "z_loss", "validation_loss", "tokens", "lr", "attention_length")
"""Columns that do not depend on the mesh; so do norms of roles."""


def named(recipe: Recipe, mesh: str, schedule: str = "1f1b", *, name: str = "") -> Recipe:
    return change(
        recipe,
        run={"name": name or f"{mesh} {schedule}"},
        mesh=vars(mesh_degrees(mesh)),
        pipeline={"schedule": schedule, "stages_per_rank": SCHEDULES[schedule]},
    )


@pytest.fixture(scope="module")
def recipe(small: Recipe) -> Recipe:
    """Untied, so that a role is on the last stage only; validation is over documents, and its last row is not full."""
    return change(
        small,
        run={"steps": 4},
        model={"layers": 4, "key_value_heads": 4, "vocabulary": 512, "tied_embeddings": False, "init_std": 0.2},
        data={"document_mask": True, "validation_fraction": 0.05},
        batch={"global_batch_size": 4, "micro_batch_size": 1},
        optimizer={"z_loss": 1e-3},
        fsdp={"reshard_after_forward": False},
        metrics={"grad_norms": True},
        validation={"every": 2, "batches": 1000, "sample_tokens": 8},
        checkpoint={"every": 0},
    )


def samples(recipes: Sequence[Recipe]) -> list[Any]:
    """Train each of these; what each run shows after its last step, by rank 0, and what its model says of tokens."""
    world, found = start("cpu", seed=0), []
    for recipe in recipes:
        lines: list[str] = []
        with training(recipe, world) as trainer:
            trainer.console.log = lambda line, lines=lines, **_: lines.append(line)
            assert trainer.run() == 0
        place = next(number for number, line in enumerate(lines) if "how the model goes on" in line)
        found.append((lines[place + 1 : place + 3], *said_of_tokens(trainer)))
    stop()
    return found


def said_of_tokens(trainer: Any) -> tuple[Any, Any]:
    """How likely texts are, and how the model goes on, from a cache where the mesh lets it, as tasks ask it."""
    scored = Scored(trainer.built.model, trainer.built.mesh, trainer.world.device, torch.float32, 64, 128)
    requests = [([*range(length)], [7, 5]) for length in (1, 9, 20)]
    sampling = Sampling(8, temperature=1.0, seed=3)
    prompts = [Prompt([*range(length)], (), lambda text: False, sampling) for length in (1, 9, 20)]
    return [nats for nats, _ in log_likelihoods(scored, requests)], continuations(scored, prompts)


@pytest.fixture(scope="module")
def whole(recipe: Recipe) -> tuple[list[dict[str, Any]], Any]:
    """The rows of one process, and what samples() returns of it."""
    alone = named(recipe, ALONE)
    [[sample]] = run_processes(1, samples, [alone])
    return equal(alone), sample


def equal(recipe: Recipe) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if name in EQUAL or name.startswith("grad_norm/")}
        for row in rows(recipe)
    ]


def assert_same(recipes: Sequence[Recipe], processes: int, whole: tuple[list[dict[str, Any]], Any]) -> None:
    expected, (text, nats, answers) = whole
    assert len(expected) == 6 and "grad_norm/head" in expected[0]
    found = run_processes(processes, samples, recipes)[0]
    for one, sample in zip(recipes, found, strict=True):
        assert equal(one) == [pytest.approx(row, rel=1e-4) for row in expected], one.run.name
        assert (sample[0], sample[2]) == (text, answers), one.run.name
        assert sample[1] == pytest.approx(nats, rel=1e-5), one.run.name


def test_every_schedule_logs_validates_and_samples_as_one_process(recipe: Recipe, whole: Any) -> None:
    assert_same([named(recipe, "2.1.1.1.1", schedule) for schedule in SCHEDULES], 2, whole)


def progress_of_a_step(recipe: Recipe) -> int:
    """How many times it is reported."""
    world = start("cpu", seed=0)
    with training(recipe, world) as trainer:
        moved: list[int] = []
        trainer.clock.progressed = lambda: moved.append(1)
        trainer.take_step()
    stop()
    return len(moved)


def test_forward_and_backward_passes_of_each_micro_batch_are_progress(recipe: Recipe) -> None:
    """With "gpipe", a stage computes the backward passes of all micro-batches after its last forward pass."""
    gpipe = change(named(recipe, "2.1.1.1.1", name="progress"), pipeline={"schedule": "gpipe"})
    assert run_processes(2, progress_of_a_step, gpipe) == [2 * 4] * 2


# Bad steps


def spoil(trainer: Any, kind: str, rank: int) -> Callable[[], None]:
    """Make the next step bad on this rank only. Returns the undo."""
    model = trainer.built.model
    if trainer.world.rank != rank:
        return lambda: None
    block = next(iter(model.blocks))
    if kind == "gradient":

        def spoil_gradient(module: Any, inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda gradient: gradient * math.nan)

        return block.register_forward_hook(spoil_gradient).remove
    if kind == "hidden":
        return block.register_forward_hook(lambda module, inputs, output: output * math.inf).remove
    assert kind == "loss"
    return model.loss.register_forward_hook(lambda module, inputs, output: output * 1e9).remove


KINDS = (("gradient", 0), ("gradient", 3), ("hidden", 1), ("loss", 2))
"""What is wrong in a step on one rank alone: on the first and on the last stage, on one of two replicas."""


def skipping_steps(recipe: Recipe, window: bool) -> tuple[list[int], list[bool], list[float]]:
    """Steps that were skipped, whether each step changed a parameter of this process, and the norms."""
    world = start("cpu", seed=0)
    changed, norms = [], []
    with training(recipe, world) as trainer:
        if window:  # as after many steps
            trainer.guard._window = 8.0 + 0.1 * torch.arange(64) / 64
        for number in range(2 * len(KINDS)):
            before = [parameter.to_local().detach().clone() for parameter in trainer.built.parameters]
            kind, rank = KINDS[number // 2]
            undo = spoil(trainer, kind, rank) if number % 2 else lambda: None
            norms.append(trainer.take_step().norm.item())
            undo()
            trainer.clock.count_step()
            after = [parameter.to_local() for parameter in trainer.built.parameters]
            changed.append(any(not torch.equal(*pair) for pair in zip(before, after, strict=True)))
        skipped = [step for step, _ in trainer.guard.skipped()]
    stop()
    return skipped, changed, norms


def test_all_stages_and_replicas_skip_a_step_that_is_bad_on_one_process_alone(recipe: Recipe) -> None:
    two = change(named(recipe, "2.2.1.1.1", name="skips"), run={"loss_spike_z": 8.0})
    answers = run_processes(4, skipping_steps, two, True)
    assert len({str(norms) for _, _, norms in answers}) == 1  # to the bit
    for skipped, changed, _ in answers:
        assert (skipped, changed) == ([2, 4, 6, 8], [True, False] * len(KINDS))
