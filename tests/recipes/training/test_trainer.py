"""Whole runs in real processes: the same losses on every mesh, and the files that a run leaves."""

import json
import math
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from parallel.config import MeshConfig
from parallel.dist import start, stop
from recipes.metrics.clock import END, FIRST_STEP, STEP
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from tests.processes import run_processes
from tests.training import DEBUG, change, curve, largest_gap, rows, run_all, take_step, training

pytestmark = pytest.mark.slow

STEPS = 12
# Largest relative gap between two loss curves: compiled and bfloat16 against eager float32, float8 against bfloat16.
COMPILE_TOLERANCE = 1e-5
BFLOAT16_TOLERANCE = 2e-3
FLOAT8_TOLERANCE = 2e-2  # 0.6 to 1.4%, depending on the text, which is of this Python's standard library


@pytest.fixture(scope="module")
def debug_run(small: Recipe) -> Recipe:
    """The small model, whose second layer has no RoPE, on short sequences of a small corpus; 12 steps, all logged."""
    return change(
        small,
        run={"steps": STEPS},
        model={"no_rope_every": 2, "vocabulary": 512},
        data={"validation_fraction": 0.05},
        batch={"sequence_length": 64, "micro_batch_size": 2},
        schedule={"kind": "wsd", "warmup_steps": 3, "decay_steps": 3},
        checkpoint={"every": 0},
        validation={"every": 6, "batches": 2},
    )


def curves(processes: int, recipes: dict[str, Recipe]) -> dict[str, list[float]]:
    """The curves of named variants of a recipe, run on that many processes."""
    named = [change(recipe, run={"name": f"{name}-{processes}"}) for name, recipe in recipes.items()]
    assert run_processes(processes, run_all, named) == [[0] * len(named)] * processes
    return {name: curve(recipe) for name, recipe in zip(recipes, named, strict=True)}


@pytest.fixture(scope="module")
def reference(debug_run: Recipe) -> dict[str, list[float]]:
    """Curves of one process."""
    return curves(
        1,
        {
            "plain": debug_run,
            "micro-batch 1": change(debug_run, batch={"micro_batch_size": 1}),
            "micro-batch 4": change(debug_run, batch={"micro_batch_size": 4}),
            "no accumulation": change(debug_run, batch={"micro_batch_size": 8}),
            "full checkpointing": change(debug_run, activation_checkpointing={"mode": "full"}),
            "selective checkpointing": change(debug_run, activation_checkpointing={"mode": "selective"}),
            "bfloat16": change(debug_run, fsdp={"param_dtype": "bfloat16"}),
            "bfloat16 moments": change(debug_run, optimizer={"state_dtype": "bfloat16"}),
            "tensorwise": change(
                debug_run, fsdp={"param_dtype": "bfloat16"}, float8={"recipe": "tensorwise", "emulate": True}
            ),
        },
    )


def test_the_model_learns(reference: dict[str, list[float]], debug_run: Recipe) -> None:
    found = reference["plain"]
    assert len(found) == STEPS + 2  # two validations among the steps
    assert found[0] == pytest.approx(math.log(512), rel=0.02)
    assert found[-1] < 0.9 * found[0]


def test_checkpointing_changes_no_bit_of_the_curve(reference: dict[str, list[float]]) -> None:
    assert reference["full checkpointing"] == reference["plain"] == reference["selective checkpointing"]


def test_the_micro_batch_size_does_not_change_the_curve(reference: dict[str, list[float]]) -> None:
    assert largest_gap(reference["micro-batch 1"], reference["no accumulation"]) < 1e-5
    assert largest_gap(reference["micro-batch 4"], reference["no accumulation"]) < 1e-5


@pytest.mark.parametrize("variant", ["bfloat16", "bfloat16 moments"])
def test_bfloat16_stays_close_to_float32(variant: str, reference: dict[str, list[float]]) -> None:
    assert 0 < largest_gap(reference[variant], reference["plain"]) < BFLOAT16_TOLERANCE


def test_float8_stays_close_to_bfloat16(reference: dict[str, list[float]]) -> None:
    assert 0 < largest_gap(reference["tensorwise"], reference["bfloat16"]) < FLOAT8_TOLERANCE


def test_two_processes_repeat_the_curve_of_one(reference: dict[str, list[float]], debug_run: Recipe) -> None:
    found = curves(
        2,
        {
            "FSDP": debug_run,
            "replication": change(debug_run, mesh={"replicate": 2, "shard": 1}),
            "ZeRO-2": change(debug_run, fsdp={"reshard_after_forward": False}, batch={"micro_batch_size": 1}),
            "CPU offload": change(debug_run, fsdp={"cpu_offload": True}),
        },
    )
    for name, losses in found.items():
        assert largest_gap(losses, reference["plain"]) < 1e-5, name


def count_collectives(recipe: Recipe) -> dict[str, int]:
    """Collectives of one training step of two micro-batches, by name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from parallel.dist import start, stop

    class Collectives(TorchDispatchMode):
        counts: ClassVar[Counter[str]] = Counter()

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace == "c10d":
                self.counts[operator.overloadpacket.__name__] += 1
            return operator(*args, **(kwargs or {}))

    world = start("cpu", seed=0)
    with training(recipe, world) as trainer:
        take_step(trainer)  # FSDP sets itself up in the first
        with Collectives() as collectives:
            take_step(trainer)
    stop()
    return dict(collectives.counts)


def test_gradients_are_reduced_once_a_step_however_many_micro_batches(debug_run: Recipe) -> None:
    """Three groups (two blocks and the root) mean three reduce-scatters, though the step has two micro-batches."""
    zero3 = change(debug_run, run={"name": "zero3-collectives"})
    zero2 = change(debug_run, run={"name": "zero2-collectives"}, fsdp={"reshard_after_forward": False})
    for recipe, gathers in ((zero3, 2 * (2 + 2 + 1)), (zero2, 3)):
        for counts in run_processes(2, count_collectives, recipe):
            assert counts["_reduce_scatter_base_"] == 3, counts
            assert counts["_allgather_base_"] == gathers, counts
            assert counts["allreduce_"] == 2, counts  # target tokens, gradient norm


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_run_with_every_part_on_stays_close_to_float8(
    compiled: bool, reference: dict[str, list[float]], debug_run: Recipe
) -> None:
    """Float8 with float8 all-gather, selective checkpointing, 2 x 2 hybrid sharding and bf16 at once. The recipe also
    compiles, which takes four processes a minute and a half."""
    everything = load(DEBUG.with_name("smollm3_debug_everything.toml"))
    assert everything.float8.all_gather and everything.compile.enabled
    assert everything.activation_checkpointing.mode == "selective"
    assert everything.mesh == MeshConfig(replicate=2, shard=2)
    kept = ("model", "data", "batch", "schedule", "checkpoint", "metrics", "validation")
    run = replace(debug_run.run, check_replicas_every=1)
    recipe = replace(everything, run=run, **{section: getattr(debug_run, section) for section in kept})
    found = curves(4, {"everything": change(recipe, compile={"enabled": compiled})})["everything"]
    assert largest_gap(found, reference["tensorwise"]) < FLOAT8_TOLERANCE


# Documents


@pytest.fixture(scope="module")
def masked(debug_run: Recipe, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """`debug_run` on many short documents, the paragraphs of its text, which do not attend to each other."""
    path = tmp_path_factory.mktemp("documents") / "paragraphs.jsonl"
    paragraphs = corpus.read_text(encoding="utf-8").split("\n\n")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs), encoding="utf-8")
    return change(
        debug_run,
        run={"name": "masked", "steps": 6},
        model={"no_rope_every": 0},  # one kind of block to compile
        data={"source": str(path), "document_mask": True},
        schedule={"warmup_steps": 2, "decay_steps": 2},
        validation={"every": 3},
    )


@pytest.fixture(scope="module")
def masked_curves(masked: Recipe) -> dict[str, list[float]]:
    """Curves of one process."""
    return curves(
        1,
        {
            "masked": masked,
            "masked, no mask": change(masked, data={"document_mask": False}),
            "masked, micro-batch 4": change(masked, batch={"micro_batch_size": 4}),
            "masked, compiled": change(
                masked, compile={"enabled": True}, activation_checkpointing={"mode": "selective"}
            ),
        },
    )


@pytest.fixture(scope="module")
def masked_curves_on_meshes(masked: Recipe) -> dict[str, list[float]]:
    """Curves of two processes that shard, and of 2 x 2 that shard and replicate."""
    hybrid = change(masked, mesh={"replicate": 2, "shard": 2}, batch={"micro_batch_size": 1})
    return curves(2, {"masked FSDP": masked}) | curves(4, {"masked HSDP": hybrid})


def test_the_document_mask_changes_the_curve(masked_curves: dict[str, list[float]]) -> None:
    assert len(masked_curves["masked"]) == 6 + 2
    assert largest_gap(masked_curves["masked, no mask"], masked_curves["masked"]) > 1e-4


def test_the_micro_batch_size_does_not_change_a_masked_curve(masked_curves: dict[str, list[float]]) -> None:
    assert largest_gap(masked_curves["masked, micro-batch 4"], masked_curves["masked"]) < 1e-5


def test_compiled_masked_runs_stay_close(masked_curves: dict[str, list[float]]) -> None:
    assert 0 < largest_gap(masked_curves["masked, compiled"], masked_curves["masked"]) < COMPILE_TOLERANCE


def test_masked_runs_repeat_the_curve_on_any_mesh(
    masked_curves: dict[str, list[float]], masked_curves_on_meshes: dict[str, list[float]]
) -> None:
    for name, found in masked_curves_on_meshes.items():
        assert largest_gap(found, masked_curves["masked"]) < 1e-5, name


@pytest.mark.usefixtures("masked_curves", "masked_curves_on_meshes")
def test_the_mean_document_length_does_not_depend_on_how_documents_are_distributed(masked: Recipe) -> None:
    """attention_length is the mean in terms of what attention costs; a run without a mask has none."""
    lengths = [
        [row["attention_length"] for row in rows(change(masked, run={"name": name})) if "loss" in row]
        for name in ("masked-1", "masked, micro-batch 4-1", "masked FSDP-2", "masked HSDP-4")
    ]
    assert all(other == lengths[0] for other in lengths)
    assert all(5 < length < 60 for length in lengths[0])
    assert len(set(lengths[0])) == 6
    assert "attention_length" not in rows(change(masked, run={"name": "masked, no mask-1"}))[0]


# What a run leaves


@pytest.fixture(scope="module")
def finished(reference: dict[str, list[float]], debug_run: Recipe) -> Recipe:
    """The recipe of a run of one process that has ended."""
    return change(debug_run, run={"name": "plain-1"})


def test_a_run_leaves_its_recipe_and_its_environment(finished: Recipe) -> None:
    assert load(finished.run.folder / "recipe.toml") == finished
    facts = json.loads((finished.run.folder / "environment.json").read_text())
    assert facts["world_size"] == 1
    assert facts["device"] == "cpu"
    assert facts["packages"]["torch"]


def test_a_run_leaves_a_row_of_metrics_for_every_step(finished: Recipe) -> None:
    logged = [row for row in rows(finished) if "loss" in row]
    assert list(logged[0]) == [
        "step",
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "step_seconds",
        "eta_seconds",
        "data_seconds",
        "epochs",
        "tokens_per_second",
        "tokens_per_second_per_device",
        "tflops_per_device",
        "mfu",
        "mfu_full",
        "peak_memory_gib",
        "goodput",
        "wall_seconds",
        "time",
    ]
    last = logged[-1]
    assert (last["step"], last["tokens"]) == (STEPS, STEPS * 8 * 64)
    assert last["mfu"] is last["mfu_full"] is last["tflops_per_device"] is None  # a CPU's peak is not known
    assert last["tokens_per_second"] == pytest.approx(8 * 64 / last["step_seconds"])
    assert 0 < last["data_seconds"] < last["step_seconds"]
    assert 0 < last["peak_memory_gib"] < 24
    assert last["lr"] == pytest.approx(3e-3 / 3)
    assert [row["step"] for row in rows(finished) if "validation_loss" in row] == [6, 12]


def test_rows_say_how_long_the_rest_takes_once_a_step_did_not_compile(finished: Recipe) -> None:
    first, *others = [row for row in rows(finished) if "loss" in row]
    assert first["eta_seconds"] is None and others[-1]["eta_seconds"] == 0
    for row in others:
        assert row["eta_seconds"] == pytest.approx((STEPS - row["step"]) * row["step_seconds"])


def phases_begun(recipe: Recipe) -> list[str]:
    world, begun = start("cpu", seed=0), []
    with training(recipe, world) as trainer:
        begin = trainer.clock.begin

        def noting(phase: str) -> None:
            begun.append(phase)
            begin(phase)

        trainer.clock.begin = noting
        assert trainer.run() == 0
    stop()
    return begun


def test_the_phase_after_the_loop_begins_after_the_steps(small: Recipe) -> None:
    """However briefly it began before them, a busy machine could stop the process just there."""
    [begun] = run_processes(1, phases_begun, change(small, run={"name": "phases", "steps": 2}))
    last = max(number for number, phase in enumerate(begun) if phase == STEP)
    assert begun[0] == FIRST_STEP and END not in begun[:last] and END in begun[last:]


def end_by_a_signal(recipe: Recipe) -> list[tuple[int, str]]:
    """Exit code and last line where another rank fails in step 2 and at the end, and the launcher sends SIGTERM."""
    world, found = start("cpu", seed=0), []
    for steps, name in ((1, "take_step"), (recipe.run.steps, "_finish")):
        with training(change(recipe, run={"name": name}), world) as trainer:
            lines: list[str] = []
            trainer.console.log = lambda text, lines=lines, **style: lines.append(text)
            work = getattr(trainer, name)

            def failing(*arguments: Any, trainer: Any = trainer, steps: int = steps, work: Any = work) -> Any:
                if trainer.step < steps:
                    return work(*arguments)
                trainer.interruption.noted = signal.SIGTERM
                raise RuntimeError("gloo: a peer has gone")

            setattr(trainer, name, failing)
            found.append((trainer.run(), lines[-1]))
    stop()
    return found


def test_a_run_that_a_failing_rank_ends_with_a_signal_says_when(small: Recipe) -> None:
    [(in_a_step, at_the_end)] = run_processes(1, end_by_a_signal, change(small, run={"steps": 3}))
    code = 128 + signal.SIGTERM
    assert in_a_step == (code, "a process was lost; SIGTERM ended the run in the middle of a step; NOT SAVED")
    assert at_the_end == (
        code,
        "a process was lost; SIGTERM ended the run after its last step; run the same command again",
    )
