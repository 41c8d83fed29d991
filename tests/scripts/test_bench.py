"""scripts/bench.py: the choice of a suite, the whole gpu suite on tiny shapes, and the overhead suite."""

import contextlib
import io
import json
import math
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.bench import gpu
from recipes.bench.kernels import measured
from recipes.sweep import loop, runner
from tests.processes import wait_for
from tests.recipes.sweep.forked import run_forked

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts/bench.py")


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def bench(home: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def bench_here(home: Path, *arguments: str) -> tuple[int, str, str]:
    """The same without a process of its own."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("KINETO_LOG_LEVEL", "6")  # the suite sets it where it is missing, and this process goes on
        for name, value in environment(home).items():
            patch.setenv(name, value)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(runner, "stop_signals", contextlib.nullcontext)  # signals are for pytest
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = runpy.run_path(SCRIPT)["main"](list(arguments))
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("arguments", [[], ["--suite"], ["--suite", "gup"], ["gpu"]])
def test_a_suite_must_be_named(arguments: list[str], tmp_path: Path) -> None:
    code, out, err = bench_here(tmp_path, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: bench.py --suite {") and "gpu" in err


def test_the_gpu_suite_measures_nothing_without_a_gpu(tmp_path: Path) -> None:
    code, out, err = bench_here(tmp_path, "--suite", "gpu")
    assert (code, out) == (2, "")
    assert err == "this machine has no GPU to measure; --tiny runs the suite on a CPU\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "file"], "file cannot be created: File exists; write another --output\n"),
        (["--output", "/proc/x"], "/proc/x cannot be created: No such file or directory; write another --output\n"),
        (["--output", "record", "--model.name", "smollm4"], "model.name"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, out, err = bench_here(tmp_path, "--suite", "gpu", "--tiny", *arguments)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, int, str, int]:
    """SIGTERM in the first full step: the folder, exit code, standard error, and size of the step's metrics."""
    home = tmp_path_factory.mktemp("interrupted")
    endless = ["--run.steps", "100000000", "--data.source", str(corpus)]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--suite", "gpu", "--tiny", "--output", "record", *endless],
        cwd=home,
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for("the first step", lambda: list(home.rglob("metrics.jsonl")) or process.poll() is not None, seconds=600)
    process.terminate()
    out, err = process.communicate(timeout=90)
    logged = list(home.rglob("metrics.jsonl"))
    assert len(logged) == 1, (out, err)
    return home, process.returncode, err, logged[0].stat().st_size


def test_a_signal_ends_the_suite_with_one_line_and_its_exit_code(interrupted: tuple[Path, int, str, int]) -> None:
    _, code, err, _ = interrupted
    assert code == 128 + signal.SIGTERM
    assert err == "\ninterrupted; the record lacks what was not measured yet\n"


def test_an_interrupted_suite_keeps_what_was_measured(interrupted: tuple[Path, int, str, int]) -> None:
    record = interrupted[0] / "record"
    found = json.loads((record / "gpu-cpu.json").read_text())
    assert len(found["matmuls"]) == 2 * 7 * 3 * 3 and "steps" not in found
    assert (record / "gpu-cpu.md").read_text().endswith("## Full training steps\n\nnot measured\n")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
def test_a_signal_ends_the_processes_of_the_full_steps(interrupted: tuple[Path, int, str, int]) -> None:
    home, _, _, size = interrupted
    mine = f"HOME={home}".encode()
    assert not [place for place in Path("/proc").glob("[0-9]*/environ") if mine in variables(place)]
    [logged] = home.rglob("metrics.jsonl")
    assert logged.stat().st_size == size


def variables(place: Path) -> list[bytes]:
    """The environment of a process; empty where it belongs to another user or has ended."""
    try:
        return place.read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[dict[str, Any], str]:
    """JSON and Markdown of the whole suite."""
    home = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "run", run_forked)
        code, out, err = bench_here(
            home, "--suite", "gpu", "--tiny", "--output", "record", "--data.source", str(corpus)
        )
    assert (code, err) == (0, "")
    assert "written: record/gpu-cpu.json and .md" in out
    folder = home / "record"
    return json.loads((folder / "gpu-cpu.json").read_text()), (folder / "gpu-cpu.md").read_text()


def test_the_record_has_every_matrix_product(record: tuple[dict[str, Any], str]) -> None:
    found, _ = record
    products = {(row["model"], row["linear"], row["product"], row["kind"]) for row in found["matmuls"]}
    assert len(products) == len(found["matmuls"]) == 2 * 7 * 3 * 3
    for row in found["matmuls"]:
        rows, inner, columns = row["shape"]
        assert row["tflops"] == pytest.approx(2 * rows * inner * columns / row["seconds"] / 1e12)
    down = [row for row in found["matmuls"] if row["linear"] == "down_proj"]
    assert {tuple(row["shape"]) for row in down} == {
        (64, 384, 128),
        (64, 128, 384),
        (128, 64, 384),
    }


def test_the_record_has_every_attention_backend_and_the_kernels_that_ran(record: tuple[dict[str, Any], str]) -> None:
    found, _ = record
    for row in found["attention"]:
        assert 0 < row["tflops"] < math.inf
        assert any(row["backend"] in name for name in row["kernels"])
    assert {(row["backend"], row["passes"]) for row in found["attention"]} == {
        (backend, passes) for backend in ("flash", "math") for passes in ("forward", "both")
    }


def test_the_record_has_optimizer_and_copies(record: tuple[dict[str, Any], str]) -> None:
    found, _ = record
    assert [row["moments"] for row in found["optimizer"]] == ["float32", "bfloat16"]
    assert 0 < found["optimizer"][1]["seconds"] < math.inf
    for row in (found["optimizer"][0], *found["copy"]):
        assert 0 < row["bytes_per_second"] < math.inf


def test_the_record_names_device_and_packages(record: tuple[dict[str, Any], str]) -> None:
    found, _ = record
    assert found["environment"]["device"] == "cpu" and found["environment"]["packages"]["torch"]


def test_the_record_has_the_full_steps_with_raw_times(record: tuple[dict[str, Any], str]) -> None:
    found, _ = record
    assert [row["label"] for row in found["steps"]] == [
        "smollm3_tiny_bf16",
        "smollm3_tiny_float8",
        "llama3_tiny_bf16",
        "llama3_tiny_float8",
    ]
    for row in found["steps"]:
        assert row["outcome"] == "done" and len(row["fingerprint"]) == 16
        assert [window[:2] for window in row["windows"]] == [[step, step + 1] for step in range(2, 8)]


def test_the_page_shows_the_record(record: tuple[dict[str, Any], str]) -> None:
    found, page = record
    assert page.startswith("# One cpu\n")
    assert page.count("| gradient of the weight |") == 2 * 7
    assert f"AdamW, {found['optimizer'][0]['parameters']:,} parameters, bfloat16 moments | " in page
    assert "| smollm3_tiny_float8 | " in page
    assert "not measured" not in page


def test_the_page_says_why_something_was_not_measured() -> None:
    def fails() -> None:
        torch.ones(2) @ torch.ones(3)

    found = measured({"backend": "none"}, fails, torch.device("cpu"), repeats=1)
    assert "seconds" not in found and "size" in found["error"]
    row = {"model": "m", "passes": "forward", **found}
    facts = {"device": "NVIDIA H200", "git_uncommitted_changes": False, "packages": {}, "python": "3", "cuda": "13"}
    text = gpu.page(
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


def test_the_overhead_suite_reports_both_loops_and_the_starts(tmp_path: Path, corpus: Path) -> None:
    """Only that its numbers are there: the speed of this machine is not what is tested."""
    tiny = ["--model.layers", "1", "--batch.sequence_length", "16", "--batch.global_batch_size", "4"]
    tiny += ["--schedule.warmup_steps", "1", "--schedule.decay_steps", "0", "--data.source", str(corpus)]
    short = ["--rounds", "2", "--steps", "30", "--out", "overhead.json"]
    code, out, err = bench(tmp_path, "--suite", "overhead", *short, *tiny)
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "overhead.json").read_text())
    assert json.loads(out) == {name: found[name] for name in found if name not in ("windows", "environment")}
    assert [len(found["windows"][name]) for name in ("ours", "barest", "replica_check")] == [4, 4, 10]
    assert found["replica_check_share"] == pytest.approx(found["replica_check"] / found["barest"] / 100)
    assert found["ratio"] == pytest.approx(found["ours"] / found["barest"]) and found["ratio"] > 0.2
    assert list(found["starts"]) == ["python", "import torch", "train.py --check", "train.py, one step"]
    assert found["starts"]["python"] < found["starts"]["train.py, one step"]


def test_the_overhead_suite_refuses_too_few_steps(tmp_path: Path) -> None:
    assert bench_here(tmp_path, "--suite", "overhead", "--steps", "5")[0] == 2
