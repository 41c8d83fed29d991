"""What the gpu suite measures first, what fits into a time, and the comparison of predictions with measurements."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.config import MeshDegrees
from parallel.errors import UserError
from recipes.lab.bench import gpu, gpu_page
from recipes.lab.bench.gpu_page import Record
from recipes.lab.sweep.grid import Sweep, read_sweep
from recipes.plan.hardware import GPUS
from recipes.plan.memory import predict as predict_memory
from recipes.plan.rates import RATES
from recipes.plan.time import attention_seconds, step_time
from recipes.recipe.load import CONFIGS, load

DEVICE = "NVIDIA H200"
FACTS = {
    **{"device": DEVICE, "python": "3.12", "cuda": "13.0", "packages": {"torch": "2.11.0"}},
    **{"git_commit": "abc", "git_uncommitted_changes": False},
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    folder = tmp_path_factory.mktemp("gpu")
    return read_sweep(CONFIGS / "sweeps/gpu_bench.toml", output=folder, processes=1)


def record_of(rows: dict[str, Any]) -> Record:
    return {"environment": FACTS, "code": "c", "rows": rows}


def compared(rows: dict[str, Any], sweep: Sweep) -> dict[str, tuple[float, float, float]]:
    """Of kernels: what -> predicted and measured milliseconds, and their ratio."""
    _, _, kernels = gpu_page.page(record_of(rows), [sweep]).partition("## Kernels\n")
    lines = [line.strip("|").split("|") for line in kernels.splitlines() if line.startswith("| ")]
    cells = [(name.strip(), *numbers) for name, *numbers in lines if name.strip() != "what"]
    return {name: (float(a), float(b), float(ratio)) for name, a, b, ratio, *_ in cells}


def group(*measurements: dict[str, Any]) -> dict[str, Any]:
    return {"outcome": "done", "reason": "", "seconds": 1.0, "measurements": list(measurements)}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"environment": {}}', '{"environment": {}, "rows": 1}'])
def test_a_file_that_is_no_record_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(text)
    with pytest.raises(UserError, match="is not a record that can be continued; move it away, or write another"):
        gpu.open_record(file, FACTS)
    assert file.read_text() == text


def test_a_record_of_other_code_or_versions_is_refused_by_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    old = gpu.open_record(file, FACTS) | {"rows": {"loss": group()}}
    file.write_text(json.dumps(old))
    assert gpu.open_record(file, FACTS | {"host": "another"}) == old | {"environment": FACTS | {"host": "another"}}
    file.write_text(json.dumps(old | {"code": "other"}))
    with pytest.raises(
        UserError, match=r"has 1 rows of another state; different: cuda \(13.0 there\), the code \(commit"
    ):
        gpu.open_record(file, FACTS | {"cuda": "12.9"})


def test_a_write_that_fails_leaves_the_record_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gpu.json"
    file.write_text("before")

    def full(*words: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match="No space left on device; free space, or"), gpu._saved(file, record_of({}), []):
        pass
    assert file.read_text() == "before"


def test_products_of_a_block_are_compared_together(sweep: Sweep) -> None:
    """A step's products are those of its blocks."""
    shapes = {"q_proj, o_proj": 2048, "k_proj, v_proj": 512, "gate_proj, up_proj": 11008, "down_proj": 11008}
    orders = {"forward": (0, 1, 2), "gradient of the input": (0, 2, 1), "gradient of the weight": (2, 0, 1)}
    rows = []
    for linear, width in shapes.items():
        sizes = (8192, 11008, 2048) if linear == "down_proj" else (8192, 2048, width)
        for product, order in orders.items():
            shape = [sizes[index] for index in order]
            seconds = 2 * math.prod(shape) / 361.131e12
            rows.append(
                {
                    **{"operation": "product", "model": "smollm3_3b", "kind": "bf16", "linear": linear},
                    **{"product": product, "shape": shape, "tflops": 361.131, "seconds": seconds},
                }
            )
    predicted, measured, ratio = compared({"products": group(*rows)}, sweep)["products, smollm3_3b, bf16"]
    words = ["--activation_checkpointing.mode", "none", "--activation_checkpointing.blocks", "all"]
    words += ["--batch.global_batch_size", "1", "--batch.micro_batch_size", "1", "--fsdp.reshard_after_forward", "true"]
    recipe = load(CONFIGS / "benchmarks/smollm3_3b_h100.toml", words)
    step = step_time(recipe, MeshDegrees(replicate=1, shard=1), gpu=GPUS["H200"])
    assert predicted == pytest.approx(1e3 * step.seconds["products"] / 36, rel=0.01)
    assert ratio == pytest.approx(measured / predicted, abs=0.01)
    rows[0] = {**rows[0], "error": "unsupported"}
    del rows[0]["seconds"]
    assert compared({"products": group(*rows)}, sweep) == {}


def test_attention_loss_copies_and_the_optimizer_are_compared(sweep: Sweep) -> None:
    flops = 2 * 16 * 128 * 8192**2
    attention = {"operation": "attention", "model": "smollm3_3b", "backend": "cudnn", "passes": "both", "tokens": 8192}
    seconds = sum(attention_seconds(flops, "cudnn", gpu=GPUS["H200"], rates=RATES))
    found = compared(
        {
            "attention": group(attention | {"seconds": seconds, "tflops": 3 * flops / seconds / 1e12}),
            "loss": group(
                {
                    "operation": "loss",
                    "model": "smollm3_3b",
                    "kind": "compiled",
                    "chunks": 1,
                    "logits": 10**9,
                    "seconds": 1,
                }
            ),
            "bandwidth": group(
                {"operation": "copy", "gib": 4.0, "bytes": 8 * 2**30, "seconds": 0.002},
                {
                    **{"operation": "optimizer", "model": "smollm3_3b", "parameters": 10**9, "moments": "bfloat16"},
                    **{"seconds": 0.01},
                },
            ),
        },
        sweep,
    )
    rate = RATES.moved * GPUS["H200"].bandwidth
    assert found["attention, smollm3_3b, cudnn, both"][2] == 1.0
    assert found["loss, smollm3_3b, compiled"][1] == 1000
    assert found["copy of 4 GiB"][2] == pytest.approx(0.002 / (8 * 2**30 / rate), abs=0.01)
    update = found["AdamW, 1,000,000,000 parameters, bfloat16 moments"][0]
    assert update == pytest.approx(52e12 / (RATES.updated * rate), rel=0.01)


def test_steps_are_compared_if_their_recipe_is_still_the_same(sweep: Sweep) -> None:
    [row] = [row for row in sweep.rows if row.label == "zero2"]
    found = {
        **{"label": "zero2", "outcome": "done", "reason": "", "seconds": 60.0, "processes": 1},
        **{"step_seconds": 4.0, "step_seconds_least": 4.0, "step_seconds_most": 4.0, "mfu": 0.5, "mfu_full": 0.6},
        **{"tokens_per_second_per_device": 16384.0, "tflops_per_device": 360.0, "peak_memory_gib": 70.0},
        **{"final_loss": 5.0, "curve": [], "environment": FACTS | {"packages": {"torch": "2.11.0", "torchao": None}}},
        "overrides": row.overrides,
    }
    page = gpu_page.page(record_of({"zero2": found}), [sweep])
    degrees = row.recipe.mesh.fit(1)
    error = 4 / step_time(row.recipe, degrees, gpu=GPUS["H200"]).step_seconds - 1
    memory = predict_memory(row.recipe, degrees, context=False).peak / (70 * 2**30) - 1
    assert page.count("| zero2 | 16,384 |") == 2
    assert f"| zero2 | 16,384 | {error:+.1%} | 75.2 | {memory:+.2%} |" in page
    other = gpu_page.page(record_of({"zero2": found | {"overrides": {"run.steps": 7}}}), [sweep])
    assert "| zero2 |" not in other and ", zero2, " in other.partition("not run yet: ")[2]


def test_a_row_that_failed_is_listed_with_its_reason(sweep: Sweep) -> None:
    rows = {"loss": group() | {"outcome": "crashed", "reason": "illegal memory access"}}
    text = gpu_page.page(record_of(rows), [sweep])
    assert "\n- loss: crashed: illegal memory access\n" in text and ", zero2, " in text.partition("not run yet: ")[2]
    assert "Peak for dense bf16: 989.4 TFLOP/s" in text


def test_kernels_are_measured_with_the_memory_allocator_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipes.lab.bench import kernels

    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "let_segments_grow", lambda: done.append("segments grow"))
    monkeypatch.setattr(kernels, "measurements", lambda group, at: iter([{"group": group, "done": list(done)}]))
    kernels.main(["--group", "products", "--out", str(tmp_path / "rows")])
    assert json.loads((tmp_path / "rows").read_text()) == {"group": "products", "done": ["segments grow"]}


def test_long_errors_are_cut_and_those_of_products_are_listed_once(sweep: Sweep) -> None:
    error = "a | b " + 1000 * "c "
    product = {"operation": "product", "model": "m", "linear": "q_proj", "shape": [1, 1, 1], "error": error}
    rows = [product | {"product": name, "kind": "float8 rowwise"} for name in ("forward", "gradient of the input")]
    loss = {"operation": "loss", "model": "m", "kind": "eager", "error": error}
    text = gpu_page.page(record_of({"products": group(*rows), "loss": group(loss)}), [sweep])
    assert text.count("\n- products, m, float8 rowwise: a | b c") == 1
    assert "\n- loss, m, eager: a | b c" in text
    assert max(len(line) for line in text.splitlines() if " c c" in line) < 360


def test_notes_of_the_record_are_shown_beside_the_rows_that_lack_the_rest(sweep: Sweep) -> None:
    """A row whose record was lost has its printed numbers alone."""
    [row] = [row for row in sweep.rows if row.label == "zero2"]
    found = {"outcome": "done", "step_seconds": 4.0, "peak_memory_gib": 70.0, "tokens_per_second_per_device": 1.0}
    text = gpu_page.page(record_of({"zero2": found | {"overrides": row.overrides, "note": "printed"}}), [sweep])
    assert "\n- zero2: printed\n" in text and "| tokens/s/device |" not in text and "| zero2 | " in text
