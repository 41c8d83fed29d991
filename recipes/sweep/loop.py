"""Run the rows of a sweep that have no result yet, one after the other. Imports no torch."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from parallel.errors import UserError
from recipes.files.lock import FolderLock
from recipes.load import to_toml
from recipes.sweep.grid import Row, Sweep
from recipes.sweep.numerics import numerics_table
from recipes.sweep.results import TABLE, Result, append, current, read_results, result_of, table
from recipes.sweep.runner import run

ROOT = Path(__file__).resolve().parents[2]


def run_sweep(sweep: Sweep, *, retry: bool, log: Callable[[str], None]) -> dict[str, Result]:
    """Run what has no result yet (retry: also what did not run to its end); results by label, in the order of the rows.

    The table and the pictures are written after every row. Raises UserError where the folder cannot be written, and
    where another process is at work in it.
    """
    with _claimed(sweep, log=log):
        return _run_all(sweep, retry=retry, log=log)


@contextmanager
def _claimed(sweep: Sweep, *, log: Callable[[str], None]) -> Iterator[None]:
    """Hold the sweep's folder, with what can be said of it before the first row starts."""
    lock = FolderLock()  # two sweeps would measure each other, and move each other's folders
    try:
        try:
            (sweep.folder / "recipes").mkdir(parents=True, exist_ok=True)
            (sweep.folder / "logs").mkdir(exist_ok=True)
            lock.take(sweep.folder, log=log, remedy="write another --output", here=0, elsewhere=0)
            write(sweep)
        except OSError as error:
            raise UserError(f"{sweep.folder} cannot be written: {error.strerror}; write another --output") from None
        yield
    finally:
        lock.release()


def _run_all(sweep: Sweep, *, retry: bool, log: Callable[[str], None]) -> dict[str, Result]:
    for number, row in enumerate(sweep.rows, 1):
        place = f"[{number}/{len(sweep.rows)}] {row.label}"
        known = current(sweep, read_results(sweep.folder)).get(row.label)
        if known is not None and (known["outcome"] == "done" or not retry):
            log(f"{place}: as before, {in_words(known)}")
            continue
        log(f"{place}: running, at most {row.timeout:g} s")
        result = run_row(row, folder=sweep.folder)
        append(sweep.folder, result)
        log(f"{place}: {in_words(result)}")
        write(sweep)
    return current(sweep, read_results(sweep.folder))


def run_row(row: Row, *, folder: Path) -> Result:
    """Train what the row says in processes of its own, as scripts/run.sh starts them."""
    recipe = folder / "recipes" / f"{row.label}.toml"
    recipe.write_text(to_toml(row.recipe), encoding="utf-8")
    _set_aside(row.recipe.run.folder)
    launch = [sys.executable, str(ROOT / "scripts/launch.py"), "--standalone", f"--nproc-per-node={row.processes}"]
    threads = max(1, (os.cpu_count() or 1) // row.processes)
    ended = run(
        [*launch, str(ROOT / "train.py"), str(recipe)],
        stdout=folder / "logs" / f"{row.label}.out",
        stderr=folder / "logs" / f"{row.label}.err",
        timeout=row.timeout,
        environment={"OMP_NUM_THREADS": str(threads), **os.environ},
    )
    return result_of(row, ended)


def write(sweep: Sweep) -> None:
    """The table and the pictures, from results.jsonl."""
    from recipes.sweep.plots import draw  # matplotlib

    results = current(sweep, read_results(sweep.folder))
    page = [table(sweep, results), numerics_table(sweep, results)]
    (sweep.folder / TABLE).write_text("\n".join(filter(None, page)), encoding="utf-8")
    draw(sweep, results)


def in_words(result: Result) -> str:
    """A result on one line."""
    if result["outcome"] != "done":
        return f"{result['outcome']}: {result['reason']}"
    return (
        f"{result['tokens_per_second_per_device']:,.0f} tokens/s/device, {result['step_seconds']:.4g} s a step,"
        f" {result['peak_memory_gib']:.2f} GiB ({result['seconds']:.0f} s in all)"
    )


def _set_aside(folder: Path) -> None:
    """A run that broke off, or whose recipe was another one, keeps its files under another name."""
    if folder.exists():
        folder.rename(next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.{n}")).exists()))
