"""Whole runs in real processes: the same losses whatever the mesh, and what a run leaves behind."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from parallel.config import MeshConfig
from recipes.load import load
from recipes.schema import Recipe
from tests.processes import run_processes
from tests.training import DEBUG, change, curve, largest_gap, rows, run_all, take_step, training

STEPS = 20
# Largest relative gap between two loss curves: compiled and bfloat16 against eager float32, float8 against bfloat16.
COMPILE_TOLERANCE = 1e-5
BFLOAT16_TOLERANCE = 2e-3
FLOAT8_TOLERANCE = 1e-2


@pytest.fixture(scope="module")
def small(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The debug recipe on short sequences of a small corpus, 20 steps, every step logged."""
    folder = tmp_path_factory.mktemp("trainer")
    return change(
        load(DEBUG),
        run={"steps": STEPS, "output": str(folder / "runs")},
        data={"source": str(corpus), "cache": str(folder / "cache"), "validation_fraction": 0.05},
        batch={"sequence_length": 64, "global_batch_size": 8, "micro_batch_size": 2},
        schedule={"warmup_steps": 5, "decay_steps": 5},
        checkpoint={"every": 0},
        metrics={"every": 1},
        validation={"every": 10, "batches": 2, "sample_tokens": 0},
    )


def curves(processes: int, recipes: dict[str, Recipe]) -> dict[str, list[float]]:
    """Losses and validation losses, in order, of named variants run on so many processes."""
    named = [change(recipe, run={"name": f"{name}-{processes}"}) for name, recipe in recipes.items()]
    for codes in run_processes(processes, run_all, named, timeout=400):
        assert codes == [0] * len(named)
    return {name: curve(recipe) for name, recipe in zip(recipes, named, strict=True)}


@pytest.fixture(scope="module")
def reference(small: Recipe) -> dict[str, list[float]]:
    """Curves of one process."""
    return curves(
        1,
        {
            "plain": small,
            "micro-batch 1": change(small, batch={"micro_batch_size": 1}),
            "micro-batch 4": change(small, batch={"micro_batch_size": 4}),
            "no accumulation": change(small, batch={"micro_batch_size": 8}),
            "full checkpointing": change(small, activation_checkpointing={"mode": "full"}),
            "selective checkpointing": change(small, activation_checkpointing={"mode": "selective"}),
            "bfloat16": change(small, fsdp={"param_dtype": "bfloat16"}),
            "bfloat16 moments": change(small, optimizer={"state_dtype": "bfloat16"}),
            "tensorwise": change(
                small, fsdp={"param_dtype": "bfloat16"}, float8={"recipe": "tensorwise", "emulate": True}
            ),
            "rowwise": change(small, fsdp={"param_dtype": "bfloat16"}, float8={"recipe": "rowwise", "emulate": True}),
            "rowwise_with_gw_hp": change(
                small, fsdp={"param_dtype": "bfloat16"}, float8={"recipe": "rowwise_with_gw_hp", "emulate": True}
            ),
        },
    )


def test_the_model_learns(reference: dict[str, list[float]], small: Recipe) -> None:
    found = reference["plain"]
    assert len(found) == STEPS + 2  # two validations among the steps
    assert found[0] == pytest.approx(math.log(4096), rel=0.02)
    assert found[-1] < 0.85 * found[0]


def test_checkpointing_changes_no_bit_of_the_curve(reference: dict[str, list[float]]) -> None:
    assert reference["full checkpointing"] == reference["plain"] == reference["selective checkpointing"]


def test_accumulation_changes_nothing(reference: dict[str, list[float]]) -> None:
    assert largest_gap(reference["micro-batch 1"], reference["no accumulation"]) < 1e-5
    assert largest_gap(reference["micro-batch 4"], reference["no accumulation"]) < 1e-5


def test_bfloat16_and_float8_stay_close(reference: dict[str, list[float]]) -> None:
    assert 0 < largest_gap(reference["bfloat16 moments"], reference["plain"]) < BFLOAT16_TOLERANCE
    assert 0 < largest_gap(reference["bfloat16"], reference["plain"]) < BFLOAT16_TOLERANCE
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        assert 0 < largest_gap(reference[recipe], reference["bfloat16"]) < FLOAT8_TOLERANCE


def test_two_processes_repeat_the_curve(reference: dict[str, list[float]], small: Recipe) -> None:
    found = curves(
        2,
        {
            "FSDP": small,
            "replication": change(small, mesh={"replicate": 2, "shard": 1}),
            "ZeRO-2": change(small, fsdp={"reshard_after_forward": False}, batch={"micro_batch_size": 1}),
            "CPU offload": change(small, fsdp={"cpu_offload": True}),
        },
    )
    for name, losses in found.items():
        assert largest_gap(losses, reference["plain"]) < 1e-5, name


def test_four_processes_repeat_the_curve(reference: dict[str, list[float]], small: Recipe) -> None:
    found = curves(
        4,
        {
            "FSDP": small,
            "HSDP": change(small, mesh={"replicate": 2, "shard": 2}, batch={"micro_batch_size": 1}),
            "ZeRO-2": change(small, fsdp={"reshard_after_forward": False}),
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


def test_inner_micro_batches_reduce_no_gradients(small: Recipe) -> None:
    """Five groups (four blocks and the root): five reduce-scatters a step, however many micro-batches it has."""
    zero3 = change(small, run={"name": "zero3-collectives"})
    zero2 = change(small, run={"name": "zero2-collectives"}, fsdp={"reshard_after_forward": False})
    for recipe, gathers in ((zero3, 2 * (4 + 4 + 1)), (zero2, 5)):
        for counts in run_processes(2, count_collectives, recipe):
            assert counts["_reduce_scatter_base_"] == 5, counts
            assert counts["_allgather_base_"] == gathers, counts
            assert counts["allreduce_"] == 2, counts  # target tokens, gradient norm


def test_compiled_with_everything_on(reference: dict[str, list[float]], small: Recipe) -> None:
    """Float8 with float8 all-gather, selective checkpointing, compile, 2 x 2 hybrid sharding and bf16 at once."""
    everything = load(DEBUG.with_name("smollm3_debug_everything.toml"))
    assert everything.float8.all_gather and everything.compile.enabled
    assert everything.activation_checkpointing.mode == "selective"
    assert everything.mesh == MeshConfig(replicate=2, shard=2)
    keep = {"run": small.run, "data": small.data, "batch": small.batch, "schedule": small.schedule}
    keep |= {"checkpoint": small.checkpoint, "metrics": small.metrics, "validation": small.validation}
    found = curves(4, {"everything": replace(everything, **keep)})
    assert largest_gap(found["everything"], reference["tensorwise"]) < FLOAT8_TOLERANCE


def test_compile_stays_close(reference: dict[str, list[float]], small: Recipe) -> None:
    compiled = curves(1, {"compiled": change(small, compile={"enabled": True})})["compiled"]
    assert 0 < largest_gap(compiled, reference["plain"]) < COMPILE_TOLERANCE


# Documents


@pytest.fixture(scope="module")
def masked(small: Recipe, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """`small` on many short documents, the paragraphs of its text, without a view from one into another."""
    path = tmp_path_factory.mktemp("documents") / "paragraphs.jsonl"
    paragraphs = corpus.read_text(encoding="utf-8").split("\n\n")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs), encoding="utf-8")
    return change(
        small,
        run={"name": "masked", "steps": 6},
        data={"source": str(path), "document_mask": True},
        schedule={"warmup_steps": 2, "decay_steps": 2},
        validation={"every": 3},
    )


def test_masked_runs_repeat_the_curve_on_any_mesh(masked: Recipe) -> None:
    found = curves(
        1,
        {
            "masked": masked,
            "masked, no mask": change(masked, data={"document_mask": False}),
            "masked, micro-batch 4": change(masked, batch={"micro_batch_size": 4}),
            "masked, full checkpointing": change(masked, activation_checkpointing={"mode": "full"}),
            "masked, selective checkpointing": change(masked, activation_checkpointing={"mode": "selective"}),
            "masked, compiled": change(
                masked, compile={"enabled": True}, activation_checkpointing={"mode": "selective"}
            ),
        },
    )
    expected = found["masked"]
    assert len(expected) == 6 + 2
    assert largest_gap(found["masked, no mask"], expected) > 1e-4
    assert found["masked, full checkpointing"] == expected == found["masked, selective checkpointing"]
    assert largest_gap(found["masked, micro-batch 4"], expected) < 1e-5
    assert 0 < largest_gap(found["masked, compiled"], expected) < COMPILE_TOLERANCE

    assert largest_gap(curves(2, {"masked FSDP": masked})["masked FSDP"], expected) < 1e-5
    hybrid = change(masked, mesh={"replicate": 2, "shard": 2}, batch={"micro_batch_size": 1})
    assert largest_gap(curves(4, {"masked HSDP": hybrid})["masked HSDP"], expected) < 1e-5

    # The same documents, however they are shared out: their mean length, in the sense of what attention costs.
    lengths = [
        [row["attention_length"] for row in rows(change(masked, run={"name": name})) if "loss" in row]
        for name in ("masked-1", "masked, micro-batch 4-1", "masked FSDP-2", "masked HSDP-4")
    ]
    assert all(other == lengths[0] for other in lengths)
    assert all(5 < length < 60 for length in lengths[0])
    assert len(set(lengths[0])) == 6
    assert "attention_length" not in rows(change(masked, run={"name": "masked, no mask-1"}))[0]


# Saving and resuming


def test_a_resumed_run_is_the_same_run(small: Recipe) -> None:
    saving = change(small, checkpoint={"every": 4, "keep": 2}, run={"steps": 12, "name": "whole"})
    # A schedule that does not depend on the number of steps, so that stopping early changes nothing but the end.
    saving = change(saving, schedule={"kind": "constant", "decay_steps": 0}, validation={"every": 0})
    halves = [change(saving, run={"name": "halves", "steps": steps}) for steps in (7, 12)]
    for codes in run_processes(2, run_all, [saving, *halves]):
        assert codes == [0, 0, 0]
    assert rows(saving)[0]["tokens"] == 8 * 64
    assert curve(halves[1]) == curve(saving)
    assert [row["step"] for row in rows(halves[1])] == list(range(1, 13))
    folder = Path(saving.run.output) / "halves"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]
    # Another mesh, another sharding stage and checkpointing: the same parameters go on.
    longer = change(
        halves[1],
        run={"steps": 14},
        fsdp={"reshard_after_forward": False},
        mesh={"replicate": 1, "shard": 1},
        activation_checkpointing={"mode": "full"},
    )
    for codes in run_processes(1, run_all, [longer, change(saving, run={"name": "whole-14", "steps": 14})]):
        assert codes == [0, 0]
    whole = curve(change(saving, run={"name": "whole-14"}))
    assert largest_gap(curve(longer), whole) < 1e-5


def test_what_a_run_leaves_behind(reference: dict[str, list[float]], small: Recipe) -> None:
    recipe = change(small, run={"name": "plain-1"})
    folder = Path(small.run.output) / "plain-1"
    assert load(folder / "recipe.toml") == recipe
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["world_size"] == 1
    assert facts["device"] == "cpu"
    assert facts["packages"]["torch"]
    logged = [row for row in rows(recipe) if "loss" in row]
    assert list(logged[0]) == [
        "step",
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "step_seconds",
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
    ]
    last = logged[-1]
    assert (last["step"], last["tokens"]) == (STEPS, STEPS * 8 * 64)
    assert last["mfu"] is last["mfu_full"] is last["tflops_per_device"] is None  # a CPU's peak is not known
    assert last["tokens_per_second"] == pytest.approx(8 * 64 / last["step_seconds"])
    assert 0 < last["data_seconds"] < last["step_seconds"]
    assert 0 < last["peak_memory_gib"] < 24
    assert last["lr"] == pytest.approx(3e-3 / 5)
    assert [row["step"] for row in rows(recipe) if "validation_loss" in row] == [10, 20]
