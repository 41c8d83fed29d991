"""The gpu suite: what it refuses, and all of it on tiny shapes."""

import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.lab.sweep import loop, runner
from tests.gpu import kernels, suite
from tests.gpu.suite import GROUPS
from tests.recipes.lab.sweep.forked import run_forked

ROOT = Path(__file__).resolve().parents[2]


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def bench_here(home: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the suite, called in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("KINETO_LOG_LEVEL", "6")  # the suite sets it where it is missing, and this process goes on
        for name, value in environment(home).items():
            patch.setenv(name, value)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(runner, "stop_signals", contextlib.nullcontext)  # signals are for pytest
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = suite.main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def test_the_gpu_suite_measures_nothing_without_a_gpu(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "run", kernels_here)
        code, out, err = bench_here(tmp_path)
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
    code, out, err = bench_here(tmp_path, "--tiny", *arguments)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def measured_here(home: Path, *arguments: str) -> tuple[int, str, str]:
    """The tiny suite with every row in this process or a fork of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", run_forked)
        patch.setattr(suite, "run", kernels_here)
        return bench_here(home, "--tiny", "--output", "record", *arguments)


def kernels_here(
    command: Sequence[str], *, stdout: Path, stderr: Path, timeout: float, environment: dict[str, str]
) -> runner.Ended:
    """recipes.lab.sweep.runner.run, in this process for a group of kernels."""
    assert command[1:3] == ["-m", "tests.gpu.kernels"]
    with stderr.open("w", encoding="utf-8") as file, contextlib.redirect_stderr(file):
        code = kernels.main(list(command[3:]))
    return runner.Ended(*runner.outcome_and_reason(code, ""), 0.0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder in which the whole tiny suite has run, in two calls."""
    home, words = tmp_path_factory.mktemp("bench"), ["--data.source", str(corpus)]
    code, out, err = measured_here(home, "--no-steps", *words)
    assert (code, err) == (0, "") and "\nwritten: record/gpu-cpu.json\n" in out
    code, out, err = measured_here(home, "--gpus", "2", *words)
    assert (code, err) == (0, "") and "products: measured before\n" in out
    assert "products: running" not in out and "[2/2] nccl_tensor: running" in out
    return home


@pytest.fixture(scope="module")
def record(home: Path) -> dict[str, Any]:
    return dict(json.loads((home / "record/gpu-cpu.json").read_text()))


def measurements(found: dict[str, Any], group: str) -> list[dict[str, Any]]:
    assert found["rows"][group]["outcome"] == "done"
    return list(found["rows"][group]["measurements"])


@pytest.mark.slow
def test_the_record_has_every_matrix_product(record: dict[str, Any]) -> None:
    rows = measurements(record, "products")
    products = {(row["model"], row["linear"], row["product"], row["kind"]) for row in rows}
    assert len(products) == len(rows) == 2 * 7 * 3 * 3
    for row in rows:
        left, inner, right = row["shape"]
        assert row["tflops"] == pytest.approx(2 * left * inner * right / row["seconds"] / 1e12)
    down = [row for row in rows if row["linear"] == "down_proj"]
    assert {tuple(row["shape"]) for row in down} == {(64, 384, 128), (64, 128, 384), (128, 64, 384)}


@pytest.mark.slow
def test_the_record_has_every_attention_backend_and_the_kernels_that_ran(record: dict[str, Any]) -> None:
    rows = measurements(record, "attention")
    for row in rows:
        assert 0 < row["tflops"] < math.inf
        assert any(row["backend"] in name for name in row["kernels"])
    assert {(row["backend"], row["passes"]) for row in rows} == {
        (backend, passes) for backend in ("flash", "math") for passes in ("forward", "both")
    }


@pytest.mark.slow
def test_the_record_has_losses_copies_casts_and_the_optimizer(record: dict[str, Any]) -> None:
    assert [row["kind"] for row in measurements(record, "loss")] == ["eager", "compiled"] * 2
    rows = measurements(record, "bandwidth")
    assert [row["operation"] for row in rows] == ["copy", *["cast"] * 4, *["optimizer"] * 2]
    assert all(0 < row["seconds"] < math.inf for row in rows)
    assert all(0 < row["bytes_per_second"] < math.inf for row in rows[:-1]) and "bytes_per_second" not in rows[-1]


@pytest.mark.slow
def test_what_the_device_cannot_do_is_recorded_with_its_reason(record: dict[str, Any]) -> None:
    rows = measurements(record, "documents")
    assert [row["documents"] for row in rows] == [1, 4, 16] * 2
    assert all("CPU" in row["error"] for row in rows)


@pytest.mark.slow
def test_the_record_has_the_training_runs_with_raw_times(record: dict[str, Any]) -> None:
    assert record["environment"]["device"] == "cpu" and record["environment"]["packages"]["torch"]
    for name in ("works_bf16", "works_float8", "zero3", "zero2", "nccl_zero3", "nccl_tensor"):
        row = record["rows"][name]
        assert row["outcome"] == "done" and len(row["fingerprint"]) == 16
        assert [window[:2] for window in row["windows"]] == [[step, step + 1] for step in range(2, 6)]


@pytest.mark.slow
def test_a_suite_killed_without_notice_goes_on_with_the_next_row(tmp_path: Path, corpus: Path) -> None:
    """It is killed after a record is written. A group that hangs is ended, too, and its row says so."""
    code = f"""if True:
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        from tests.gpu import suite
        suite.GROUP_LIMIT = 0.3
        facts = {{"device": "cpu", "python": "3", "cuda": None, "packages": {{}}}}
        suite._environment = lambda tiny: facts | {{"git_commit": "abc", "git_uncommitted_changes": False}}
        write = suite.write_whole

        def write_and_die(file, text, **options):
            write(file, text, **options)
            if '"products"' in text and sys.argv.pop() == "die":
                os.kill(os.getpid(), signal.SIGKILL)

        suite.write_whole = write_and_die
        sys.exit(suite.main(sys.argv[1:-1]))
    """
    start = [sys.executable, "-c", code, "--tiny", "--output", "record", "--data.source", str(corpus), "--no-steps"]
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": environment(tmp_path) | {"PYTHONPATH": str(ROOT)},
        "text": True,
        "capture_output": True,
    }
    assert subprocess.run([*start, "die"], **options).returncode == -signal.SIGKILL
    file, names = tmp_path / "record/gpu-cpu.json", list(GROUPS)
    rows = json.loads(file.read_text())["rows"]
    assert [*rows] == names[:2] and {row["outcome"] for row in rows.values()} == {"timed out"}
    again = subprocess.run([*start, "live"], **options)
    assert (again.returncode, again.stderr) == (0, "")
    assert f"{names[1]}: measured before\n{names[2]}: running" in again.stdout
    assert f"\n{names[2]}: timed out, no end after 0.3 s; all its processes were killed\n" in again.stdout
    assert [*json.loads(file.read_text())["rows"]] == names


@pytest.mark.slow
def test_a_full_disk_ends_the_suite_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop, "train_apart", full)
    code, _, err = measured_here(tmp_path)
    assert code == 2 and err.endswith("No space left on device; free space, or write another --output and --runs\n")
    assert [*json.loads((tmp_path / "record/gpu-cpu.json").read_text())["rows"]] == [*GROUPS]
