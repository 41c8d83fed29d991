"""scripts/bench.py: the choice of a suite, and the whole gpu suite on tiny shapes."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(home: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/bench.py"), *arguments],
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_suite_must_be_named(tmp_path: Path) -> None:
    for arguments in ([], ["--suite"], ["--suite", "gup"], ["gpu"]):
        code, out, err = bench(tmp_path, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("usage: bench.py --suite {") and "gpu" in err


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    code, out, err = bench(tmp_path, "--suite", "gpu")
    assert (code, out) == (2, "")
    assert err == "this machine has no GPU to measure; --tiny goes through the suite on a CPU\n"
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_said_before_minutes_of_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for arguments, message in [
        (["--output", "file"], "file cannot be made: File exists; write another --output\n"),
        (["--output", "/proc/x"], "/proc/x cannot be made: No such file or directory; write another --output\n"),
        (["--output", "record", "--model.name", "smollm4"], "model.name"),
    ]:
        code, out, err = bench(tmp_path, "--suite", "gpu", "--tiny", *arguments)
        assert (code, out) == (2, "")
        assert message in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes as Linux shows them")
def test_a_signal_ends_the_full_steps_and_keeps_what_was_measured(tmp_path: Path, corpus: Path) -> None:
    endless = ["--run.steps", "100000000", "--data.source", str(corpus)]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/bench.py"), "--suite", "gpu", "--tiny", "--output", "record", *endless],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 600  # which only a hang takes
    while not (logged := list(tmp_path.rglob("metrics.jsonl"))) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    process.terminate()
    out, err = process.communicate(timeout=90)
    assert len(logged) == 1, (out, err)
    assert process.returncode == 128 + signal.SIGTERM
    assert err == "\ninterrupted; what was not measured yet is missing in the record\n"
    size = logged[0].stat().st_size
    found = json.loads((tmp_path / "record/gpu-cpu.json").read_text())
    assert len(found["matmuls"]) == 2 * 7 * 3 * 3 and "steps" not in found
    assert (tmp_path / "record/gpu-cpu.md").read_text().endswith("## Full training steps\n\nnot measured\n")
    home = f"HOME={tmp_path}".encode()
    assert not [place for place in Path("/proc").glob("[0-9]*/environ") if home in variables(place)]
    assert logged[0].stat().st_size == size


def variables(place: Path) -> list[bytes]:
    """Of a process; none where it is another user's, or gone."""
    try:
        return place.read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[dict[str, Any], str]:
    """JSON and Markdown of the whole suite."""
    home = tmp_path_factory.mktemp("bench")
    code, out, err = bench(home, "--suite", "gpu", "--tiny", "--output", "record", "--data.source", str(corpus))
    assert (code, err) == (0, "")
    assert "written: record/gpu-cpu.json and .md" in out
    folder = home / "record"
    return json.loads((folder / "gpu-cpu.json").read_text()), (folder / "gpu-cpu.md").read_text()


def test_the_record_has_every_measurement(record: tuple[dict[str, Any], str]) -> None:
    found, _ = record
    products = {(row["model"], row["linear"], row["product"], row["kind"]) for row in found["matmuls"]}
    assert len(products) == len(found["matmuls"]) == 2 * 7 * 3 * 3
    for row in found["matmuls"]:
        rows, inner, columns = row["shape"]
        assert row["tflops"] == pytest.approx(2 * rows * inner * columns / row["seconds"] / 1e12)
    assert {tuple(row["shape"]) for row in found["matmuls"] if row["linear"] == "down_proj"} == {
        (64, 384, 128),
        (64, 128, 384),
        (128, 64, 384),
    }
    for row in found["attention"]:
        assert 0 < row["tflops"] < math.inf
        assert any(row["backend"] in name for name in row["kernels"])
    assert {(row["backend"], row["passes"]) for row in found["attention"]} == {
        (backend, passes) for backend in ("flash", "math") for passes in ("forward", "both")
    }
    assert [row["moments"] for row in found["optimizer"]] == ["float32", "bfloat16"]
    assert 0 < found["optimizer"][1]["seconds"] < math.inf
    for row in (found["optimizer"][0], *found["copy"]):
        assert 0 < row["bytes_per_second"] < math.inf


def test_the_record_says_what_made_it(record: tuple[dict[str, Any], str]) -> None:
    found, _ = record
    assert found["environment"]["device"] == "cpu" and found["environment"]["packages"]["torch"]
    assert [row["label"] for row in found["steps"]] == [
        "smollm3_tiny_bf16",
        "smollm3_tiny_float8",
        "llama3_tiny_bf16",
        "llama3_tiny_float8",
    ]
    for row in found["steps"]:
        assert row["outcome"] == "done" and len(row["fingerprint"]) == 16
        assert [window[:2] for window in row["windows"]] == [[step, step + 1] for step in range(2, 8)]  # raw times


def test_the_page_shows_it(record: tuple[dict[str, Any], str]) -> None:
    found, page = record
    assert page.startswith("# One cpu\n")
    assert page.count("| gradient of the weight |") == 2 * 7
    assert f"AdamW, {found['optimizer'][0]['parameters']:,} parameters, bfloat16 moments | " in page
    assert "| smollm3_tiny_float8 | " in page
    assert "not measured" not in page


def test_what_a_device_cannot_do_is_told() -> None:
    import torch

    from recipes.bench.gpu import page
    from recipes.bench.kernels import measured

    def fails() -> None:
        torch.ones(2) @ torch.ones(3)

    found = measured({"backend": "none"}, fails, torch.device("cpu"), repeats=1)
    assert "seconds" not in found and "size" in found["error"]
    row = {"model": "m", "passes": "forward", **found}
    facts = {"device": "NVIDIA H200", "git_uncommitted_changes": False, "packages": {}, "python": "3", "cuda": "13"}
    text = page(
        {
            "environment": {**facts, "git_commit": "abc"},
            "seconds": 1.0,
            "matmuls": [],
            "attention": [row],
            "optimizer": [],
            "copy": [],
        },
        "",
    )
    assert f"| m | none | forward | not measured | not measured | {found['error']} |" in text
    assert "Peak for dense bf16: 989.4 TFLOP/s" in text and text.endswith("## Full training steps\n\nnot measured\n")


def test_the_overhead_suite_gives_both_loops_and_the_starts(tmp_path: Path, corpus: Path) -> None:
    """Its numbers only have to be there: how fast this machine is at the moment is nobody's mistake."""
    tiny = ["--model.layers", "1", "--batch.sequence_length", "16", "--batch.global_batch_size", "4"]
    tiny += ["--schedule.warmup_steps", "1", "--schedule.decay_steps", "0", "--data.source", str(corpus)]
    short = ["--rounds", "2", "--steps", "30", "--out", "overhead.json"]
    code, out, err = bench(tmp_path, "--suite", "overhead", *short, *tiny)
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "overhead.json").read_text())
    assert json.loads(out) == {name: found[name] for name in ("ours", "barest", "ratio", "starts")}
    assert [len(found["windows"][name]) for name in ("ours", "barest")] == [4, 4]
    assert found["ratio"] == pytest.approx(found["ours"] / found["barest"]) and found["ratio"] > 0.2
    assert list(found["starts"]) == ["python", "import torch", "train.py --check", "train.py, one step"]
    assert found["starts"]["python"] < found["starts"]["train.py, one step"]
    assert bench(tmp_path, "--suite", "overhead", "--steps", "5")[0] == 2
