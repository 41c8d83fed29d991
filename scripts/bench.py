"""Run a benchmark: `python scripts/bench.py --suite NAME [options]`, implemented in recipes/lab."""

import ast
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # first: other distributions install a top-level `recipes` too

from recipes.files.interpreter import explain_wrong_interpreter  # noqa: E402

explain_wrong_interpreter()

SUITES = (
    *("calibrate", "checkpoint", "codegen", "data", "gpu", "kernels", "operators", "overhead"),
    *("plan", "plan_memory"),
)


def main(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print(f"{__doc__}\n\nSuites, each with its own --help:")
        for name in SUITES:
            text = (ROOT / "recipes" / "lab" / _room(name) / f"{name}.py").read_text(encoding="utf-8")
            print(f"  {name:<12} {str(ast.get_docstring(ast.parse(text))).splitlines()[0]}")
        return 0
    if len(arguments) < 2 or arguments[0] != "--suite" or arguments[1] not in SUITES:
        print(f"usage: bench.py --suite {{{','.join(SUITES)}}} [options]", file=sys.stderr)
        return 2
    suite = importlib.import_module(f"recipes.lab.{_room(arguments[1])}.{arguments[1]}")
    return suite.main(arguments[2:])


def _room(suite: str) -> str:
    """The folder of recipes/lab that the suite is in."""
    return "codegen" if suite == "codegen" else "bench"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
