"""scripts/bench.py: the choice of a suite, and the whole gpu suite on tiny shapes."""

import contextlib
import io
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.lab.bench import gpu, gpu_plan, kernels
from recipes.lab.sweep import runner
from tests.processes import wait_for
from tests.recipes.lab.sweep.forked import run_forked

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts/bench.py")


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def bench_here(home: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of scripts/bench.py, called in this process."""
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "run", kernels_here)
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
    wait_for("the first step", lambda: list(home.rglob("metrics.jsonl")) or process.poll() is not None)
    process.terminate()
    out, err = process.communicate()
    logged = list(home.rglob("metrics.jsonl"))
    assert len(logged) == 1, (out, err)
    return home, process.returncode, err, logged[0].stat().st_size


@pytest.mark.slow
def test_a_signal_ends_the_suite_with_one_line_and_its_exit_code(interrupted: tuple[Path, int, str, int]) -> None:
    _, code, err, _ = interrupted
    assert code == 128 + signal.SIGTERM
    assert err == "\ninterrupted; finished rows are written, and the same command continues\n"


@pytest.mark.slow
def test_an_interrupted_suite_leaves_a_record_to_continue(interrupted: tuple[Path, int, str, int]) -> None:
    record = interrupted[0] / "record"
    assert [*json.loads((record / "gpu-cpu.json").read_text())["rows"]] == ["tests"]
    assert "loss, documents, works_bf16, works_float8, " in (record / "gpu-cpu.md").read_text()


@pytest.mark.slow
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


launched = runner.run


def measured_here(home: Path, *arguments: str) -> tuple[int, str, str]:
    """The tiny suite with every row in this process or a fork of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", run_forked)
        patch.setattr(gpu, "run", kernels_here)
        return bench_here(home, "--suite", "gpu", "--tiny", "--output", "record", *arguments)


def kernels_here(
    command: Sequence[str], *, stdout: Path, stderr: Path, timeout: float, environment: dict[str, str]
) -> runner.Ended:
    """recipes.lab.sweep.runner.run, in this process for a group of kernels."""
    if "pytest" in command:
        return launched(command, stdout=stdout, stderr=stderr, timeout=timeout, environment=environment)
    assert command[2:4] == ["--suite", "kernels"]
    with stderr.open("w", encoding="utf-8") as file, contextlib.redirect_stderr(file):
        code = kernels.main(list(command[4:]))
    return runner.Ended(*runner.outcome_and_reason(code, ""), 0.0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder in which the whole tiny suite has run, in two calls."""
    home, words = tmp_path_factory.mktemp("bench"), ["--data.source", str(corpus)]
    code, out, err = measured_here(home, "--no-steps", *words)
    assert (code, err) == (0, "") and "\nwritten: record/gpu-cpu.json and .md, after " in out
    code, out, err = measured_here(home, "--gpus", "2", *words)
    assert (code, err) == (0, "") and "  products                        measured before\n" in out
    assert "products: running" not in out and "[7/7] nccl_tensor: running" in out
    return home


@pytest.fixture(scope="module")
def record(home: Path) -> tuple[dict[str, Any], str]:
    """Its JSON and Markdown."""
    folder = home / "record"
    return json.loads((folder / "gpu-cpu.json").read_text()), (folder / "gpu-cpu.md").read_text()


def measurements(found: dict[str, Any], group: str) -> list[dict[str, Any]]:
    assert found["rows"][group]["outcome"] == "done"
    return list(found["rows"][group]["measurements"])


@pytest.mark.slow
def test_the_record_has_every_matrix_product(record: tuple[dict[str, Any], str]) -> None:
    rows = measurements(record[0], "products")
    products = {(row["model"], row["linear"], row["product"], row["kind"]) for row in rows}
    assert len(products) == len(rows) == 2 * 7 * 3 * 3
    for row in rows:
        left, inner, right = row["shape"]
        assert row["tflops"] == pytest.approx(2 * left * inner * right / row["seconds"] / 1e12)
    down = [row for row in rows if row["linear"] == "down_proj"]
    assert {tuple(row["shape"]) for row in down} == {(64, 384, 128), (64, 128, 384), (128, 64, 384)}


@pytest.mark.slow
def test_the_record_has_every_attention_backend_and_the_kernels_that_ran(record: tuple[dict[str, Any], str]) -> None:
    rows = measurements(record[0], "attention")
    for row in rows:
        assert 0 < row["tflops"] < math.inf
        assert any(row["backend"] in name for name in row["kernels"])
    assert {(row["backend"], row["passes"]) for row in rows} == {
        (backend, passes) for backend in ("flash", "math") for passes in ("forward", "both")
    }


@pytest.mark.slow
def test_the_record_has_losses_copies_casts_and_the_optimizer(record: tuple[dict[str, Any], str]) -> None:
    assert [row["kind"] for row in measurements(record[0], "loss")] == ["eager", "compiled"] * 2
    rows = measurements(record[0], "bandwidth")
    assert [row["operation"] for row in rows] == ["copy", *["cast"] * 4, *["optimizer"] * 2]
    assert all(0 < row["seconds"] < math.inf for row in rows)
    assert all(0 < row["bytes_per_second"] < math.inf for row in rows[:-1]) and "bytes_per_second" not in rows[-1]


@pytest.mark.slow
def test_what_the_device_cannot_do_is_recorded_with_its_reason(record: tuple[dict[str, Any], str]) -> None:
    rows = measurements(record[0], "documents")
    assert [row["documents"] for row in rows] == [1, 4, 16] * 2
    assert all("CPU" in row["error"] for row in rows)
    assert len(re.findall(r"^- attention, \w+, \d+ documents: Could not run", record[1], re.M)) == 6


@pytest.mark.slow
def test_the_record_has_the_training_runs_with_raw_times(record: tuple[dict[str, Any], str]) -> None:
    found, _ = record
    assert found["environment"]["device"] == "cpu" and found["environment"]["packages"]["torch"]
    for name in ("works_bf16", "works_float8", "zero3", "zero2", "nccl_zero3", "nccl_tensor"):
        row = found["rows"][name]
        assert row["outcome"] == "done" and len(row["fingerprint"]) == 16
        assert [window[:2] for window in row["windows"]] == [[step, step + 1] for step in range(2, 6)]


@pytest.mark.slow
def test_the_page_shows_the_record(record: tuple[dict[str, Any], str]) -> None:
    _, page = record
    assert page.startswith("# One cpu\n")
    assert "\n- works_float8: done, loss 6." in page and "\n- tests/gpu: done: " in page and " skipped in " in page
    assert "\n| zero2 | " in page and "\n| nccl_tensor | " in page
    assert "not run yet" not in page and "Measured with other code" not in page
    assert "## Kernels\n\n" + UNKNOWN_DEVICE in page


UNKNOWN_DEVICE = (
    "No predictions: cpu: its rates are not known; the model knows H100, H200, A100, A100-40, B200 and H100-500W.\n"
)


@pytest.mark.slow
def test_a_record_of_other_versions_is_not_mixed_with_new_rows_unless_asked(home: Path, tmp_path: Path) -> None:
    record = json.loads((home / "record/gpu-cpu.json").read_text())
    record["environment"]["packages"]["torch"] = "2.11.0"
    (tmp_path / "record").mkdir()
    file = tmp_path / "record/gpu-cpu.json"
    file.write_text(json.dumps(record))
    code, out, err = measured_here(tmp_path)
    assert (code, out) == (2, "")
    assert f"different: packages torch 2.11.0 there, {torch.__version__} here. --fresh sets it aside" in err
    assert json.loads(file.read_text()) == record
    assert measured_here(tmp_path, "--plan", "--mixed")[1].count("measured before") == 6  # runs have another text
    assert measured_here(tmp_path, "--fresh", "--minutes", "0.0001")[0] == 0
    assert json.loads((tmp_path / "record/gpu-cpu.1.json").read_text()) == record
    assert json.loads(file.read_text())["rows"] == {}


@pytest.mark.slow
def test_a_suite_killed_without_notice_goes_on_with_the_next_row(tmp_path: Path, corpus: Path) -> None:
    """It is killed between a record and its page. A group that hangs is ended, too, and its row says so."""
    code = f"""if True:
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        from recipes.lab.bench import gpu, gpu_plan
        gpu_plan.GROUP_LIMIT = 0.3
        facts = {{"device": "cpu", "python": "3", "cuda": None, "packages": {{}}}}
        gpu._environment = lambda tiny: facts | {{"git_commit": "abc", "git_uncommitted_changes": False}}
        write = gpu_plan.write_record

        def write_and_die(place, record):
            write(place, record)
            if len(record["rows"]) == 2 and sys.argv.pop() == "die":
                os.kill(os.getpid(), signal.SIGKILL)

        gpu_plan.write_record = write_and_die
        sys.exit(gpu.main(sys.argv[1:-1]))
    """
    start = [sys.executable, "-c", code, "--tiny", "--output", "record", "--data.source", str(corpus), "--no-steps"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment(tmp_path), "text": True, "capture_output": True}
    assert subprocess.run([*start, "die"], **options).returncode == -signal.SIGKILL
    file, names = tmp_path / "record/gpu-cpu.json", list(gpu_plan.GROUPS)
    rows = json.loads(file.read_text())["rows"]
    assert [*rows] == names[:2] and {row["outcome"] for row in rows.values()} == {"timed out"}
    line = "- bandwidth: timed out: no end after 0.3 s; all its processes were killed\n"
    assert line in (tmp_path / "record/gpu-cpu.md").read_text()  # which is written after the JSON file
    again = subprocess.run([*start, "live"], **options)
    assert (again.returncode, again.stderr) == (0, "")
    assert f"[1/{len(names) - 2}] {names[2]}: running" in again.stdout
    assert [*json.loads(file.read_text())["rows"]] == names


@pytest.mark.slow
def test_a_second_suite_is_refused_and_leaves_the_record_alone(home: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        from recipes.files.lock import FolderLock
        lock = FolderLock()
        lock.take(Path(sys.argv[2]), log=print)
        print("locked", flush=True)
        input()
    """
    folder = home / "runs/bench/cpu/gpu_bench"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == "locked\n"
        ended = measured_here(home, "--fresh")
        first.communicate("")
    assert ended[0] == 2 and "is in use" in ended[2] and "write another --runs and --output" in ended[2]
    assert sorted(file.name for file in (home / "record").iterdir()) == ["gpu-cpu.json", "gpu-cpu.md"]


@pytest.mark.slow
def test_a_full_disk_ends_the_suite_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gpu, "run_row", full)
    code, _, err = measured_here(tmp_path)
    assert code == 2 and err.endswith("No space left on device; free space, or write another --runs\n")
    assert [*json.loads((tmp_path / "record/gpu-cpu.json").read_text())["rows"]] == ["tests"]
