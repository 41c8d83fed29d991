"""Draw and compare what runs have logged, `python scripts/plot.py runs/A runs/B`, or list runs; see --help."""

import argparse
import signal
import sys
from pathlib import Path

# Ctrl-C during imports: exit at once, without a traceback of the line that was being imported.
signal.signal(signal.SIGINT, signal.SIG_DFL)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import explain_wrong_interpreter  # noqa: E402

explain_wrong_interpreter()

from parallel.errors import UserError  # noqa: E402
from recipes.files.atomic import replace  # noqa: E402
from recipes.files.exit_codes import exit_code  # noqa: E402
from recipes.files.layout import REPORT  # noqa: E402
from recipes.files.reading import fault, path_argument  # noqa: E402
from recipes.files.screen import open_missing, tell  # noqa: E402


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 2 for what the user can fix, 71 for a fault that may pass."""
    open_missing()
    options = _parser().parse_args(arguments)
    try:
        _plot(options)
    except UserError as error:
        tell(str(error))
        return exit_code(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Draw what runs have logged: losses, rates, memory, and where their time went. Several runs are"
        " compared in a table, too: last numbers, and what differs between their recipes. Without RUN, list the runs"
        " under runs/.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        type=path_argument,
        help="folders of runs, such as runs/NAME, running ones as well, or their metrics.jsonl; of a single folder with"
        " runs in it, a list",
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        help="a .html; default: report.html in the folder of a single run, and here for several",
    )
    parser.add_argument("--x", choices=("steps", "tokens", "hours"), help="below the curves (steps)", default="steps")
    return parser


def _plot(options: argparse.Namespace) -> None:
    from recipes.lab.curves.comparison import aligned, comparison
    from recipes.lab.curves.listing import listing
    from recipes.lab.curves.page import write_html
    from recipes.lab.curves.panels import curves
    from recipes.lab.curves.reading import folder_of, read_runs

    places = [folder_of(run) for run in options.runs or [Path("runs")]]
    alone = places[0] if len(places) == 1 else Path()
    if len(places) == 1 and not options.out and (rows := listing(alone)) and rows[1][0] != ".":
        tell(aligned(rows), to=1)
        return
    if not options.runs:
        raise UserError("no run is in runs/; write the folders of runs, or one with runs in it")
    out: Path = options.out or alone / REPORT
    if out.suffix != ".html":
        raise UserError(f"--out {out}: write a name that ends with .html")
    found = curves(read_runs(places), options.x)
    for run in found.runs:
        if run.unreadable:
            tell(f"{run.folder}: {run.unreadable} lines are not rows and were left out")
    if len(found.runs) > 1:
        tell(aligned(comparison(found.runs)), to=1)
    try:
        replace(out, lambda file: write_html(found, file), sync=False)
    except OSError as error:
        raise fault(f"--out {out} cannot be written", error, "; write another file") from None
    tell(str(out), to=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
