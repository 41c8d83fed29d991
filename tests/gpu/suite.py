"""Measure the kernels of one GPU and training runs on it: `python -m tests.gpu.suite`.

The runs are the sweep gpu_bench, as scripts/sweep.py runs it. Each finished group of kernels and each run is written at
once, and the same command continues where an earlier one stopped, however it ended.

The record is a JSON object: "environment" of the last call, "code" (a hash of the sources) and "rows", which has what
was measured by the name of a group of kernels or of a training run. Imports no torch.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parallel.errors import UserError
from recipes.files.atomic import write_whole
from recipes.files.reading import json_lines
from recipes.files.screen import say
from recipes.lab.sweep.grid import read_sweep
from recipes.lab.sweep.loop import run_sweep
from recipes.lab.sweep.results import current_results
from recipes.lab.sweep.runner import exit_code_of, run
from recipes.recipe.load import CONFIGS

Record = dict[str, Any]
GROUPS = ("bandwidth", "products", "attention", "loss", "documents")
"""Groups of kernels, each measured in a process of its own."""
PAGES = CONFIGS.parent / "docs" / "benchmarks"
GROUP_LIMIT = 180.0
"""Seconds after which a group of kernels is treated as hung."""
SOURCES = ("train.py", *(f"{folder}/**/*.py" for folder in ("models", "parallel", "recipes", "scripts")))
SAME = ("device", "python", "cuda", "packages")
"""Entries of the environment that must not differ between the calls that fill a record."""


def main(arguments: list[str]) -> int:
    """Measure and write NAME.json. Returns the exit code: 0, 2 for a user error, 128 + n after signal n."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.suite",
        description=__doc__.removesuffix("Imports no torch.\n"),
        epilog="Further options, such as --data.source FOLDER, go to the training runs.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=int, default=1, help="from 2 on, also runs on so many GPUs, which use NCCL")
    parser.add_argument("--retry", action="store_true", help="measure what failed once more")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to test the suite itself")
    parser.add_argument("--no-steps", action="store_true", help="skip the training runs")
    parser.add_argument("--output", type=Path, default=PAGES, help="folder of the record (%(default)s)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/bench"), help="folder of the training runs (%(default)s)"
    )
    options, overrides = parser.parse_known_args(arguments)
    message = "interrupted; what was finished is written, and the same command continues"
    return exit_code_of(lambda: _measure(options, overrides), interrupted=message)


def _measure(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.gpus < 1:
        raise UserError(f"--gpus {options.gpus}: must be 1 or more")
    # Check options, recipes and folders before anything takes time.
    folder, device = (CONFIGS / "sweeps" / "cpu", "cpu") if options.tiny else (CONFIGS / "sweeps", "cuda")
    sweeps = [
        read_sweep(folder / f"{name}.toml", overrides, output=options.runs, processes=processes, device=device)
        for name, processes in (("gpu_bench", 1), ("nccl_bench", options.gpus))[: 1 if options.gpus == 1 else 2]
    ]
    logs = options.runs / "kernels"
    _make_folder(options.output, "--output")
    facts = _environment(tiny=options.tiny)
    _make_folder(logs, "--runs")
    file = options.output / ("gpu-" + re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-") + ".json")
    record = open_record(file, facts)
    for name in GROUPS:
        known = record["rows"].get(name)
        if known and (known["outcome"] == "done" or not options.retry):
            say(f"{name}: measured before")
            continue
        say(f"{name}: running, at most {GROUP_LIMIT:.0f} s")
        with _saved(file, record):
            record["rows"][name] = ended = _run_group(name, logs, tiny=options.tiny)
        say(f"{name}: {', '.join(filter(None, (ended['outcome'], ended['reason'])))}")
    for sweep in [] if options.no_steps else sweeps:
        with _saved(file, record):
            try:
                run_sweep(sweep, retry=options.retry, log=say, option="--runs")
            finally:
                record["rows"] |= current_results(sweep)
    say(f"written: {file}")
    return 0


@contextmanager
def _saved(file: Path, record: Record) -> Iterator[None]:
    """Write the record at the end, whatever ends this. Raises UserError if a disk is full."""
    try:
        try:
            yield
        finally:
            write_whole(file, json.dumps(record, indent=1) + "\n", sync=True)
    except OSError as error:
        remedy = "free space, or write another --output and --runs"
        raise UserError(f"{error.filename or file} cannot be written: {error.strerror}; {remedy}") from None


def _make_folder(folder: Path, option: str) -> None:
    """Create the folder. Raises UserError if it cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be created: {error.strerror}; write another {option}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder} is not writable; write another {option}")


def open_record(file: Path, environment: dict[str, Any]) -> Record:
    """The record to go on with, or a new one. Raises UserError if it is of other code, versions or another device."""
    root = CONFIGS.parent
    sources = sorted(source for pattern in SOURCES for source in root.glob(pattern))
    content = [source.relative_to(root).as_posix().encode() + b"\0" + source.read_bytes() for source in sources]
    code = hashlib.sha256(b"\0".join(content)).hexdigest()[:16]  # needs no git, and not only commits change it
    new: Record = {"suite": "gpu", "environment": environment, "code": code, "rows": {}}
    if not file.exists():
        return new
    remedy = "move it away, or write another --output"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        then, rows = record["environment"], dict(record["rows"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file} is not a record that can be continued; {remedy}") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; {remedy}") from None
    differing = [f"{key} ({then.get(key)} there)" for key in SAME if then.get(key) != environment[key]]
    if record.get("code") != code:
        differing.append(f"the code (commit {str(then.get('git_commit'))[:12]} there, or changes to it)")
    if differing:
        raise UserError(f"{file} has {len(rows)} rows of another state; different: {', '.join(differing)}. {remedy}")
    return new | {"rows": rows}


def _environment(*, tiny: bool) -> dict[str, Any]:
    """Device and versions, from a process of its own: this one must hold no memory of the GPU."""
    with TemporaryDirectory() as folder:
        ended = _run_group("environment", Path(folder), tiny=tiny)
        if ended["outcome"] != "done":
            errors = (Path(folder) / "environment.err").read_text(encoding="utf-8", errors="replace").strip()
            raise UserError(
                errors if ended["outcome"] == "refused" else f"no device to measure: {ended['reason']}\n{errors}"
            )
        return dict(ended["measurements"][0])


def _run_group(name: str, folder: Path, *, tiny: bool) -> dict[str, Any]:
    """How a group of kernels ended, and what it had measured until then."""
    out = folder / f"{name}.jsonl"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.kernels", "--group", name, "--out", str(out)]
    ended = run(
        [*command, *["--tiny"] * tiny],
        stdout=folder / f"{name}.out",
        stderr=folder / f"{name}.err",
        timeout=GROUP_LIMIT,
        environment=dict(os.environ),
    )
    facts = {"outcome": ended.outcome, "reason": ended.reason, "seconds": round(ended.seconds, 3)}
    return facts | {"measurements": json_lines(out)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
