"""Measure one GPU: `python scripts/bench.py --suite gpu [options]` is `python -m tests.gpu.suite [options]`."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other distributions install a top-level `tests`

from recipes.files.interpreter import explain_wrong_interpreter

explain_wrong_interpreter()

if sys.argv[1:3] == ["--suite", "gpu"]:
    del sys.argv[1:3]
runpy.run_module("tests.gpu.suite", run_name="__main__")
