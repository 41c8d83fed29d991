"""Kills a run again and again and checks that it ends as if it had not been killed; see recipes/lab/bench/crash.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # first: other distributions install a top-level `recipes` too

from recipes.files.interpreter import explain_wrong_interpreter  # noqa: E402

explain_wrong_interpreter()

from recipes.lab.bench.crash import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
