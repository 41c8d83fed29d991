"""Measure one GPU, from single kernels to whole training steps, and compare with what was predicted: `--suite gpu`.

Each finished row is written at once, and the same command continues where an earlier one stopped, however it ended.
Imports no torch.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parallel.errors import UserError
from recipes.files.lock import FolderLock
from recipes.lab.bench import gpu_plan
from recipes.lab.bench.gpu_page import page
from recipes.lab.bench.gpu_plan import Item, Record
from recipes.lab.sweep.grid import Sweep, read_sweep
from recipes.lab.sweep.loop import one_line, run_row
from recipes.lab.sweep.runner import exit_code_of, run
from recipes.recipe.load import CONFIGS

PAGES = CONFIGS.parent / "docs" / "benchmarks"
SCRIPT = CONFIGS.parent / "scripts" / "bench.py"


def main(arguments: list[str]) -> int:
    """Measure and write NAME.json and NAME.md. Returns the exit code: 0, 2 for a user error, 128 + n after signal n."""
    parser = argparse.ArgumentParser(
        prog="bench.py --suite gpu",
        description=__doc__.removesuffix("Imports no torch.\n"),
        epilog="Further options, such as --data.source FOLDER, go to the training runs.",
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, help="measure what fits into this time; default: everything")
    parser.add_argument("--gpus", type=int, default=1, help="from 2 on, also runs on so many GPUs, which use NCCL")
    parser.add_argument("--plan", action="store_true", help="print what would be measured, and end")
    parser.add_argument("--retry", action="store_true", help="measure rows that failed once more")
    parser.add_argument("--fresh", action="store_true", help="set an earlier record aside and start anew")
    parser.add_argument("--mixed", action="store_true", help="continue a record of other versions or code")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to test the suite itself")
    parser.add_argument("--no-steps", action="store_true", help="skip the training runs")
    parser.add_argument("--output", type=Path, default=PAGES, help="folder of the record (%(default)s)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/bench"), help="folder of the training runs (%(default)s)"
    )
    options, overrides = parser.parse_known_args(arguments)
    message = "interrupted; finished rows are written, and the same command continues"
    return exit_code_of(lambda: _measure(options, overrides), interrupted=message)


def _measure(options: argparse.Namespace, overrides: list[str]) -> int:
    begin = time.monotonic()
    if options.minutes is not None and not 0 < options.minutes < float("inf"):
        raise UserError(f"--minutes {options.minutes:g}: must be a positive number; leave it out to measure everything")
    deadline = None if options.minutes is None else begin + 60 * options.minutes
    if options.gpus < 1:
        raise UserError(f"--gpus {options.gpus}: must be 1 or more")
    # Check options, recipes and folder before anything takes time.
    sweep = _rows("gpu_bench", options, overrides, processes=1)
    if options.gpus > 1:
        sweep = replace(
            sweep, rows=(*sweep.rows, *_rows("nccl_bench", options, overrides, processes=options.gpus).rows)
        )
    if not options.plan:
        _make_folder(options.output)
    facts = _environment(tiny=options.tiny)
    items = gpu_plan.items_of(sweep, facts["device"], tiny=options.tiny, steps=not options.no_steps)
    place = gpu_plan.place_of(options.output, facts["device"])
    with ExitStack() as stack:
        if not options.plan:
            _lock(sweep.folder, stack)  # before the record is read or set aside: another suite may be writing it
        record = gpu_plan.open_record(place, facts, fresh=options.fresh and not options.plan, mixed=options.mixed)
        todo = [item for item in items if _is_open(item, record, retry=options.retry)]
        chosen = todo if deadline is None else gpu_plan.fitting(todo, deadline - time.monotonic())
        _print_plan(items, todo, chosen)
        if options.plan:
            return 0
        _save(place, record, sweep)
        for number, item in enumerate(todo, 1):  # also what did not fit, in case that the others take less time
            try:
                _measure_item(item, f"[{number}/{len(todo)}] {item.name}", sweep, record, deadline, tiny=options.tiny)
            except OSError as error:  # the row is not written, so the same command measures it
                remedy = "free space, or write another --runs"
                raise UserError(f"{sweep.folder} cannot be written: {error}; {remedy}") from None
            _save(place, record, sweep)
    left = [item.name for item in items if _is_open(item, record, retry=False)]
    print(
        f"written: {place}.json and .md, after {time.monotonic() - begin:.0f} s"
        + (f"; left: {', '.join(left)}" if left else "")
    )
    return 0


def _rows(name: str, options: argparse.Namespace, overrides: list[str], *, processes: int) -> Sweep:
    folder, device = (CONFIGS / "sweeps" / "cpu", "cpu") if options.tiny else (CONFIGS / "sweeps", "cuda")
    return read_sweep(folder / f"{name}.toml", overrides, output=options.runs, processes=processes, device=device)


def _lock(folder: Path, stack: ExitStack) -> None:
    """Create the folder of the runs, and lock it until the stack ends: two suites would measure each other."""
    lock = FolderLock()
    stack.callback(lock.release)
    try:
        for name in ("recipes", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        lock.take(folder, log=print, remedy="write another --runs and --output", here=0, elsewhere=0)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}; write another --runs") from None


def _save(place: Path, record: Record, sweep: Sweep) -> None:
    gpu_plan.write_record(place, record)  # first: a page can be made again
    gpu_plan.write_page(place, page(record, sweep))


def _environment(*, tiny: bool) -> dict[str, Any]:
    """Device and versions, from a process of its own: this one must hold no memory of the GPU."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        ended, [*found] = _run_group("environment", place, limit=gpu_plan.GROUP_LIMIT, tiny=tiny)
        if ended["outcome"] != "done":
            errors = (place / "environment.err").read_text(encoding="utf-8", errors="replace").strip()
            raise UserError(
                errors if ended["outcome"] == "refused" else f"no device to measure: {ended['reason']}\n{errors}"
            )
        return dict(found[0])


def _make_folder(folder: Path) -> None:
    """Create the folder. Raises UserError if it cannot be created or written to."""
    remedy = "write another --output"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be created: {error.strerror}; {remedy}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder} is not writable; {remedy}")


def _is_open(item: Item, record: Record, *, retry: bool) -> bool:
    """Whether a row is still to be measured."""
    known = record["rows"].get(item.name)
    if known is None or known["fingerprint"] != item.fingerprint:
        return True
    return retry and known["outcome"] != "done"


def _print_plan(items: Sequence[Item], todo: Sequence[Item], chosen: Sequence[Item]) -> None:
    for item in items:
        state = f"about {item.estimate:.0f} s" if item in chosen else "no time" if item in todo else "measured before"
        print(f"  {item.name:32}{state}")
    seconds = sum(item.estimate for item in chosen)
    print(f"{len(chosen)} of {len(items)} rows, about {seconds / 60:.0f} minutes", flush=True)


def _measure_item(item: Item, place: str, sweep: Sweep, record: Record, deadline: float | None, *, tiny: bool) -> None:
    """Measure a row and put it into the record, except if there is no time for it."""
    rest = float("inf") if deadline is None else deadline - time.monotonic()
    if rest < item.estimate:
        print(
            f"{place}: left out, {max(0.0, rest):.0f} s are left and it takes about {item.estimate:.0f} s", flush=True
        )
        return
    limit = min(item.limit, rest)
    print(f"{place}: running, at most {limit:.0f} s", flush=True)
    if item.row:
        found = run_row(replace(item.row, timeout=limit), folder=sweep.folder)
        text = one_line(found)
    elif item.name == gpu_plan.TESTS:
        found = _run_tests(sweep.folder / "logs", limit=limit)
        text = f"{found['outcome']}: {found['reason']}"
    else:
        found, measurements = _run_group(item.name, sweep.folder / "logs", limit=limit, tiny=tiny)
        failed = sum("error" in row for row in measurements)
        found |= {"measurements": measurements}
        text = f"{found['outcome']} {found['reason']}".strip() + f", {len(measurements)} measurements, {failed} failed"
    if found["outcome"] == "timed out" and limit < item.limit:
        print(f"{place}: ended by --minutes; the next call measures it", flush=True)
        return
    record["rows"][item.name] = found | {"fingerprint": item.fingerprint, "state": record["state"]}
    print(f"{place}: {text}", flush=True)


def _run_tests(folder: Path, *, limit: float) -> dict[str, Any]:
    """How tests/gpu ended; the reason is the last line of pytest, which counts what passed, failed and was skipped."""
    out, err = folder / "tests.out", folder / "tests.err"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rfs", str(CONFIGS.parent / "tests" / "gpu")]
    ended = run(command, stdout=out, stderr=err, timeout=limit, environment=dict(os.environ))
    last = out.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    reason = last[0].strip("= ") if last and ended.outcome != "timed out" else ended.reason
    return {"outcome": ended.outcome, "reason": reason, "seconds": round(ended.seconds, 3)}


def _run_group(name: str, folder: Path, *, limit: float, tiny: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How a group of kernels ended, and what it had measured until then."""
    out = folder / f"{name}.jsonl"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(SCRIPT), "--suite", "kernels", "--group", name, "--out", str(out)]
    ended = run(
        [*command, *["--tiny"] * tiny],
        stdout=folder / f"{name}.out",
        stderr=folder / f"{name}.err",
        timeout=limit,
        environment=dict(os.environ),
    )
    found = []
    for line in out.read_text(encoding="utf-8").splitlines() if out.exists() else []:
        with suppress(ValueError):  # cut off when the process was ended
            found.append(json.loads(line))
    return {"outcome": ended.outcome, "reason": ended.reason, "seconds": round(ended.seconds, 3)}, found
