"""Starts the processes of a node again after a crash or a hang: `RESTARTS=N scripts/run.sh RECIPE ...` runs this.

supervise.py LAUNCHER [options] train.py RECIPE [--section.field value ...]
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import ROOT, explain_wrong_interpreter

explain_wrong_interpreter()

from parallel.errors import UserError  # noqa: E402
from recipes.cluster.launcher import handle_stop_signals  # noqa: E402
from recipes.cluster.restarts import Launcher, number_of_restarts, supervise  # noqa: E402
from recipes.files.exit_codes import exit_code, with_parent  # noqa: E402
from recipes.files.screen import say, tell  # noqa: E402
from recipes.recipe.load import load  # noqa: E402


def main(command: list[str]) -> int:
    if command in (["-h"], ["--help"]):
        say(__doc__)
        return 0
    try:
        if str(ROOT / "train.py") not in command[:-1]:
            raise UserError(f"supervise.py: started by scripts/run.sh with RESTARTS=N\n{__doc__}")
        recipe, *overrides = command[command.index(str(ROOT / "train.py")) + 1 :]
        run = load(recipe, overrides, rules=False).run
        restarts = number_of_restarts(os.environ.get("RESTARTS", ""))
    except UserError as error:
        tell(str(error))
        return exit_code(error)
    alone = {"--standalone", "--nproc-per-node=1"}  # whose launcher needs no torch
    launcher = Launcher(with_parent(command), prepared=not alone.issubset(command))
    handle_stop_signals(launcher.stop)
    try:
        return supervise(launcher, run.folder, steps=run.steps, restarts=restarts)
    finally:
        launcher.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
