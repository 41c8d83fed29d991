"""Run the rows of a sweep one after another, skipping those with a result. Imports no torch."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from parallel.errors import UserError
from recipes.files.atomic import replace
from recipes.files.layout import REPORT, holds_results
from recipes.files.lock import FolderLock
from recipes.files.screen import say
from recipes.lab.curves.panels import curves
from recipes.lab.curves.reading import read_runs
from recipes.lab.sweep.grid import Sweep
from recipes.lab.sweep.numerics import numerics_table
from recipes.lab.sweep.results import TABLE, Result, append, current_results, result_of, table
from recipes.lab.sweep.runner import train_apart


def run_sweep(sweep: Sweep, *, retry: bool, log: Callable[[str], None], option: str = "--output") -> dict[str, Result]:
    """Run the rows without a result (retry: also those that failed); returns label -> result, in the order of the rows.

    Writes table and curves after every row. Raises UserError if the folder, which `option` names, is not writable or
    is in use.
    """
    with ExitStack() as stack:
        lock = FolderLock()  # two sweeps would measure each other, and move each other's folders
        stack.callback(lock.release)
        try:
            sweep.folder.mkdir(parents=True, exist_ok=True)
            lock.take(sweep.folder, log=log, remedy=f"write another {option}", here=0, elsewhere=0)
            write_sweep_page(sweep)
        except OSError as error:
            raise UserError(f"{sweep.folder} cannot be written: {error.strerror}; write another {option}") from None
        for number, row in enumerate(sweep.rows, 1):
            which = f"[{number}/{len(sweep.rows)}] {row.label}"
            known = current_results(sweep).get(row.label)
            if known is not None and (known["outcome"] == "done" or not retry):
                log(f"{which}: as before, {one_line(known)}")
                continue
            log(f"{which}: running, at most {row.timeout:g} s")
            _set_aside(row.recipe.run.folder)
            ended = train_apart(row.recipe, sweep.folder, processes=row.processes, timeout=row.timeout)
            result = result_of(row, ended)
            append(sweep.folder, result)
            log(f"{which}: {one_line(result)}")
            write_sweep_page(sweep)
        return current_results(sweep)


def write_sweep_page(sweep: Sweep) -> None:
    """Write the table from results.jsonl, and the curves of the rows that are done."""
    results = current_results(sweep)
    page = [table(sweep, results), numerics_table(sweep, results)]
    (sweep.folder / TABLE).write_text("\n".join(filter(None, page)), encoding="utf-8")
    done = [row.recipe.run.folder for row in sweep.rows if results.get(row.label, {}).get("outcome") == "done"]
    if folders := [folder for folder in done if holds_results(folder)]:  # the user may have deleted some
        from recipes.lab.curves.page import write_html  # matplotlib

        replace(sweep.folder / REPORT, partial(write_html, curves(read_runs(folders), "tokens")), sync=False)


def one_line(result: Result) -> str:
    if result["outcome"] != "done":
        return f"{result['outcome']}: {result['reason']}"
    return (
        f"{result['tokens_per_second_per_device']:,.0f} tokens/s/device, {result['step_seconds']:.4g} s per step,"
        f" {result['peak_memory_gib']:.2f} GiB ({result['seconds']:.0f} s in total)"
    )


def _set_aside(folder: Path) -> None:
    """Rename the folder of an earlier run, interrupted or of another recipe, so that its files are kept. Raises
    UserError if that run, or one that the user has started there, is still going on."""
    if folder.exists():
        lock = FolderLock()
        lock.take(folder, log=say, remedy="write another --output")
        lock.release()
        folder.rename(next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.{n}")).exists()))
