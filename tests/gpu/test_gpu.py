"""Training on a GPU with every part of parallel/ that one process can use."""

import math
import time
from pathlib import Path

import pytest
import torch

from recipes.recipe.load import LoadedRecipe, load
from recipes.recipe.schema import Recipe
from tests.processes import run_processes
from tests.training import DEBUG, change, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def has_float8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.fixture(scope="module")
def small(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("gpu")
    return change(
        load(DEBUG),
        run={"steps": 20, "output": str(folder / "runs"), "device": "cuda"},
        data={"source": str(corpus), "cache": str(folder / "cache"), "validation_fraction": 0.05},
        batch={"sequence_length": 128, "global_batch_size": 8, "micro_batch_size": 4},
        schedule={"warmup_steps": 5, "decay_steps": 5},
        checkpoint={"every": 0},
        metrics={"every": 1},
        validation={"every": 0, "sample_tokens": 0},
    )


def train_all(recipes: list[Recipe]) -> list[int]:
    from recipes.training.run import train

    return [train(LoadedRecipe(recipe), began=time.monotonic()) for recipe in recipes]


def largest_gap(one: Recipe, other: Recipe) -> float:
    pairs = zip(rows(one), rows(other), strict=True)
    return max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in pairs)


@pytest.fixture(scope="module")
def trained(small: Recipe) -> dict[str, Recipe]:
    """Runs that have ended, by name: float32, bf16, and bf16 with one more change."""
    bfloat16 = change(small, run={"name": "bfloat16"}, fsdp={"param_dtype": "bfloat16"})
    variants = {
        "full": change(bfloat16, activation_checkpointing={"mode": "full"}),
        "selective": change(bfloat16, activation_checkpointing={"mode": "selective"}),
        "compiled": change(bfloat16, compile={"enabled": True}, activation_checkpointing={"mode": "selective"}),
        "flash": change(bfloat16, attention={"backend": "flash"}),
        "cudnn": change(bfloat16, attention={"backend": "cudnn"}, compile={"enabled": True}),
        "documents": change(bfloat16, data={"document_mask": True}),
        "documents compiled": change(
            bfloat16,
            data={"document_mask": True},
            compile={"enabled": True},
            activation_checkpointing={"mode": "selective"},
        ),
        "zero2": change(bfloat16, fsdp={"reshard_after_forward": False}, batch={"micro_batch_size": 2}),
    }
    named = {name: change(recipe, run={"name": name}) for name, recipe in variants.items()}
    recipes = {"float32": small, "bfloat16": bfloat16, **named}
    assert run_processes(1, train_all, list(recipes.values()), timeout=500) == [[0] * len(recipes)]
    return recipes


def test_bfloat16_trains_like_float32(trained: dict[str, Recipe]) -> None:
    assert largest_gap(trained["bfloat16"], trained["float32"]) < 1e-2


@pytest.mark.parametrize(
    "name", ["full", "selective", "compiled", "flash", "cudnn", "documents", "documents compiled", "zero2"]
)
def test_every_part_trains_like_plain_bfloat16(name: str, trained: dict[str, Recipe]) -> None:
    assert largest_gap(trained[name], trained["bfloat16"]) < 1e-2


def test_the_log_has_peak_memory_mfu_and_a_finite_gradient_norm(trained: dict[str, Recipe]) -> None:
    last = rows(trained["bfloat16"])[-1]
    assert 0 < last["peak_memory_gib"] <= last["reserved_memory_gib"]
    assert last["allocation_failures"] == 0
    assert last["mfu"] is None or 0 < last["mfu"] < last["mfu_full"] < 1
    assert math.isfinite(last["grad_norm"])


def test_segments_of_memory_grow(trained: dict[str, Recipe]) -> None:
    assert "expandable_segments:True" in (trained["bfloat16"].run.folder / "environment.json").read_text()


@pytest.mark.skipif(not has_float8(), reason="needs float8 matrix units (compute capability 9.0)")
def test_real_float8_stays_close_to_bfloat16(small: Recipe) -> None:
    bfloat16 = change(small, run={"name": "float8-none"}, fsdp={"param_dtype": "bfloat16"}, compile={"enabled": True})
    variants = [
        {"recipe": "tensorwise"},
        {"recipe": "tensorwise", "all_gather": True},
        {"recipe": "rowwise"},
        {"recipe": "rowwise_with_gw_hp"},
    ]
    named = [change(bfloat16, run={"name": f"float8-{i}"}, float8=fields) for i, fields in enumerate(variants)]
    assert run_processes(1, train_all, [bfloat16, *named], timeout=500) == [[0] * (1 + len(named))]
    for recipe, fields in zip(named, variants, strict=True):
        assert 0 < largest_gap(recipe, bfloat16) < 3e-2, fields
