"""scripts/sweep.py as people start it: every twin of a shipped sweep, rows that fail, resuming, and Ctrl-C."""

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
from matplotlib.image import imread

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts/sweep.py")
TWINS = sorted(path for path in (ROOT / "configs/sweeps/cpu").glob("*.toml") if path.stem not in ("tiny", "gpu_bench"))
NUMBERS = (
    "step_seconds",
    "data_seconds",
    "first_step_seconds",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "peak_memory_gib",
    "final_loss",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all sweeps of this file run: they share the tokenized text."""
    return tmp_path_factory.mktemp("sweep")


def command(sweep: Path | str, *arguments: str) -> list[str]:
    return [sys.executable, SCRIPT, str(sweep), *arguments]


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1", "NPROC": "1"}


def run(home: Path, corpus: Path, sweep: Path | str, *arguments: str, **more: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command(sweep, *arguments, "--data.source", str(corpus)),
        cwd=home,
        env=environment(home) | more,
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done.returncode, done.stdout, done.stderr


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def cells(page: str) -> dict[str, list[str]]:
    """First cell -> the others, of every line of the table."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


@pytest.mark.parametrize("twin", TWINS, ids=lambda path: path.stem)
def test_a_twin_from_end_to_end(twin: Path, home: Path, corpus: Path) -> None:
    more = ["--profile.trace_steps", "2", "--profile.after", "6"] if twin.stem == "zero" else []
    if twin.stem == "document_mask":
        corpus = short_documents(corpus, home)
    code, out, err = run(home, corpus, twin, *more)
    assert (code, err) == (0, "")
    folder = home / "runs/sweeps/cpu" / twin.stem
    found = results(folder)
    assert [result["outcome"] for result in found] == ["done"] * len(found)
    for result in found:
        assert all(math.isfinite(result[name]) and result[name] > 0 for name in NUMBERS)
        assert (result["mfu"], result["mfu_full"]) == (None, None)  # a CPU has no known peak
        assert [window[:2] for window in result["windows"]] == [[2, 4], [4, 6], [6, 8], [8, 10], [10, 12]]
        assert [point[0] for point in result["curve"]] == [1, 2, 4, 6, 8, 10, 12]
        assert result["curve"][-1][2] < result["curve"][0][2] - 0.2  # it learns
    page = (folder / "table.md").read_text()
    assert out.endswith(page)
    speed, _, numerics = page.partition("## Numerics")
    table = cells(speed)
    assert list(table) == ["run", *(result["label"] for result in found)]
    for result, line in zip(found, list(table.values())[1:], strict=True):
        assert len(line) == 10
        assert float(line[0].replace(",", "")) == pytest.approx(result["tokens_per_second_per_device"], abs=0.51)
        assert all(math.isfinite(float(line[column])) for column in (1, 2, 4, 7, 8))
        assert line[5:7] == ["unknown", "unknown"]
    if twin.stem not in ("sequence_length", "document_mask"):
        assert all(abs(float(line[-1])) < 0.02 for line in list(table.values())[1:])
    attended = {result["label"]: result["attention_length"] for result in found}
    if twin.stem == "document_mask":
        assert attended["whole_sequences"] == 64 and 1 < attended["documents"] < 48
        whole, documents = ([loss for _, _, loss in result["curve"]] for result in found)
        assert all(abs(one - other) > 1e-4 for one, other in zip(whole, documents, strict=True))
    elif twin.stem != "sequence_length":
        assert set(attended.values()) == {64}
    if more:
        numbers = json.loads((folder / "runs/zero3/profile/breakdown.json").read_text())
        assert sum(numbers["seconds"].values()) == pytest.approx(numbers["step_seconds"], rel=0.02)
        assert numbers["steps"] == 2 and numbers["seconds"]["communication, exposed"] > 0
    compared = {label: line for label, line in cells(numerics).items() if label != "against bf16"}
    sampled = [result["label"] for result in found if result["float8"]]
    if twin.stem in ("numerics", "fp8"):
        assert list(compared) == [result["label"] for result in found[1:]]
        assert all(math.isfinite(float(line[0])) and float(line[3]) > 0 for line in compared.values())
        verdicts = {label: line[-1] for label, line in compared.items()}
        assert verdicts.pop("bf16_sums", "yardstick") == "yardstick"
        assert all(verdict.startswith("pass") for verdict in verdicts.values())
    if twin.stem == "numerics":
        assert sampled == ["tensorwise", "tensorwise_gather", "rowwise", "rowwise_gw_hp"]
        for label in sampled:
            assert compared[label][4] == "0" and 0 < float(compared[label][5].partition(" in ")[0]) < 50
            shares = [json.loads(line) for line in (folder / "runs" / label / "float8.jsonl").read_text().splitlines()]
            assert {row["step"] for row in shares} == {6, 12}
            assert len({row["linear"] for row in shares}) == 14
    assert (folder / "underflow.png").exists() == bool(sampled)
    for name in ("bars.png", "loss.png", *(["underflow.png"] if sampled else [])):
        pixels = imread(folder / name)
        assert 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.6


def short_documents(corpus: Path, folder: Path) -> Path:
    """The same text in documents of 100 characters, about 30 tokens, so that every sequence holds several."""
    path = folder / "short.jsonl"
    text = corpus.read_text()
    lines = [json.dumps({"text": text[begin : begin + 100]}) for begin in range(0, len(text), 100)]
    path.write_text("\n".join(lines))
    return path


TROUBLE = """
base = "{tiny}"
processes = 1
skip_steps = 2

[[runs]]
name = "fine"

[[runs]]
name = "too large" # 10^12 rows of 64 numbers: more than a process can address
model.vocabulary = 1_000_000_000_000

[[runs]]
name = "no compiler" # CXX names a program that always fails
compile.enabled = true

[[runs]]
name = "endless"
timeout = 15
run.steps = 100_000_000

[[runs]]
name = "blank text" # found out by reading it, in the run
data.source = "{blank}"

[[runs]]
name = "last"
optimizer.lr = 1e-3
"""


def test_rows_that_fail_are_results_and_the_others_go_on(home: Path, corpus: Path, tmp_path: Path) -> None:
    """Out of memory, a crash, a run without end and a refusal."""
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n" * 10_000)
    sweep = tmp_path / "trouble.toml"
    text = TROUBLE.format(tiny=ROOT / "configs/sweeps/cpu/tiny.toml", blank=blank)
    sweep.write_text(
        text.replace('[[runs]]\nname = "fine"', f'[fixed]\ndata.source = "{corpus}"\n\n[[runs]]\nname = "fine"')
    )
    start = [*command(sweep), "--output", "out"]
    done = subprocess.run(
        start, cwd=home, env=environment(home) | {"CXX": "false"}, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    folder = home / "out/trouble"
    found = {result["label"]: result for result in results(folder)}
    assert {label: result["outcome"] for label, result in found.items()} == {
        "fine": "done",
        "too large": "out of memory",
        "no compiler": "crashed",
        "endless": "timed out",
        "blank text": "refused",
        "last": "done",
    }
    assert "allocate" in found["too large"]["reason"]
    assert "Error" in found["no compiler"]["reason"] and "no step was logged" in found["no compiler"]["reason"]
    assert "no end after 15 s" in found["endless"]["reason"] and " of 100000000)" in found["endless"]["reason"]
    assert found["blank text"]["reason"].startswith("data.source")
    page = (folder / "table.md").read_text()
    assert {label: line[0] for label, line in cells(page).items() if label not in ("run", "fine", "last")} == {
        "too large": "out of memory",
        "no compiler": "crashed",
        "endless": "timed out",
        "blank text": "refused",
    }
    for label in ("too large", "no compiler", "endless", "blank text"):
        assert f"- {label}: {found[label]['outcome']}: {found[label]['reason']}\n" in page

    # A row with a result is not run again, unless asked for: then only those that failed. A changed recipe is.
    before = (folder / "results.jsonl").read_text()
    sweep.write_text(
        sweep.read_text()
        .replace('data.source = "' + str(blank), 'data.source = "' + str(corpus))
        .replace("1e-3", "2e-3")
    )
    again = subprocess.run(start, cwd=home, env=environment(home), capture_output=True, text=True, timeout=300)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.count(": as before, ") == 4
    after = (folder / "results.jsonl").read_text()
    assert after.startswith(before)
    assert [(result["label"], result["outcome"]) for result in results(folder)[6:]] == [
        ("blank text", "done"),
        ("last", "done"),
    ]
    assert (folder / "runs/last.1/metrics.jsonl").is_file()  # of the recipe before


def test_a_dry_run_starts_nothing(tmp_path: Path, corpus: Path) -> None:
    code, out, err = run(tmp_path, corpus, "configs/sweeps/fp8.toml", "--dry-run")
    assert (code, err) == (0, "")
    assert out.startswith("fp8: 5 rows on 1 processes, results in runs/sweeps/fp8\n  bf16: the base as it is\n")
    assert "  tensorwise_gather: float8.recipe = tensorwise, float8.all_gather = True\n" in out
    assert not (tmp_path / "runs").exists()
    code, out, err = run(tmp_path, corpus, "configs/sweeps/numerics.toml", "--dry-run", "--float8.sample_every", "0")
    assert (code, err) == (0, "")
    assert "  tensorwise: float8.recipe = tensorwise, float8.sample_every = 0\n" in out


def test_what_cannot_run_is_one_message(tmp_path: Path, corpus: Path) -> None:
    for arguments, message in [
        (["configs/sweeps/pf8.toml"], "did you mean"),
        (["configs/sweeps/fp8.toml", "--float8.recipie", "none"], "unknown key; did you mean float8.recipe?"),
        (["configs/sweeps/fp8.toml"], 'run.device = "cuda", and this machine has no GPU; '),
        (["configs/sweeps/fp8.toml", "--run.device", "auto"], "which has no GPU; write emulate = true"),
    ]:
        code, out, err = run(tmp_path, corpus, *arguments, CUDA_VISIBLE_DEVICES="")
        assert (code, out) == (2, "")
        assert message in " ".join(err.split()) and "Traceback" not in err
    code, _, err = run(tmp_path, corpus, TWINS[0], NPROC="x")
    assert code == 2 and err == "NPROC=x: must be a number of processes, 1 or more\n"
    (tmp_path / "file").touch()
    code, _, err = run(tmp_path, corpus, TWINS[0], "--output", "file")
    assert code == 2 and "cannot be written" in err and "Traceback" not in err


def test_an_interrupted_sweep_goes_on(home: Path, corpus: Path) -> None:
    twin = ROOT / "configs/sweeps/cpu/micro_batch.toml"
    arguments = [*command(twin), "--output", "interrupted", "--data.source", str(corpus)]
    process = subprocess.Popen(
        arguments, cwd=home, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = next(line for line in process.stdout if line.startswith("[2/3]"))
    assert "running" in seen
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "interrupted; the same command goes on from here"
    folder = home / "interrupted/cpu/micro_batch"
    assert [result["label"] for result in results(folder)] == ["micro_batch_size=1"]

    code, out, err = run(home, corpus, twin, "--output", "interrupted")
    assert (code, err) == (0, "")
    assert [result["label"] for result in results(folder)] == [f"micro_batch_size={size}" for size in (1, 2, 4)]
    assert "[1/3] micro_batch_size=1: as before, " in out


def processes_of(folder: Path) -> list[int]:
    """Processes, other than sweep.py, whose command names a file below the folder."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0") if place.name.isdigit() else []
        except OSError:
            continue
        if any(word.startswith(str(folder)) for word in words) and SCRIPT not in words:
            found.append(int(place.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes as Linux shows them")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_leaves_no_process_on_the_device(number: signal.Signals, home: Path, corpus: Path) -> None:
    folder = home / number.name
    endless = ["--run.steps", "100000000", "--data.source", str(corpus)]
    process = subprocess.Popen(
        [*command(TWINS[0]), "--output", str(folder), *endless],
        cwd=home,
        env=environment(home),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 120
    while not list(folder.rglob("metrics.jsonl")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    assert len(processes_of(folder)) >= 2  # launcher and worker
    process.send_signal(number)
    _, err = process.communicate(timeout=90)
    if number == signal.SIGKILL:
        while processes_of(folder) and time.monotonic() < end:  # the launcher notices
            time.sleep(0.1)
    else:
        assert process.returncode == 128 + number
        assert err.strip() == "interrupted; the same command goes on from here"
    assert processes_of(folder) == []
