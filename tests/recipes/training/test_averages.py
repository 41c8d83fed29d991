"""validation.average: what is scored, on every mesh, and that the run beside it is the same to the bit."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.config import MeshConfig
from parallel.dist import World
from recipes.checkpoint.average import averaged
from recipes.checkpoint.files import read_manifest
from recipes.checkpoint.state import named_tensors
from recipes.checkpoint.storage import PARAMETERS, local, read_tensors
from recipes.evaluation.losses import mean_loss
from recipes.files.layout import step_folder
from recipes.recipe.schema import Recipe, StageConfig
from tests.meshes import degrees, mesh_degrees
from tests.processes import run_processes
from tests.recipes.checkpoint import small as tiny
from tests.training import change, rows, run_all, train, training

pytestmark = pytest.mark.slow

ROW = "validation_average_loss"
STEPS = 8
FLOAT8 = {"recipe": "tensorwise", "emulate": True, "all_gather": True}
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_width": 32, "router_bias": True}
BF16 = {"fsdp": {"param_dtype": "bfloat16"}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "one process": ("1.1.1.1", {}),
    "one process in bfloat16": ("1.1.1.1", BF16),
    "float8 on one process": ("1.1.1.1", BF16 | {"float8": FLOAT8}),
    "shards gathered in float8": ("1.2.1.1", BF16 | {"float8": FLOAT8}),
    "pipeline": ("2.1.1.1.1", {"model": {"tied_embeddings": True}}),
    "context and replicas": ("2.1.2.1", {}),
    "tensor and shards": ("1.2.1.2", {}),
    "experts": ("1.1.2.1.1.2", {"model": EXPERTS, "experts": {"balance": "bias", "bias_rate": 0.01}}),
}
"""What it is tried on: mesh, and changes to the recipe."""


Runs = Callable[[str], tuple[Recipe, Recipe]]


def processes_of(kind: str) -> int:
    return prod(degrees(KINDS[kind][0])[:5])


def kind_of(recipe: Recipe, kind: str, *, average: int) -> Recipe:
    """Eight steps of this kind, saved and validated after every second."""
    mesh, changes = KINDS[kind]
    return change(
        change(recipe, **changes),
        run={"name": f"{kind} {average}", "steps": STEPS},
        mesh=vars(mesh_degrees(mesh)),
        validation={"every": 2, "batches": 2, "average": average},
        checkpoint={"keep": 4},
        batch={"global_batch_size": 4},
    )


def scores(recipe: Recipe) -> dict[int, float]:
    return {row["step"]: row[ROW] for row in rows(recipe) if ROW in row}


def folder(recipe: Recipe, step: int) -> Path:
    return step_folder(recipe.run.folder / "checkpoints", step)


def tensors_of(recipe: Recipe, step: int) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder(recipe, step).rglob("shard*")) if file.is_file()]


def by_hand(recipe: Recipe, steps: Sequence[int], world: World) -> float:
    """The validation loss of the mean weights of these steps, on one process."""
    with training(change(recipe, mesh=vars(MeshConfig()), validation={"average": 0}), world) as trainer:
        built = trainer.built
        state = {
            name: one for name, one in named_tensors(built.model, built.optimizer)[0].items() if PARAMETERS in name
        }
        total = {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in state.items()}
        for number in steps:
            path = folder(recipe, number)
            read_tensors(path, read_manifest(path), state)
            for name, one in state.items():
                total[name] += local(one)
        for name, one in state.items():
            local(one).copy_(total[name] / len(steps))
        if built.float8_all_gather:
            from parallel.float8 import precompute_scales

            precompute_scales(built.model)
        [text] = trainer.loader.validation_batches(recipe.validation.batches).values()
        return mean_loss(built.model, text, mesh=built.mesh)


@pytest.fixture(scope="module")
def runs(small: Recipe) -> Runs:
    """What trains the same run without an average and with one of three, for each kind of so many processes at once."""
    recipe = change(small, data={"validation_fraction": 0.05})
    pairs = {kind: (kind_of(recipe, kind, average=0), kind_of(recipe, kind, average=3)) for kind in KINDS}

    @cache
    def train_all(processes: int) -> None:
        both = [one for kind, pair in pairs.items() for one in pair if processes_of(kind) == processes]
        assert run_processes(processes, run_all, both) == [[0] * len(both)] * processes

    def pair(kind: str) -> tuple[Recipe, Recipe]:
        train_all(processes_of(kind))
        return pairs[kind]

    return pair


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_is_that_of_the_weights_averaged_by_hand(kind: str, runs: Runs, alone: World) -> None:
    recipe = runs(kind)[1]
    found = scores(recipe)
    assert list(found) == [6, 8]
    assert found[8] == pytest.approx(by_hand(recipe, [4, 6, 8], alone), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_beside_it_is_the_same_to_the_bit(kind: str, runs: Runs) -> None:
    plain, scored = runs(kind)
    columns = ("loss", "validation_loss", "grad_norm")
    ours, others = ([[row.get(one) for one in columns] for row in rows(of) if ROW not in row] for of in (plain, scored))
    assert ours == others and len(ours) == STEPS + STEPS // 2
    for number in (6, 8):
        assert tensors_of(plain, number) == tensors_of(scored, number) != []


def test_a_run_that_stopped_between_two_checkpoints_scores_what_it_would_have(runs: Runs, alone: World) -> None:
    """The checkpoint of the step where it stopped does not count."""
    whole = runs("one process")[1]
    recipe = change(whole, run={"name": "stopped", "steps": 5}, checkpoint={"keep": 3})
    assert train(recipe, alone) == 0
    [(step, score)] = scores(recipe).items()
    assert step == 5 and score == pytest.approx(by_hand(recipe, [2, 4, 5], alone), rel=2e-6)
    assert train(change(recipe, run={"steps": STEPS}), alone) == 0
    assert scores(recipe) == scores(whole) | {5: score}


def flip_a_byte(recipe: Recipe, step: int, shard: str = "shard*") -> Path:
    """Damage the last byte of a shard."""
    [file] = [file for file in folder(recipe, step).rglob(shard) if file.is_file()]
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    return file


@pytest.mark.parametrize("fault", ["damaged", "missing"])
def test_an_average_of_fewer_is_never_scored_and_the_log_says_why(fault: str, runs: Runs, alone: World) -> None:
    whole = runs("one process")[1]
    recipe = change(whole, run={"name": fault, "steps": 4})
    assert train(recipe, alone) == 0
    if fault == "damaged":
        flip_a_byte(recipe, 2)
    else:
        folder(recipe, 2).rename(recipe.run.folder / "elsewhere")
    assert train(change(recipe, run={"steps": STEPS}), alone, silent=False) == 0
    assert scores(recipe) == {8: scores(whole)[8]}
    [line] = [line for line in (recipe.run.folder / "log.txt").read_text().splitlines() if "NOT AVERAGED" in line]
    assert "step      6  NOT AVERAGED: " in line and str(folder(recipe, 2)) in line
    assert [row["loss"] for row in rows(recipe) if "loss" in row] == [
        row["loss"] for row in rows(whole) if "loss" in row
    ]


def test_what_one_rank_cannot_read_no_rank_scores(runs: Runs) -> None:
    whole = runs("tensor and shards")[1]
    recipe = change(whole, run={"name": "one rank", "steps": 4})
    assert run_processes(4, run_all, [recipe]) == [[0]] * 4
    flip_a_byte(recipe, 2, "shard-00003-of-*")
    assert run_processes(4, run_all, [change(recipe, run={"steps": STEPS})]) == [[0]] * 4
    assert scores(recipe) == {8: scores(whole)[8]}


def test_a_fork_scores_once_it_has_checkpoints_enough(runs: Runs, alone: World) -> None:
    whole = runs("one process")[1]
    trunk = f"{runs('one process')[0].run.folder}@4"
    fork = change(whole, run={"name": "fork", "continue_from": trunk, "steps": 10})
    assert train(fork, alone, silent=False) == 0
    assert list(scores(fork)) == [10]
    log = (fork.run.folder / "log.txt").read_text()
    assert log.count("NOT AVERAGED") == 2 and str(folder(fork, 4)) in log


def test_checkpoints_of_the_stage_before_are_not_averaged(runs: Runs, alone: World) -> None:
    # They may be of another rope_theta, which no tensor shows.
    whole = runs("one process")[1]
    longer = {"model.rope_theta": 2 * whole.model.rope_theta}
    stages = (StageConfig("short", 4, {}), StageConfig("long", 10, longer))
    recipe = replace(change(whole, run={"name": "stages", "steps": 10}), stages=stages)
    assert [train(recipe, alone, silent=False) for _ in stages] == [None, 0]
    assert list(scores(recipe)) == [10]
    assert "NOT AVERAGED" not in (recipe.run.folder / "log.txt").read_text()


@pytest.mark.usefixtures("alone")
def test_the_weights_are_their_own_again_when_the_validation_raises(tmp_path: Path) -> None:
    model, optimizer = tiny.trained()
    checkpoints = tiny.checkpoints_in(tmp_path, keep=2)
    checkpoints.save(model, optimizer, step=1)
    tiny.step(model, optimizer, seed=7)
    before = tiny.snapshot(model, optimizer)
    with pytest.raises(ValueError, match="validation"), averaged(model, optimizer, [checkpoints.path(1)]) as problem:
        assert problem == ""
        changed = tiny.snapshot(model, optimizer)
        raise ValueError("validation")
    after = tiny.snapshot(model, optimizer)
    weights = [name for name in before if name.endswith(" ")]
    assert weights and not any(torch.equal(before[name], changed[name]) for name in weights)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_runs_next_computes_with_the_weights_of_the_run(runs: Runs, alone: World) -> None:
    """Such as tasks: weights in 16 bits that were gathered of the average must not stay."""
    recipe = runs("one process in bfloat16")[1]
    with training(change(recipe, validation={"average": 0}), alone) as trainer:
        built = trainer.built

        def loss() -> float:
            [text] = trainer.loader.validation_batches(2).values()
            return mean_loss(built.model, text, mesh=built.mesh)

        before = loss()
        with averaged(built.model, built.optimizer, [folder(recipe, 4)]) as problem:
            assert problem == "" and loss() != before
        assert loss() == before


def test_several_texts_have_a_column_each(small: Recipe, corpus: Path, alone: World) -> None:
    texts = {"one": str(corpus), "other": str(corpus)}
    validation = {"every": 2, "batches": 1, "average": 2, "sources": texts}
    recipe = change(small, run={"name": "texts", "steps": 4}, validation=validation)
    assert train(recipe, alone, silent=False) == 0
    found = [(row["step"], name) for row in rows(recipe) for name in row if name.startswith(ROW)]
    assert found == [(4, f"{ROW}/one"), (4, f"{ROW}/other")]
    line = "step      4  validation loss of other of the average of 2 checkpoints "
    assert line in (recipe.run.folder / "log.txt").read_text()
