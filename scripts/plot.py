"""Report and compare what runs have logged, `python scripts/plot.py runs/A runs/B`, or list runs; see --help."""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import end_at_interrupt, explain_wrong_interpreter

explain_wrong_interpreter()
end_at_interrupt()

from parallel.errors import UserError  # noqa: E402
from recipes.files.exit_codes import ended_by, exit_code  # noqa: E402
from recipes.files.reading import path_argument  # noqa: E402
from recipes.files.screen import tell  # noqa: E402


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 2 for what the user can fix, 71 for a fault that may pass, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        from recipes.lab.curves.command import plot

        plot(options.runs, out=options.out, axis=options.x, watch=options.watch)
    except UserError as error:
        tell(str(error))
        return exit_code(error)
    except KeyboardInterrupt:
        return ended_by(signal.SIGINT)
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
        help="a .html; default: report.html in the folder of a single run, with report.md, and here for several",
    )
    parser.add_argument("--x", choices=("steps", "tokens", "hours"), help="below the curves (steps)", default="steps")
    parser.add_argument("--watch", action="store_true", help="rewrite the page while one of the runs goes on")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
