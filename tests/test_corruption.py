"""Runs whose memory is corrupted: nothing wrong is saved, the message says where it is, and the run goes back."""

import json
import math
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.errors import UserError
from parallel.state_check import named_state
from recipes.checkpoint.look import table
from recipes.files.exit_codes import CORRUPTED, FINISHED, POISONED
from recipes.optimization.adamw import local_of
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from recipes.training.trainer import Trainer
from tests.commands import run_command
from tests.meshes import mesh_degrees
from tests.processes import run_processes
from tests.scripts.nodes import ROOT, arguments, environment, losses
from tests.training import change, rows, run_all, train, training

pytestmark = pytest.mark.slow

BEFORE = 6
"""The state is corrupted before this step is taken; steps 4 and 8 are saved."""


def flip(bit: int) -> Callable[[Tensor], None]:
    def strike(tensor: Tensor) -> None:
        words = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        words.view(-1)[-1:] ^= 1 << bit

    return strike


def put(value: float) -> Callable[[Tensor], None]:
    return lambda tensor: tensor.view(-1)[:1].fill_(value)


NORM = "model.blocks.1.feed_forward_norm.weight"
COUNTER = NORM.replace("model", "optimizer", 1) + ".step"
FAULTS: dict[str, tuple[int, str, Callable[[Tensor], None]]] = {
    "flipped weight of rank 0": (0, "model.embedding.weight", flip(12)),  # the lowest bits may be rounded away
    "flipped moment of rank 3": (3, NORM.replace("model", "optimizer", 1) + ".exp_avg_sq", flip(3)),
    "flipped moment of an embedding": (3, "optimizer.embedding.weight.exp_avg", flip(12)),
    "flipped step counter": (2, COUNTER, flip(1)),
    "flipped norm": (1, NORM, flip(12)),
    "NaN weight": (1, NORM, put(math.nan)),
    "infinite moment": (2, "optimizer.embedding.weight.exp_avg", put(math.inf)),
}
"""Name -> (rank, tensor, what happens to its shard there)."""


def strike(trainer: Trainer, fault: str) -> None:
    rank, name, change_shard = FAULTS[fault]
    if trainer.world.rank == rank:
        state = named_state(trainer.built.model, trainer.built.parameters, trainer.built.optimizer)
        change_shard(local_of(state[name]).detach())


def train_with(recipe: Recipe, cases: list[str]) -> list[tuple[int, str]]:
    """Exit code and last line of a run for each case: a fault, which strikes before step BEFORE, or "FAULT on MESH"."""
    from parallel.dist import start, stop

    world, found = start("cpu", seed=0), []
    for case in cases:
        lines: list[str] = []
        fault, _, axes = case.partition(" on ")
        mesh = vars(mesh_degrees(axes)) if axes else {}
        with training(change(recipe, run={"name": case.replace(" ", "-")}, mesh=mesh), world) as trainer:
            take_step, log = trainer.take_step, trainer.console.log

            def struck_step(trainer: Trainer = trainer, fault: str = fault, take_step: Any = take_step) -> Any:
                if trainer.step == BEFORE - 1 and fault in FAULTS:
                    strike(trainer, fault)
                return take_step()

            trainer.take_step = struck_step
            trainer.console.log = lambda text="", lines=lines, log=log, **style: (lines.append(text), log(text))[1]
            found.append((trainer.run(), lines[-1]))
    stop()
    return found


@pytest.fixture(scope="module")
def recipe(small: Recipe) -> Recipe:
    """Twelve steps of two replicas of two shards, saved after every fourth."""
    mesh = {"replicate": 2, "shard": 2}
    return change(small, run={"steps": 12}, mesh=mesh, checkpoint={"every": 4}, schedule={"warmup_steps": 0})


@pytest.fixture(scope="module")
def struck(recipe: Recipe) -> dict[str, tuple[set[int], set[str], Path]]:
    """Fault -> (exit codes and last lines of the four ranks, the run's folder)."""
    answers = run_processes(4, train_with, change(recipe, run={"max_skipped_steps": 2}), list(FAULTS))
    return {
        fault: (
            {code for code, _ in ranks},
            {line for _, line in ranks},
            Path(recipe.run.output) / fault.replace(" ", "-"),
        )
        for fault, ranks in zip(FAULTS, zip(*answers, strict=True), strict=True)
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_a_corrupt_state_is_not_saved_and_all_ranks_exit_alike(fault: str, struck: dict[str, Any]) -> None:
    codes, last_lines, folder = struck[fault]
    assert codes == {CORRUPTED} and len(last_lines) == 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_last_line_names_tensor_and_ranks_of_a_corrupt_state(fault: str, struck: dict[str, Any]) -> None:
    [line] = struck[fault][1]
    rank, name, _ = FAULTS[fault]
    node = platform.node()
    if "flipped" in fault:
        assert f"{name} differs between rank {rank % 2} on {node} and rank {rank % 2 + 2} on {node}" in line
    else:
        assert f"{name} has NaN or infinite values on rank {rank} on {node}" in line
    assert line.startswith(f"CORRUPTED after step {7 if fault == 'NaN weight' else 8}: ")
    assert line.endswith("/checkpoints/step-00000004 is as it was; run the same command again")


def test_replicas_are_compared_between_saves(recipe: Recipe) -> None:
    often = change(recipe, run={"check_replicas_every": 3, "output": f"{recipe.run.output}/often"})
    answers = run_processes(4, train_with, change(often, checkpoint={"every": 0}), ["flipped weight of rank 0"])
    assert {code for [(code, _)] in answers} == {CORRUPTED}
    assert answers[0][0][1].startswith("CORRUPTED after step 6: model.embedding.weight differs ")


ON_AXES = {
    "flipped weight of rank 0 on 2.1.2.1": ["model.embedding.weight differs between rank 0 and rank 2"],
    "flipped norm on 2.1.1.2": [f"{NORM} differs between rank {ranks}" for ranks in ("0 and rank 1", "1 and rank 3")],
    "flipped step counter on 1.1.2.2": [f"{COUNTER} differs between rank 2 and rank 3"],
    "flipped weight of rank 0 on 2.1.1.1.2": ["model.embedding.weight differs between rank 0 and rank 2"],
    "flipped moment of an embedding on 2.1.2.1.1": [
        "optimizer.embedding.weight.exp_avg differs between rank 1 and rank 3"
    ],
    "NaN weight on 1.2.1.2": [f"{NORM} has NaN or infinite values on rank 1"],
}
"""A fault on a mesh, and what the last line says."""


def test_what_processes_along_each_axis_must_share_is_compared(recipe: Recipe) -> None:
    often = change(recipe, run={"check_replicas_every": 3}, checkpoint={"every": 0})
    answers = run_processes(4, train_with, often, list(ON_AXES))
    assert answers == [answers[0]] * 4
    for (code, line), told in zip(answers[0], ON_AXES.values(), strict=True):
        assert code == CORRUPTED and line.startswith("CORRUPTED after step 6: ")
        assert [one for one in told if one not in line.replace(f" on {platform.node()}", "")] == []


OF_EXPERTS = {
    # Two replicas of two tensor parts, over which the experts are divided.
    ("1.2.1.1.2.2", 1, "blocks.0.feed_forward.experts.up_proj"): "differs between rank 1 and rank 3",
    ("1.1.2.1.2.2", 3, "routers.1.weight"): "differs between rank 2 and rank 3",
    ("1.2.1.1.2.2", 0, "routers.1.bias"): "differs from the other copies on rank 0",
    # No process has the experts of another one.
    ("1.1.2.1.2.2", 2, "blocks.1.feed_forward.experts.down_proj"): None,
    ("1.1.2.1.2.2", 2, "routers.0.bias"): "differs from the other copies on rank 2",
    ("2.1.2.1.1.2", 3, "routers.1.bias"): "differs between rank 2 and rank 3",
}
"""(mesh, rank, parameter or bias of which a bit flips there) -> what is said of it."""


def test_only_processes_that_hold_the_same_experts_are_compared(small: Recipe) -> None:
    sparse = {"experts": 4, "experts_per_token": 2, "expert_width": 16, "router": "sigmoid", "router_bias": True}
    found = run_processes(4, flip_experts, change(small, model=sparse, fsdp={"reshard_after_forward": False}))
    for (case, said), *texts in zip(OF_EXPERTS.items(), *found, strict=True):
        expected = "" if said is None else f"model.{case[-1]} {said}"
        assert {text.replace(f" on {platform.node()}", "") for text in texts} == {expected}, case


def flip_experts(recipe: Recipe) -> list[str]:
    """What is said of the state after each flip of OF_EXPERTS; "" if nothing is."""
    from parallel.dist import start, stop
    from parallel.mesh import build_mesh
    from recipes.training.build import build
    from recipes.training.step import corruption

    world, found, built = start("cpu", seed=0), [], {}
    for mesh, rank, name in OF_EXPERTS:
        if mesh not in built:
            built[mesh] = build(recipe, world, mesh=build_mesh(mesh_degrees(mesh), device_type="cpu"))
            assert corruption(built[mesh], world) is None, mesh
        tensors = dict([*built[mesh].model.named_parameters(), *built[mesh].model.named_buffers()])
        for expected in (True, False):  # the second flip undoes the first
            if world.rank == rank:
                flip(3)(local_of(tensors[name]).detach())
            error = corruption(built[mesh], world)
            if expected:
                found.append("" if error is None else str(error))
            else:
                assert error is None, error
    stop()
    return found


def test_bad_batches_with_a_sound_state_still_end_with_76(small: Recipe) -> None:
    bad = change(small, run={"name": "bad", "max_skipped_steps": 2}, optimizer={"lr": 1e-3})
    assert run_processes(1, train_on_bad_batches, bad) == [POISONED]


def train_on_bad_batches(recipe: Recipe) -> int:
    from parallel.dist import start, stop

    world = start("cpu", seed=0)
    with training(recipe, world) as trainer:
        trainer.built.model.embedding.register_forward_hook(lambda module, inputs, output: output * math.nan)
        code = trainer.run()
    stop()
    return code


def test_everything_at_once_never_differs_between_replicas(recipe: Recipe) -> None:
    """Float8, accumulation, validation, bfloat16 moments; compared after each of 12 steps."""
    everything = change(
        recipe,
        run={"steps": 12, "check_replicas_every": 1, "name": "everything"},
        float8={"recipe": "tensorwise", "emulate": True, "all_gather": True},
        activation_checkpointing={"mode": "selective"},
        fsdp={"param_dtype": "bfloat16"},
        optimizer={"state_dtype": "bfloat16", "betas": (0.9, 0.95)},
        checkpoint={"every": 6},
        validation={"every": 5},
    )
    assert [code for [(code, _)] in run_processes(4, train_with, everything, ["none"])] == [FINISHED] * 4
    assert not [row for row in rows(change(everything, run={"name": "none"})) if row.get("skipped")]


def save_nan(recipe: Recipe, good: int) -> str:
    """A run that has checkpoints of step 2, if good, and of step 4 with NaN, as older versions wrote; then resume."""
    from parallel.dist import start, stop

    world = start("cpu", seed=0)
    assert train(change(recipe, run={"steps": 2}, checkpoint={"every": 2 if good else 0}), world) == FINISHED
    with training(change(recipe, run={"steps": 4}), world) as trainer:
        with torch.no_grad():
            trainer.built.parameters[-1].to_local().view(-1)[0] = math.nan
        trainer.checkpoints.save(trainer.built.model, trainer.built.optimizer, step=4, progress={})
        trainer.checkpoints.finish()
    try:
        return str(train(recipe, world, silent=False))
    except UserError as error:
        return str(error)
    finally:
        stop()


def test_a_checkpoint_with_nan_is_set_aside_and_the_one_before_is_resumed(small: Recipe) -> None:
    recipe = change(small, run={"name": "older"}, schedule={"warmup_steps": 0})
    assert run_processes(1, save_nan, recipe, True) == [str(FINISHED)]
    names = {path.name for path in (recipe.run.folder / "checkpoints").iterdir()}
    assert "damaged-step-00000004" in names
    log = (recipe.run.folder / "log.txt").read_text()
    assert "step-00000004 has NaN or infinite values in model.norm.weight (tensors with such values: 1)" in log
    assert [row["step"] for row in rows(recipe)] == list(range(1, 9))


def test_verify_names_a_checkpoint_with_nan_that_is_otherwise_intact(small: Recipe) -> None:
    recipe = change(small, run={"name": "verified"}, schedule={"warmup_steps": 0})
    run_processes(1, save_nan, recipe, True)
    folder = recipe.run.folder / "checkpoints"
    found = {path.name: not code for path in folder.iterdir() for _, code in list(table([path], thorough=True))[1:]}
    assert found == {"damaged-step-00000004": False, "step-00000006": True, "step-00000008": True}
    [_, (line, _)] = table([folder / "damaged-step-00000004"], thorough=True)
    assert "is as it was written, but has NaN or infinite values in model.norm.weight" in line


def test_a_run_whose_only_checkpoint_has_nan_is_refused_and_it_is_named(small: Recipe) -> None:
    recipe = change(small, run={"name": "only"}, schedule={"warmup_steps": 0})
    [answer] = run_processes(1, save_nan, recipe, False)
    assert "step-00000004 has NaN or infinite values in model.norm.weight" in answer
    assert "to begin anew remove or rename" in answer


def test_a_restart_after_a_flipped_bit_gives_the_losses_of_an_undisturbed_run(tmp_path: Path, corpus: Path) -> None:
    config, *overrides = arguments(tmp_path, corpus, "run", "--run.steps", "12", "--mesh.replicate", "2")
    words = [str(ROOT / config), *overrides, "--run.name"]
    recipe = load(words[0], [*words[1:], "well"])
    assert run_processes(2, run_all, [recipe]) == [[FINISHED]] * 2
    launcher = [sys.executable, ROOT / "scripts/launch.py", "--standalone", "--nproc-per-node=2"]
    ill = [ROOT / "tests/ill_train.py", "flip_once", "1", "6", ROOT / "train.py", *words, "flip_once"]
    code, out, err = run_command("scripts/supervise.py", *launcher, *ill, cwd=tmp_path, env=environment(RESTARTS="2"))
    assert code == FINISHED, err
    assert f"attempt 1 crashed, exit code {CORRUPTED}; newest checkpoint: step 4" in err
    assert out.count("CORRUPTED after step 8: model.embedding.weight differs between ") == 1
    assert losses(tmp_path, "flip_once") == losses(tmp_path, "well")
    ends = [
        json.loads((tmp_path / "runs" / name / "checkpoints/step-00000012/manifest.json").read_text())["files"]
        for name in ("well", "flip_once")
    ]
    assert ends[0] == ends[1]
