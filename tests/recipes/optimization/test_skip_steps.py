"""Skipped steps change no bit of the state, and looking for them does not wait for the device."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel import passes  # where a step finds gradient_norm
from recipes.files.exit_codes import POISONED
from recipes.recipe.schema import Recipe
from recipes.training import step as step_module
from tests.meshes import mesh_degrees
from tests.processes import run_processes
from tests.training import change, take_step, training

pytestmark = pytest.mark.slow

BAD = 2
"""Index of the bad step, the third."""


@pytest.fixture
def four_steps(small: Recipe, tmp_path: Path) -> Recipe:
    """Four steps of two micro-batches on two processes, in a folder of the test's own; nothing is saved."""
    return change(
        small,
        run={"steps": 4, "output": str(tmp_path / "runs"), "name": "small"},
        batch={"micro_batch_size": 2},
        schedule={"warmup_steps": 0},
        checkpoint={"every": 0},
    )


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, "_tensor", tensor)  # of float8 all-gather


def state(trainer: Any) -> str:
    """A hash of all bits of parameters, moments and step counters of this process."""
    found = hashlib.sha256()
    for parameter in trainer.built.parameters:
        values = [parameter.detach(), *(trainer.built.optimizer.state[parameter].values())]
        for value in values:
            found.update(local(value).contiguous().numpy().tobytes())
    return found.hexdigest()


def scales(trainer: Any) -> list[float]:
    """The scales that float8 all-gather computes after each step."""
    found = [parameter._local_tensor for parameter in trainer.built.parameters]
    return [t._precomputed_scale.item() for t in found if getattr(t, "_precomputed_scale", None) is not None]


def spoil(trainer: Any, kind: str) -> Callable[[], None]:
    """Make the next step bad in one of its micro-batches, on the last rank, or with "norm" on all. Returns the undo."""
    whole = passes.gradient_norm
    micro_batches = []

    def spoil_output(module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        """Of the embedding in the second micro-batch, or of the model, the loss, in the first."""
        micro_batches.append(1)
        number = math.inf if kind == "infinite loss" else math.nan
        return output + number if len(micro_batches) == (2 if kind == "embedding" else 1) else None

    def spoil_gradient(module: Any, inputs: Any, output: Tensor) -> None:
        """Of this rank, before it is summed with that of the others."""
        output.register_hook(lambda gradient: gradient * (math.inf if kind == "infinite gradient" else math.nan))

    def spoil_shard(parameters: list[Any]) -> Tensor:
        gradient = parameters[-1 if "norm" in kind else 0].grad  # of the head's norm, or of the embedding
        if kind == "rounded shard of a norm":
            gradient.to_local().mul_(1 + 1e-6)
            return whole(parameters)
        gradient.to_local().view(-1)[0] = math.inf if "infinite" in kind else math.nan
        return whole(parameters)

    def spoil_norm(parameters: list[Any]) -> Tensor:
        return whole(parameters) * math.nan

    is_last = trainer.world.rank == trainer.world.size - 1
    handles = []
    if kind == "norm":
        passes.gradient_norm = spoil_norm  # type: ignore[assignment]
    elif is_last and "shard" in kind:
        passes.gradient_norm = spoil_shard  # type: ignore[assignment]
    elif is_last and "gradient" in kind:
        handles.append(trainer.built.model.norm.register_forward_hook(spoil_gradient))
    elif is_last:
        spoiled = trainer.built.model.embedding if kind == "embedding" else trainer.built.model
        handles.append(spoiled.register_forward_hook(spoil_output))

    def undo() -> None:
        passes.gradient_norm = whole  # type: ignore[assignment]
        for handle in handles:
            handle.remove()

    return undo


def steps(recipe: Recipe, kind: str, world: Any) -> dict[str, Any]:
    """What each step left, where the third one is bad in this way; "left out": where it is not taken at all."""
    with training(change(recipe, run={"name": kind}), world) as trainer:
        hashes, seen_scales, losses = [], [], []
        for number in range(recipe.run.steps):
            if number == BAD and kind == "left out":
                trainer.clock.count_step()
                continue
            undo = spoil(trainer, kind) if number == BAD else None
            loss = take_step(trainer).loss
            if undo:
                undo()
            trainer.clock.count_step()
            hashes.append(state(trainer))
            seen_scales.append(scales(trainer))
            losses.append(loss.item())
        skipped = dict(trainer.guard.skipped())
    return {"hashes": hashes, "scales": seen_scales, "skipped": skipped, "losses": losses}


KINDS = ("embedding", "gradient", "infinite gradient", "shard", "loss", "infinite loss", "norm")


def all_kinds(recipe: Recipe, kinds: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    from parallel.dist import start, stop

    world = start("cpu", seed=0)
    found = {kind: steps(recipe, kind, world) for kind in kinds}
    stop()
    return found


def assert_bad_step_left_no_trace(answers: list[dict[str, dict[str, Any]]]) -> None:
    for found in answers:
        left_out = found.pop("left out")
        for kind, answer in found.items():
            hashes = answer["hashes"]
            assert hashes[BAD] == hashes[BAD - 1], kind
            assert answer["scales"][BAD] == answer["scales"][BAD - 1]
            # All ranks name a norm that was bad, even where their own replica's was finite.
            assert {step: math.isfinite(norm) for step, norm in answer["skipped"].items()} == {BAD + 1: False}, kind
            # As if that step's batch had been left out.
            assert hashes[:BAD] + hashes[BAD + 1 :] == left_out["hashes"], kind
            assert len(set(hashes)) == len(hashes) - 1


def test_a_bad_step_changes_no_bit_on_two_processes(four_steps: Recipe) -> None:
    assert_bad_step_left_no_trace(run_processes(2, all_kinds, four_steps, ("left out", *KINDS)))


def test_a_bad_step_changes_no_bit_in_bfloat16_with_replicas_and_float8_all_gather(four_steps: Recipe) -> None:
    """2 x 2 processes: a NaN in a shard of one replica must skip the step in the other replica too."""
    hybrid = change(
        four_steps,
        mesh={"replicate": 2, "shard": 2},
        batch={"micro_batch_size": 1},
        fsdp={"param_dtype": "bfloat16"},
        float8={"recipe": "tensorwise", "emulate": True, "all_gather": True},
    )
    answers = run_processes(4, all_kinds, hybrid, ("left out", "gradient", "shard", "loss"))
    assert all(answer["left out"]["scales"][0] for answer in answers)
    assert_bad_step_left_no_trace(answers)


def test_a_bad_step_changes_no_bit_without_clipping_on_one_process(four_steps: Recipe) -> None:
    alone = change(four_steps, optimizer={"grad_clip": 0.0})
    assert_bad_step_left_no_trace(run_processes(1, all_kinds, alone, ("left out", "gradient", "infinite loss", "norm")))


# The shard of the head's norm is a copy on each process of a tensor group, and only one of them is spoiled.
ON_ONE_RANK = ("embedding", "infinite gradient", "shard", "shard of a norm", "infinite shard of a norm", "loss")
MESHES = ("1.2.1.2", "2.1.1.2", "1.1.2.2")


def bad_and_good_steps(recipe: Recipe) -> dict[str, tuple[list[str], dict[int, float]]]:
    """By mesh: hashes after a good step and then after a bad and a good one for each kind, and the skipped steps."""
    from parallel.dist import start, stop

    world, found = start("cpu", seed=0), {}
    for axes in MESHES:
        degrees = vars(mesh_degrees(axes))
        with training(change(recipe, mesh=degrees, run={"name": axes}), world) as trainer:
            hashes = []
            for kind in ("", *(kind for one in ON_ONE_RANK for kind in (one, ""))):
                undo = spoil(trainer, kind) if kind else None
                take_step(trainer)
                if undo:
                    undo()
                trainer.clock.count_step()
                hashes.append(state(trainer))
            undo = spoil(trainer, "rounded shard of a norm")
            take_step(trainer)
            undo()
            step_module.require_sound_state(trainer.built, world)
            found[axes] = hashes, dict(trainer.guard.skipped())
    stop()
    return found


def test_a_step_that_is_bad_on_one_rank_of_any_axis_changes_no_bit_on_any(four_steps: Recipe) -> None:
    for answer in run_processes(4, bad_and_good_steps, four_steps):
        for axes, (hashes, skipped) in answer.items():
            for number, kind in enumerate(ON_ONE_RANK):
                before, bad, good = hashes[2 * number : 2 * number + 3]
                assert bad == before and good != bad, (axes, kind)
            bad_steps = range(2, 2 * len(ON_ONE_RANK) + 1, 2)
            assert {step: math.isfinite(norm) for step, norm in skipped.items()} == dict.fromkeys(bad_steps, False)


@pytest.fixture(scope="module")
def diverged(small: Recipe) -> Path:
    """The folder of a run on two processes whose embedding gives NaN from step 4 on, which five skips in a row end."""
    recipe = change(
        small,
        run={"steps": 40, "max_skipped_steps": 5, "name": "diverged"},
        batch={"micro_batch_size": 2},
        schedule={"warmup_steps": 0},
        metrics={"every": 4},
        checkpoint={"every": 3, "keep": 9},
    )
    assert run_processes(2, train_diverging, recipe) == [POISONED, POISONED]
    return recipe.run.folder


def logged_by(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_each_skipped_step_is_logged_with_its_documents(diverged: Path) -> None:
    skipped = [row for row in logged_by(diverged) if row.get("skipped")]
    assert [row["step"] for row in skipped] == [4, 5, 6, 7, 8]
    (pieces,) = skipped[0]["documents"].values()
    assert sum(end - begin for _, _, begin, end in pieces) == 8 * 32
    assert skipped[0]["documents"] != skipped[1]["documents"]


def test_too_many_skipped_steps_in_a_row_stop_the_run(diverged: Path) -> None:
    # Steps 4 to 8 are five in a row. The host reads this at step 8, whose own row is not written any more.
    losses = {row["step"]: row["loss"] for row in logged_by(diverged) if "loss" in row}
    assert list(losses) == [1, 4]
    assert losses[1] is not None and losses[4] is None
    assert "stopped: steps 4 to 8 were all skipped; " in (diverged / "log.txt").read_text()


def test_checkpoints_of_skipped_steps_hold_the_weights_before_them(diverged: Path) -> None:
    steps = sorted(path.name for path in (diverged / "checkpoints").iterdir())
    assert steps == ["step-00000003", "step-00000006"]
    before, after = (tensors_of(diverged / "checkpoints" / step) for step in steps)
    assert before == after
    progress = json.loads((diverged / "checkpoints" / steps[1] / "manifest.json").read_text())["state"]["progress"]
    assert progress["skipped_in_a_row"] == 3


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "manifest.json").read_text())["files"]


def train_diverging(recipe: Recipe) -> int:
    from parallel.dist import start, stop

    world = start("cpu", seed=0)
    with training(recipe, world, silent=not world.is_main) as trainer:
        if world.rank == 1:
            trainer.built.model.embedding.register_forward_hook(
                lambda module, inputs, output: output * math.nan if trainer.step >= 3 else None
            )
        code = trainer.run()
    stop()
    return code


def judge_all(losses: list[float], restart_at: int) -> tuple[list[int], dict[str, Any]]:
    """Which losses a guard with z = 4 skips, and its state; at `restart_at` another guard takes the state over."""
    from parallel.dist import start, stop
    from recipes.optimization.skip_steps import StepGuard
    from tests.build import cpu_mesh

    world = start("cpu", seed=0)
    mesh = cpu_mesh()
    guard, skipped = StepGuard(mesh, device=world.device, max_skipped_steps=10, loss_spike_z=4.0), []
    for step, loss in enumerate(losses):
        if step == restart_at:
            skipped += [step for step, _ in guard.skipped()]
            state = json.loads(json.dumps(guard.state()))
            guard = StepGuard(mesh, device=world.device, max_skipped_steps=10, loss_spike_z=4.0)
            guard.restore(state)
        guard.should_skip(step, loss=torch.tensor(loss), norm=torch.tensor(1.0))
    skipped += [step for step, _ in guard.skipped()]
    state = guard.state()
    stop()
    return skipped, state


def losses_with_spikes() -> list[float]:
    losses = [3.0 + 0.1 * math.sin(step) for step in range(100)]
    losses[20] = 3.5  # not skipped, because the window is not full
    losses[70] = losses[71] = 30.0
    losses[90] = 30.0
    return losses


def test_loss_spikes_are_skipped_once_the_window_is_full() -> None:
    losses = losses_with_spikes()
    ((skipped, state),) = run_processes(1, judge_all, losses, -1)
    assert skipped == [70, 71, 90]
    assert state["skipped_in_a_row"] == 0 and len(state["loss_window"]) == 64
    assert state["loss_window"][-1] == pytest.approx(losses[-1])


@pytest.mark.parametrize("restart_at", [10, 71, 80])
def test_a_restored_guard_skips_the_same_spikes(restart_at: int) -> None:
    losses = losses_with_spikes()
    assert run_processes(1, judge_all, losses, restart_at) == run_processes(1, judge_all, losses, -1)


def judge_parts(meshes: list[str], losses: list[float], odd: dict[int, float]) -> list[tuple[list[int], list[float]]]:
    """By mesh: which losses a guard skips, and its window. Each rank has its part; the last one odd ones at times."""
    from parallel.dist import start, stop
    from parallel.mesh import build_mesh
    from recipes.optimization.skip_steps import StepGuard

    world, found = start("cpu", seed=0), []
    for axes in meshes:
        mesh = build_mesh(mesh_degrees(axes), device_type="cpu")
        guard = StepGuard(mesh, device=world.device, max_skipped_steps=10, loss_spike_z=4.0)
        for step, loss in enumerate(losses):
            whole = odd.get(step, loss) if world.rank == world.size - 1 else loss
            guard.should_skip(step, loss=torch.tensor(whole) / mesh.loss_group.size(), norm=torch.tensor(1.0))
        found.append(([step for step, _ in guard.skipped()], guard.state()["loss_window"]))
    stop()
    return found


def test_all_ranks_of_every_axis_skip_the_same_spikes() -> None:
    """A loss that is too high, or no number, on one rank only: its copy in a tensor group, or its part."""
    losses, odd = losses_with_spikes(), {75: 90.0, 80: math.nan, 85: math.inf}
    meshes = ["1.1.2.2", "2.1.1.2", "1.2.1.2", "1.2.2.1", "1.1.1.4"]
    answers = run_processes(4, judge_parts, meshes, losses, odd)
    assert answers == [answers[0]] * 4
    assert [skipped for skipped, _ in answers[0]] == [[70, 71, 75, 80, 85, 90]] * len(meshes)
    assert [len(window) for _, window in answers[0]] == [64] * len(meshes)
