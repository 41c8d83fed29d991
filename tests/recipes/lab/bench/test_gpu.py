"""What the gpu suite measures first, what fits into a time, and the comparison of predictions with measurements."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.config import MeshDegrees
from recipes.lab.bench import gpu_page, gpu_plan
from recipes.lab.bench.gpu_plan import GROUPS, Item, Record, fitting, items_of, open_record, place_of, write_record
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
    return {"environment": FACTS, "state": "s", "code": "c", "rows": rows}


def compared(rows: dict[str, Any], sweep: Sweep) -> dict[str, tuple[float, float, float]]:
    """Of steps and kernels: what -> predicted and measured milliseconds, and their ratio."""
    _, _, tables = gpu_page.page(record_of(rows), sweep).partition("## Predicted and measured steps\n")
    lines = [line.strip("|").split("|") for line in tables.splitlines() if line.startswith("| ")]
    cells = [(name.strip(), *numbers) for name, *numbers in lines if name.strip() not in ("run", "what")]
    return {name: (float(a), float(b), float(ratio)) for name, a, b, ratio, *_ in cells}


def group(*measurements: dict[str, Any]) -> dict[str, Any]:
    return {"outcome": "done", "reason": "", "seconds": 1.0, "state": "s", "measurements": list(measurements)}


def test_the_first_rows_show_that_a_run_works_then_come_rates_then_changes_then_llama(sweep: Sweep) -> None:
    names = [item.name for item in items_of(sweep, DEVICE, tiny=False, steps=True)]
    assert names[: 3 + len(GROUPS)] == ["tests", "works_bf16", "works_float8", *GROUPS]
    changes = names[3 + len(GROUPS) :]
    assert changes[:3] == ["zero3", "zero2", "float8"] and changes[-2:] == ["llama3_8b_bf16", "llama3_8b_float8"]


def test_a_training_run_takes_longer_with_more_tokens_and_a_larger_model(sweep: Sweep) -> None:
    seconds = {item.name: item.estimate for item in items_of(sweep, DEVICE, tiny=False, steps=True)}
    assert seconds["works_bf16"] < seconds["zero2"] < seconds["zero3"] < seconds["llama3_8b_bf16"]
    assert all(item.estimate < item.limit for item in items_of(sweep, "NVIDIA A100", tiny=False, steps=True))


def test_what_fits_keeps_the_order_and_prefers_shorter_rows_to_none() -> None:
    rows = [Item(name, seconds, 100) for name, seconds in (("a", 30.0), ("b", 50.0), ("c", 20.0), ("d", 20.0))]
    assert [item.name for item in fitting(rows, 60)] == ["a", "c"]
    assert fitting(rows, 10) == [] and fitting(rows, 1000) == rows


def test_ten_minutes_are_enough_for_all_rates_and_the_first_changes(sweep: Sweep) -> None:
    chosen = [item.name for item in fitting(items_of(sweep, DEVICE, tiny=False, steps=True), 600)]
    assert {"tests", "works_bf16", "works_float8", *GROUPS, "zero3", "zero2", "float8", "float8_gather"} <= {*chosen}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"environment": {}}', '{"environment": {}, "rows": []}'])
def test_a_file_that_is_no_record_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    place = place_of(tmp_path, DEVICE)
    place.with_suffix(".json").write_text(text)
    with pytest.raises(gpu_plan.UserError, match="is not a record that can be continued; --fresh sets it aside"):
        open_record(place, FACTS, fresh=False, mixed=False)
    assert place.with_suffix(".json").read_text() == text


def test_another_commit_is_named_and_continued_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(tmp_path, DEVICE)
    old = open_record(place, FACTS, fresh=False, mixed=False)
    old["rows"]["loss"] = group() | {"fingerprint": "kernels", "state": old["state"]}
    write_record(place, old)
    assert open_record(place, FACTS | {"host": "another"}, fresh=False, mixed=False) == old | {
        "environment": FACTS | {"host": "another"}
    }
    monkeypatch.setattr(gpu_plan, "code_hash", lambda: "new")
    with pytest.raises(
        gpu_plan.UserError, match=r"has 1 rows of another state; different: the code \(commit abc there"
    ):
        open_record(place, FACTS | {"git_commit": "def"}, fresh=False, mixed=False)
    mixed = open_record(place, FACTS | {"git_commit": "def"}, fresh=False, mixed=True)
    assert mixed["rows"] == old["rows"] and mixed["state"] != old["state"]


def test_two_earlier_records_are_set_aside_side_by_side(tmp_path: Path) -> None:
    place = place_of(tmp_path, DEVICE)
    for _ in range(3):
        write_record(place, open_record(place, FACTS, fresh=True, mixed=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gpu-nvidia-h200.1.json",
        "gpu-nvidia-h200.2.json",
        "gpu-nvidia-h200.json",
    ]


def test_a_write_that_fails_leaves_the_record_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(tmp_path, DEVICE)
    write_record(place, record_of({}))

    def full(*words: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(gpu_plan.UserError, match="No space left on device; free space, or write another --output"):
        write_record(place, record_of({"loss": group()}))
    assert json.loads(place.with_suffix(".json").read_text())["rows"] == {}


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
        **{"label": "zero2", "outcome": "done", "reason": "", "seconds": 60.0, "state": "old", "processes": 1},
        **{"step_seconds": 4.0, "step_seconds_least": 4.0, "step_seconds_most": 4.0, "mfu": 0.5, "mfu_full": 0.6},
        **{"tokens_per_second_per_device": 16384.0, "tflops_per_device": 360.0, "peak_memory_gib": 70.0},
        **{"final_loss": 5.0, "curve": [], "environment": FACTS | {"packages": {"torch": "2.11.0", "torchao": None}}},
        "fingerprint": row.fingerprint,
    }
    [(name, (predicted, measured, ratio))] = compared({"zero2": found}, sweep).items()
    assert name == "zero2" and measured == 4000
    assert predicted == pytest.approx(1e3 * gpu_plan.predicted_step(row, DEVICE), rel=0.01)  # type: ignore[operator]
    assert ratio == pytest.approx(measured / predicted, abs=0.01)
    text = gpu_page.page(record_of({"zero2": found}), sweep)
    assert "Measured with other code or versions: zero2." in text and "| zero2 | 16,384 |" in text
    peak = predict_memory(row.recipe, row.recipe.mesh.fit(1), context=False).peak
    assert f"| {peak / 1e9:.1f} | 75.2 | {70 * 2**30 / peak:.3f} |" in text
    assert compared({"zero2": found | {"fingerprint": "other"}}, sweep) == {}


def test_a_row_that_failed_is_listed_with_its_reason(sweep: Sweep) -> None:
    rows = {"loss": group() | {"outcome": "crashed", "reason": "illegal memory access"}}
    text = gpu_page.page(record_of(rows), sweep)
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


def test_a_row_of_another_recipe_is_not_shown_and_counts_as_not_run(sweep: Sweep) -> None:
    old = {**group(), "fingerprint": "of another recipe", "curve": [[1, 8, 7.0], [2, 16, 6.0]]}
    text = gpu_page.page(record_of({"zero2": old, "works_bf16": old}), sweep)
    assert "not run yet: tests, " in text and text.count("zero2") == text.count("works_bf16") == 1


def test_long_errors_are_cut_and_those_of_products_are_listed_once(sweep: Sweep) -> None:
    error = "a | b " + 1000 * "c "
    product = {"operation": "product", "model": "m", "linear": "q_proj", "shape": [1, 1, 1], "error": error}
    rows = [product | {"product": name, "kind": "float8 rowwise"} for name in ("forward", "gradient of the input")]
    loss = {"operation": "loss", "model": "m", "kind": "eager", "error": error}
    text = gpu_page.page(record_of({"products": group(*rows), "loss": group(loss)}), sweep)
    assert text.count("\n- products, m, float8 rowwise: a | b c") == 1
    assert "\n- loss, m, eager: a | b c" in text
    assert max(len(line) for line in text.splitlines() if " c c" in line) < 360


def test_nothing_is_predicted_for_a_cpu(sweep: Sweep) -> None:
    text = gpu_page.page(record_of({}) | {"environment": FACTS | {"device": "cpu"}}, sweep)
    assert "## Predicted and measured steps\n\nNone.\n\n## Kernels\n\nNo predictions: cpu: its rates are not" in text


def test_notes_of_the_record_are_shown_beside_the_rows_that_lack_the_rest(sweep: Sweep) -> None:
    """A row whose record was lost has its printed numbers alone."""
    [row] = [row for row in sweep.rows if row.label == "zero2"]
    found = {"outcome": "done", "reason": "", "state": "s", "step_seconds": 4.0, "peak_memory_gib": 70.0}
    text = gpu_page.page(record_of({"zero2": found | {"fingerprint": row.fingerprint, "note": "printed"}}), sweep)
    assert "\n- zero2: printed\n" in text and "| tokens/s/device |" not in text and "| zero2 | " in text
