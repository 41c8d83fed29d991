"""The bytes of fused kernels as a formula in widths, against generated code that was counted."""

import re
from dataclasses import replace
from typing import Any

import pytest

from models.sizes import SIZES
from parallel.config import MeshDegrees
from recipes.plan.work import COMPILED, moved_bytes, work_of
from recipes.recipe.load import CONFIGS, load
from tests.generated_code import rows_of_generated_code


def counted() -> list[tuple[str, int, Any, Any, int, float]]:
    """(model, tokens, float8, recompute, kernels, bytes) of each row of tests/generated_code.csv."""
    rows = []
    for row in rows_of_generated_code():
        found = re.match(r"(\w+), (\d+) x (\d+) tokens", row["block"])
        assert found
        kernels = sum(int(row[kind]) for kind in ("fused", "products", "attention", "other"))
        tokens = int(found[2]) * int(found[3])
        rows.append((found[1], tokens, row["float8"], row["recompute"], kernels, 1e9 * float(row["moved GB"])))
    return rows


def test_bytes_and_kernels_are_those_of_the_generated_code() -> None:
    rows = counted()
    assert len(rows) >= 80
    base = load(CONFIGS / "benchmarks/llama3_8b_8xh100.toml", [], rules=False)
    for model, tokens, name, recompute, kernels, moved in rows:
        kind, _, gathered = name.partition(", ")
        float8 = replace(base.float8, recipe=kind, all_gather=bool(gathered))
        batch = replace(base.batch, sequence_length=tokens, micro_batch_size=1)
        recipe = replace(base, model=SIZES[model], float8=float8, batch=batch)
        predicted, launched = moved_bytes(work_of(recipe, MeshDegrees(replicate=1, shard=8)), recompute)
        assert predicted == pytest.approx(moved, rel=0.015), (model, tokens, name, recompute)
        assert launched == pytest.approx(kernels, abs=4), (model, tokens, name, recompute)


def test_every_kind_of_float8_and_checkpointing_has_a_formula() -> None:
    assert len(COMPILED) == 4 * 3


@pytest.mark.parametrize("compiled", [True, False])
def test_tensor_parallelism_divides_the_bytes_and_float32_moves_more(compiled: bool) -> None:
    words = ["--compile.enabled", str(compiled).lower()]
    recipe = load(CONFIGS / "benchmarks/llama3_8b_8xh100.toml", words, rules=False)
    [one, four] = (
        moved_bytes(work_of(recipe, MeshDegrees(replicate=1, shard=1, context=1, tensor=tensor)), "none")[0]
        for tensor in (1, 4)
    )
    assert four == pytest.approx(one / 4)
    wide = load(CONFIGS / "benchmarks/llama3_8b_8xh100.toml", [*words, "--fsdp.param_dtype", "float32"], rules=False)
    assert 1.1 < moved_bytes(work_of(wide, MeshDegrees(replicate=1, shard=1)), "none")[0] / one <= 2


def test_work_counts_the_micro_batches_and_the_share_of_blocks_of_a_recipe() -> None:
    words = ["--batch.global_batch_size", "64", "--batch.micro_batch_size", "2", "--activation_checkpointing.mode"]
    words += ["selective", "--activation_checkpointing.blocks", "8"]
    work = work_of(
        load(CONFIGS / "benchmarks/llama3_8b_8xh100.toml", words, rules=False),
        MeshDegrees(replicate=2, shard=2, context=2, tensor=2),
    )
    assert (work.micro_batches, work.recomputed, work.tokens) == (8, 0.25, 2 * 8192 // 2)
    assert work.tokens * work.micro_batches * 8 == 64 * 8192  # context = 2 of 4 shares of the batch
    assert work.layers * work.block_params + work.vocabulary * work.width == SIZES["llama3_8b"].matmul_params()
