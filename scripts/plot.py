"""Draw what runs have logged: `python scripts/plot.py runs/A runs/B`. --help lists the options."""

import argparse
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

# Ctrl-C during imports: exit at once, without a traceback of the line that was being imported.
signal.signal(signal.SIGINT, signal.SIG_DFL)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import explain_wrong_interpreter  # noqa: E402

explain_wrong_interpreter()

from parallel.errors import TemporaryError, UserError  # noqa: E402
from recipes.files.exit_codes import REFUSED, TEMPORARY  # noqa: E402
from recipes.files.layout import CURVES  # noqa: E402
from recipes.files.paths import path_argument  # noqa: E402


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 2 for what the user can fix, 71 for a fault that may pass."""
    options = _parser().parse_args(arguments)
    try:
        _plot(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return TEMPORARY if isinstance(error, TemporaryError) else REFUSED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Draw what runs have logged: losses, rates, memory, and where their time went.", allow_abbrev=False
    )
    parser.add_argument(
        "runs", nargs="+", type=path_argument, help="folders of runs, such as runs/NAME; running ones as well"
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        help="a .png, or a .html with values below the pointer; default: curves.png in the folder of a single run, and"
        " curves.png here for several",
    )
    parser.add_argument("--x", choices=("steps", "tokens", "hours"), help="below the curves (steps)", default="steps")
    return parser


def _plot(options: argparse.Namespace) -> None:
    out: Path = options.out or (options.runs[0] if len(options.runs) == 1 else Path()) / CURVES
    if out.suffix not in (".png", ".html"):
        raise UserError(f"--out {out}: write a name that ends with .png or .html")
    from recipes.lab.curves.panels import curves
    from recipes.lab.curves.reading import read_runs

    found = curves(read_runs(options.runs), options.x)
    for run in found.runs:
        if run.unreadable:
            print(f"{run.folder}: {run.unreadable} lines are not rows and were left out", file=sys.stderr)
    from recipes.files.reading import fault

    part = out.with_name(f".part-{os.getpid()}-{out.name}")
    try:
        if out.suffix == ".png":
            from recipes.lab.curves.picture import write_png

            write_png(found, part)
        else:
            from recipes.lab.curves.page import write_page

            write_page(found, part)
        part.replace(out)
    except OSError as error:
        raise fault(f"--out {out} cannot be written", error, "; write another file") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    print(out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
