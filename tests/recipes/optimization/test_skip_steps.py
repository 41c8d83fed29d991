"""Steps that are skipped: no bit of the state changes, and nothing waits for the device."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.files.exit_codes import POISONED
from recipes.load import load
from recipes.schema import Recipe
from tests.processes import run_processes
from tests.training import DEBUG, change, take_step, training

BAD = 2
"""Index of the step that is poisoned, the third."""


@pytest.fixture
def small(corpus: Path, tmp_path: Path) -> Recipe:
    """Five steps of two micro-batches on two processes; no step but the first and the last is logged."""
    recipe = load(DEBUG)
    return replace(
        recipe,
        run=replace(recipe.run, steps=5, output=str(tmp_path / "runs"), name="small"),
        model=replace(
            recipe.model, layers=2, width=64, feed_forward_width=96, heads=4, key_value_heads=2, head_width=16
        ),
        data=replace(recipe.data, source=str(corpus), cache=str(corpus.parent / "cache"), validation_fraction=0.05),
        batch=replace(recipe.batch, sequence_length=32, global_batch_size=8, micro_batch_size=2),
        schedule=replace(recipe.schedule, kind="constant", warmup_steps=0, decay_steps=0),
        checkpoint=replace(recipe.checkpoint, every=0),
        metrics=replace(recipe.metrics, every=1),
        validation=replace(recipe.validation, every=0, sample_tokens=0),
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
    """Those that float8 all-gather works out after each step."""
    found = [parameter._local_tensor for parameter in trainer.built.parameters]
    return [t._precomputed_scale.item() for t in found if getattr(t, "_precomputed_scale", None) is not None]


def poison(trainer: Any, kind: str) -> Callable[[], None]:
    """Make the next step bad, on the last rank alone but for "norm", in one of its micro-batches. Returns the cure."""
    import recipes.training.step as step_module

    whole = step_module.gradient_norm
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
        parameters[0].grad.to_local().view(-1)[0] = math.nan
        return whole(parameters)

    def norm(parameters: list[Any]) -> Tensor:
        return whole(parameters) * math.nan

    if kind in ("shard", "norm") and (kind == "norm" or trainer.world.rank == trainer.world.size - 1):
        step_module.gradient_norm = spoil_shard if kind == "shard" else norm  # type: ignore[assignment]

    def cure() -> None:
        step_module.gradient_norm = whole  # type: ignore[assignment]
        for handle in handles:
            handle.remove()

    handles = []
    if trainer.world.rank == trainer.world.size - 1:
        if kind in ("embedding", "loss", "infinite loss"):
            handles.append(
                (trainer.built.model.embedding if kind == "embedding" else trainer.built.model).register_forward_hook(
                    spoil_output
                )
            )
        elif kind in ("gradient", "infinite gradient"):
            handles.append(trainer.built.model.norm.register_forward_hook(spoil_gradient))
    return cure


def steps(recipe: Recipe, kind: str, world: Any) -> dict[str, Any]:
    """Hashes after every step, where the third one is poisoned; "left out": where it is not taken at all."""
    with training(change(recipe, run={"name": kind}), world) as trainer:
        hashes, seen_scales, losses = [], [], []
        for number in range(recipe.run.steps):
            if number == BAD and kind == "left out":
                trainer.clock.count_step()
                continue
            cure = poison(trainer, kind) if number == BAD else None
            loss, _ = take_step(trainer)
            if cure:
                cure()
            trainer.clock.count_step()
            hashes.append(state(trainer))
            seen_scales.append(scales(trainer))
            losses.append(loss.item())
        skipped = [step for step, _ in trainer.guard.skipped()]
    return {"hashes": hashes, "scales": seen_scales, "skipped": skipped, "losses": losses}


KINDS = ("embedding", "gradient", "infinite gradient", "shard", "loss", "infinite loss", "norm")


def all_kinds(recipe: Recipe, kinds: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    from parallel.dist import start, stop

    world = start("cpu", seed=0)
    found = {kind: steps(recipe, kind, world) for kind in kinds}
    stop()
    return found


def expect_no_trace(answers: list[dict[str, dict[str, Any]]]) -> None:
    for found in answers:
        left_out = found.pop("left out")
        for kind, answer in found.items():
            hashes = answer["hashes"]
            assert hashes[BAD] == hashes[BAD - 1], kind
            assert answer["scales"][BAD] == answer["scales"][BAD - 1]
            assert answer["skipped"] == [BAD + 1], kind
            # The same as if that step's batch had never come.
            assert hashes[:BAD] + hashes[BAD + 1 :] == left_out["hashes"], kind
            assert len(set(hashes)) == len(hashes) - 1


def test_a_bad_step_changes_no_bit(small: Recipe) -> None:
    expect_no_trace(run_processes(2, all_kinds, small, ("left out", *KINDS)))


def test_nor_in_bfloat16_with_replicas_and_float8_all_gather(small: Recipe) -> None:
    """2 x 2 processes: what one replica's shard holds, the other replica's must heed."""
    hybrid = replace(
        small,
        mesh=replace(small.mesh, replicate=2, shard=2),
        batch=replace(small.batch, micro_batch_size=1),
        fsdp=replace(small.fsdp, param_dtype="bfloat16"),
        float8=replace(small.float8, recipe="tensorwise", emulate=True, all_gather=True),
    )
    answers = run_processes(4, all_kinds, hybrid, ("left out", "embedding", "gradient", "shard", "loss"))
    assert all(answer["left out"]["scales"][0] for answer in answers)
    expect_no_trace(answers)


def test_nor_without_clipping_on_one_process(small: Recipe) -> None:
    alone = replace(small, optimizer=replace(small.optimizer, grad_clip=0.0))
    expect_no_trace(run_processes(1, all_kinds, alone, ("left out", *KINDS)))


def test_a_skipped_step_is_logged_and_too_many_stop_the_run(small: Recipe) -> None:
    """The embedding gives nan from step 4 on: whatever is saved before is all that is left."""
    run = replace(small.run, steps=40, max_skipped_steps=5, name="poisoned")
    recipe = replace(
        small, run=run, metrics=replace(small.metrics, every=4), checkpoint=replace(small.checkpoint, every=3, keep=9)
    )
    assert run_processes(2, poisoned_run, recipe) == [POISONED, POISONED]
    folder = Path(run.output) / "poisoned"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    skipped = [row for row in rows if row.get("skipped")]
    # Steps 4 to 8 are five in a row. The host hears of them at step 8, whose own row is not made any more.
    assert [row["step"] for row in skipped] == [4, 5, 6, 7, 8]
    assert [row["step"] for row in rows if "loss" in row] == [1, 4]
    assert [row["loss"] is None for row in rows if "loss" in row] == [False, True]
    (pieces,) = skipped[0]["documents"].values()
    assert sum(end - begin for _, _, begin, end in pieces) == 8 * 32
    assert skipped[0]["documents"] != skipped[1]["documents"]
    steps = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert steps == ["step-00000003", "step-00000006"]
    tensors = [tensors_of(folder / "checkpoints" / step) for step in steps]
    assert tensors[0] == tensors[1]
    progress = json.loads((folder / "checkpoints" / steps[1] / "manifest.json").read_text())["state"]["progress"]
    assert progress["skipped_in_a_row"] == 3
    assert "stopped: steps 4 to 8 were all skipped; " in (folder / "log.txt").read_text()


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "manifest.json").read_text())["tensors"]


def poisoned_run(recipe: Recipe) -> int:
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


def test_a_step_waits_for_the_device_no_oftener_than_before(small: Recipe) -> None:
    spikes = replace(small, run=replace(small.run, loss_spike_z=5.0, name="spikes"))
    assert run_processes(1, count_waits, [small, spikes]) == [[0, 0]]


def count_waits(recipes: list[Recipe]) -> list[int]:
    """How often the host asks for a number of the device in a step that is not logged."""
    from parallel.dist import start, stop

    class Waits(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.counts: Counter[str] = Counter()

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.counts[operator.overloadpacket.__name__] += 1
            return operator(*args, **(kwargs or {}))

    world, found = start("cpu", seed=0), []
    for recipe in recipes:
        with training(recipe, world) as trainer:
            take_step(trainer)
            with Waits() as waits:
                take_step(trainer)
            assert waits.counts["isfinite"] or waits.counts["abs"], waits.counts  # it did look
            found.append(sum(waits.counts[name] for name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")))
    stop()
    return found


def judge_all(losses: list[float], restart_at: int) -> tuple[list[int], dict[str, Any]]:
    """Which of these losses are skipped, with z = 4, by a guard that goes on as another one half-way."""
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


def test_loss_spikes_are_skipped_and_the_window_is_saved() -> None:
    losses = [3.0 + 0.1 * math.sin(step) for step in range(100)]
    losses[20] = 3.5  # the window is not full
    losses[70] = losses[71] = 30.0
    losses[90] = 30.0
    ((whole, state),) = run_processes(1, judge_all, losses, -1)
    assert whole == [70, 71, 90]
    assert state["skipped_in_a_row"] == 0 and len(state["loss_window"]) == 64
    assert state["loss_window"][-1] == pytest.approx(losses[-1])
    for restart_at in (10, 71, 80):
        assert run_processes(1, judge_all, losses, restart_at) == [(whole, state)]
