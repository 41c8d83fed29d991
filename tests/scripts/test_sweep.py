"""scripts/sweep.py: CPU variants of sweeps, rows that fail, continuing a sweep, and signals.

Tests that are not about the launcher and its workers run the command in this process and fork the rows. Of the CPU
variants, those that say most are trained; `pytest -m exhaustive` on this file trains the others, in minutes.
tests/recipes/lab/sweep/test_grid.py reads and checks every row of all.
"""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recipes.lab.sweep import runner
from recipes.lab.sweep.runner import Ended
from tests.commands import Command, run_command
from tests.processes import wait_for
from tests.recipes.lab.sweep.forked import run_forked
from tests.recipes.lab.sweep.test_results import cells
from tests.scripts.called import call

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts/sweep.py")
CPU = ROOT / "configs/sweeps/cpu"
OTHERS = ("tiny", "gpu_bench", "nccl_bench", "float8_head")
CPU_VARIANTS = sorted(path.stem for path in CPU.glob("*.toml") if path.stem not in OTHERS)
TRAINED = ("document_mask", "numerics", "zero")
"""Masks; every float8 recipe, compared; two processes, and a profile."""
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
    """The folder in which all sweeps of this file run, so that they share the tokenized text."""
    return tmp_path_factory.mktemp("sweep")


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1", "NPROC": "1"}


def run(
    home: Path,
    sweep: Path | str,
    *arguments: str,
    rows: Callable[..., Ended] = run_forked,
    **more: str,
) -> tuple[int, str, str]:
    """Exit code, output and errors of the command, called in this process. rows: what runs one row."""
    variables = environment(home) | more
    return call("sweep", [str(sweep), *arguments], folder=home, environment=variables, train=rows)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


# The CPU variants of the shipped sweeps


@dataclass(frozen=True)
class Finished:
    """A sweep that has run to its end."""

    name: str
    folder: Path
    out: str

    @property
    def results(self) -> list[dict[str, Any]]:
        return results(self.folder)

    @property
    def speed(self) -> dict[str, list[str]]:
        """The first table of its page, by row."""
        return self._cells(0)

    @property
    def numerics(self) -> dict[str, list[str]]:
        """The second table, by row, without its head."""
        return {label: line for label, line in self._cells(2).items() if label != "against bf16"}

    def _cells(self, part: int) -> dict[str, list[str]]:
        table = cells((self.folder / "table.md").read_text().partition("## Numerics")[part])
        return {label.removesuffix(" (emulated)"): line for label, line in table.items()}


@pytest.fixture(scope="module")
def finished(home: Path, corpus: Path) -> Callable[[str], Finished]:
    """Returns a CPU variant that has run; each runs only once."""

    @cache
    def finish(name: str) -> Finished:
        source = short_documents(corpus, home) if name == "document_mask" else corpus
        more = ["--profile.trace_steps", "2", "--profile.after", "6"] if name == "zero" else []
        code, out, err = run(home, CPU / f"{name}.toml", *more, "--data.source", str(source))
        assert (code, err) == (0, "")
        return Finished(name, home / "runs/sweeps/cpu" / name, out)

    return finish


def short_documents(corpus: Path, folder: Path) -> Path:
    """The same text in documents of 100 characters, about 30 tokens, so that every sequence holds several."""
    path = folder / "short.jsonl"
    text = corpus.read_text()
    lines = [json.dumps({"text": text[begin : begin + 100]}) for begin in range(0, len(text), 100)]
    path.write_text("\n".join(lines))
    return path


def variants(*without: str) -> list[Any]:
    return [
        name if name in TRAINED else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in CPU_VARIANTS
        if name not in without
    ]


EVERY = pytest.mark.parametrize("name", variants())
SAME_BATCHES = pytest.mark.parametrize("name", variants("sequence_length", "document_mask"))


@EVERY
def test_every_row_of_a_cpu_variant_is_measured_and_learns(name: str, finished: Callable[[str], Finished]) -> None:
    sweep, found = finished(name), finished(name).results
    assert sweep.out.endswith((sweep.folder / "table.md").read_text())
    assert [result["outcome"] for result in found] == ["done"] * len(found)
    for result in found:
        assert all(math.isfinite(result[number]) and result[number] > 0 for number in NUMBERS)
        assert (result["mfu"], result["mfu_full"]) == (None, None)  # a CPU has no known peak
        assert [window[:2] for window in result["windows"]] == [[2, 4], [4, 6], [6, 8], [8, 10], [10, 12]]
        assert [point[0] for point in result["curve"]] == [1, 2, 4, 6, 8, 10, 12]
        assert result["curve"][-1][2] < result["curve"][0][2] - 0.2


@SAME_BATCHES
def test_rows_on_the_same_batches_end_at_nearly_the_same_loss(name: str, finished: Callable[[str], Finished]) -> None:
    assert all(abs(float(line[-1])) < 0.02 for line in list(finished(name).speed.values())[1:])


def test_document_masks_shorten_attention_and_change_the_losses(finished: Callable[[str], Finished]) -> None:
    found = finished("document_mask").results
    attended = {result["label"]: result["attention_length"] for result in found}
    assert attended["whole_sequences"] == 64 and 1 < attended["documents"] < 48
    whole, documents = ([loss for _, _, loss in result["curve"]] for result in found)
    assert all(abs(one - other) > 1e-4 for one, other in zip(whole, documents, strict=True))


def test_profiled_rows_have_a_breakdown_that_adds_up_to_the_step(finished: Callable[[str], Finished]) -> None:
    numbers = json.loads((finished("zero").folder / "runs/zero3/profile/breakdown.json").read_text())
    assert sum(numbers["seconds"].values()) == pytest.approx(numbers["step_seconds"], rel=0.02)
    assert numbers["steps"] == 2 and numbers["seconds"]["communication, exposed"] > 0


def test_the_float8_rows_of_numerics_are_compared(finished: Callable[[str], Finished]) -> None:
    found = {label: cells[-1] for label, cells in finished("numerics").numerics.items()}
    float8 = ("tensorwise", "tensorwise_gather", "rowwise", "rowwise_gw_hp")
    assert found == {"bf16_sums": "yardstick"} | dict.fromkeys(float8, "too short to judge")


# Rows that fail


TROUBLE = """
base = "{tiny}"
processes = 1
skip_steps = 2

[fixed]
data.source = "{corpus}"

[[runs]]
name = "fine"

[[runs]]
name = "too large" # 64 TB: more than a process can address
model.vocabulary = 16_000_000
model.width = 1_000_000

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
FAILING = {
    "too large": "out of memory",
    "no compiler": "crashed",
    "endless": "timed out",
    "blank text": "refused",
}


launched = runner.run


def run_failing(command: Sequence[str], **options: Any) -> Ended:
    """Failing rows as processes of their own, or light ones; those that train forked."""
    label = Path(command[-1]).stem
    if label == "endless":
        return run_until_first_step(command, **options)
    if label == "no compiler":  # torch reads CXX when it is imported
        return launched(command, **options)
    return (run_light if label in FAILING else run_forked)(command, **options)


def run_light(
    command: Sequence[str], *, stdout: Path, stderr: Path, timeout: float, environment: dict[str, str]
) -> Ended:
    """recipes.lab.sweep.runner.run in forks (tests/commands.py), without a time-out."""
    code, out, err = run_command(*command[1:], cwd=Path.cwd(), env=environment)
    stdout.write_text(out)
    stderr.write_text(err)
    return Ended(*runner.outcome_and_reason(code, err), 0.0)


def run_until_first_step(command: Sequence[str], **options: Any) -> Ended:
    """The row's time-out passes when its first step is logged, however fast or slow this machine is."""
    metrics = Path(command[-1]).parents[1] / "runs/endless/metrics.jsonl"
    wait = subprocess.Popen.wait

    def wait_for_step(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout != options["timeout"]:
            return wait(process, timeout)
        wait_for("a logged step", lambda: metrics.exists() and b"loss" in metrics.read_bytes())
        raise subprocess.TimeoutExpired(process.args, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", wait_for_step)
        return launched(command, **options)


@pytest.fixture(scope="module")
def trouble(home: Path, corpus: Path) -> Finished:
    """Out of memory, a crash, a run without end and a refusal, and one row before and after them that trains."""
    (home / "blank.txt").write_text(" \n" * 10_000)
    text = TROUBLE.format(tiny=CPU / "tiny.toml", blank=home / "blank.txt", corpus=corpus)
    (home / "trouble.toml").write_text(text)
    code, out, err = run(home, "trouble.toml", "--output", "out", rows=run_failing, CXX="false")
    assert (code, err) == (0, "")
    return Finished("trouble", home / "out/trouble", out)


@pytest.fixture(scope="module")
def after_change(trouble: Finished, home: Path, corpus: Path) -> tuple[Finished, list[dict[str, Any]]]:
    """The same sweep once more with the recipes of two rows changed; and its results from before."""
    before = trouble.results
    text = (home / "trouble.toml").read_text()
    (home / "trouble.toml").write_text(text.replace(str(home / "blank.txt"), str(corpus)).replace("1e-3", "2e-3"))
    code, out, err = run(home, "trouble.toml", "--output", "out")
    assert (code, err) == (0, "")
    return Finished("trouble", home / "out/trouble", out), before


def test_rows_that_fail_are_results_and_the_others_go_on(trouble: Finished) -> None:
    outcomes = {result["label"]: result["outcome"] for result in trouble.results[:6]}
    assert outcomes == {"fine": "done", **FAILING, "last": "done"}


def test_the_reason_of_a_failed_row_says_what_happened_and_how_far_it_came(trouble: Finished) -> None:
    reasons = {result["label"]: result["reason"] for result in trouble.results[:6]}
    assert "allocate" in reasons["too large"]
    assert "Error" in reasons["no compiler"] and "no step was logged" in reasons["no compiler"]
    assert "no end after 15 s" in reasons["endless"] and " of 100000000)" in reasons["endless"]
    assert reasons["blank text"].startswith("data.source")


def test_only_rows_whose_recipe_has_changed_run_again(after_change: tuple[Finished, list[dict[str, Any]]]) -> None:
    sweep, before = after_change
    assert sweep.out.count(": as before, ") == 4
    assert sweep.results[:6] == before
    assert [(result["label"], result["outcome"]) for result in sweep.results[6:]] == [
        ("blank text", "done"),
        ("last", "done"),
    ]


def test_the_folder_of_an_earlier_run_is_set_aside(after_change: tuple[Finished, list[dict[str, Any]]]) -> None:
    assert (after_change[0].folder / "runs/last.1/metrics.jsonl").is_file()


# Dry runs and refusals


def test_a_dry_run_lists_the_rows_and_starts_nothing(tmp_path: Path, corpus: Path) -> None:
    code, out, err = run(tmp_path, "configs/sweeps/fp8.toml", "--dry-run", "--data.source", str(corpus))
    assert (code, err) == (0, "")
    assert out.startswith("fp8: 5 rows on 1 processes, results in runs/sweeps/fp8\n  bf16: the base as it is\n")
    assert "  tensorwise_gather: float8.recipe = tensorwise, float8.all_gather = True\n" in out
    assert not (tmp_path / "runs").exists()


def test_a_sweep_does_not_end_with_its_terminal(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/sweep.py"), str(ROOT / "configs/sweeps/cpu/zero.toml"), "--dry-run"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, cwd=tmp_path, stdout=full, stderr=full).returncode == 0


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["configs/sweeps/fp8.toml"], {"CUDA_VISIBLE_DEVICES": ""}, 'run.device = "cuda", but this machine has no GPU'),
        ([CPU / "attention.toml"], {"NPROC": "x"}, "NPROC=x: must be a number of processes, 1 or more"),
        ([CPU / "attention.toml", "--output", "file"], {}, "cannot be written"),
    ],
)
def test_what_a_sweep_cannot_start_with_is_refused(
    words: list[Any], variables: dict[str, str], message: str, tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "file").touch()
    code, _, err = run(tmp_path, *words, "--data.source", str(corpus), **variables)
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


# Signals to a sweep in a process of its own


TWO_ROWS = f"""
base = "{CPU / "tiny.toml"}"
processes = 2
skip_steps = 2

[fixed]
run.steps = 6
metrics.every = 1

[axes]
batch.micro_batch_size = [1, 2]
"""


def test_an_interrupted_sweep_keeps_its_rows_and_its_command_runs_the_others(home: Path, corpus: Path) -> None:
    (home / "two_rows.toml").write_text(TWO_ROWS)
    arguments = ["two_rows.toml", "--output", "interrupted", "--data.source", str(corpus)]
    process = Command("scripts/sweep.py", *arguments, cwd=home, env=environment(home))
    seen = next(line for line in process.stdout if line.startswith("[2/2]"))
    assert "running" in seen
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.wait(), out, err.strip()) == (130, "", "interrupted; the same command continues from here")
    folder = home / "interrupted/two_rows"
    assert [result["label"] for result in results(folder)] == ["micro_batch_size=1"]
    code, out, err = run(home, *arguments)
    assert (code, err) == (0, "")
    outcomes = {result["label"]: result["outcome"] for result in results(folder)}
    assert outcomes == {"micro_batch_size=1": "done", "micro_batch_size=2": "done"} and len(results(folder)) == 2
    assert "[1/2] micro_batch_size=1: as before, " in out


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


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes through /proc")
def test_sigkill_leaves_no_process_on_the_device(home: Path, corpus: Path) -> None:
    folder = home / "SIGKILL"
    endless = ["--output", str(folder), "--run.steps", "100000000", "--data.source", str(corpus)]
    words = [sys.executable, SCRIPT, CPU / "activation_checkpointing.toml", *endless]
    process = subprocess.Popen(
        words, cwd=home, env=environment(home), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for("the first step", lambda: list(folder.rglob("metrics.jsonl")) or process.poll() is not None)
    assert len(processes_of(folder)) >= 2  # launcher and worker
    process.kill()
    process.communicate()
    wait_for("the launcher to notice", lambda: not processes_of(folder))
