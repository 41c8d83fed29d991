"""Run a benchmark: `python scripts/bench.py --suite NAME [options]`, implemented in recipes/lab.

gpu measures the kernels of one GPU and training runs on it; kernels times the operations of a training step anywhere.
"""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # first: other distributions install a top-level `recipes` too

from recipes.files.interpreter import explain_wrong_interpreter  # noqa: E402

explain_wrong_interpreter()

from recipes.files.screen import say  # noqa: E402

SUITES = ("gpu", "kernels")


def main(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        say(f"{__doc__}\nSuites, each with its own --help: {', '.join(SUITES)}")
        return 0
    if len(arguments) < 2 or arguments[0] != "--suite" or arguments[1] not in SUITES:
        say(f"usage: bench.py --suite {{{','.join(SUITES)}}} [options]", to=2)
        return 2
    suite = importlib.import_module(f"recipes.lab.bench.{arguments[1]}")
    return suite.main(arguments[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
