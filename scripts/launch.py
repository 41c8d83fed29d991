"""torchrun with useful exit codes and signals: `python scripts/launch.py [torchrun options] train.py [arguments]`.

A worker's own error stays the last thing on the screen and its exit code becomes the launcher's (128 + n for signal n);
torchrun would print its log and a traceback of its own below it and exit with 1. A stop signal is passed on to the
workers, which get as long as they need; a second one ends them at once. No worker is left behind. The processes of one
node listen on its loopback network only. LOGLEVEL=INFO shows torchrun's log.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.files.interpreter import ROOT, explain_wrong_interpreter

explain_wrong_interpreter()

from parallel.errors import UserError  # noqa: E402
from recipes.cluster.launcher import PROVE, Workers, handle_stop_signals, launch  # noqa: E402
from recipes.files.exit_codes import SIGNALS, exit_code, leave  # noqa: E402
from recipes.files.screen import say, tell  # noqa: E402
from recipes.recipe.load import load, to_toml  # noqa: E402
from recipes.recipe.schema import Recipe, RunConfig  # noqa: E402


def trained() -> Recipe | None:
    """The recipe that the workers train; None if they do something else. Raises UserError."""
    script = str(ROOT / "train.py")
    if script not in sys.argv[:-1] or PROVE in sys.argv:
        return None
    recipe, *overrides = sys.argv[sys.argv.index(script) + 1 :]
    loaded = load(recipe, overrides, rules=False)
    if loaded.run.spare_nodes and (os.environ.get("RESTARTS") or "0") == "0":
        raise UserError("run.spare_nodes: needs RESTARTS=10, or so, on all nodes; or write --run.spare_nodes 0")
    return loaded


def main() -> int:
    if sys.argv[1:] in (["-h"], ["--help"]):
        say(__doc__)
        return 0
    try:
        recipe = trained()
        run = recipe.run if recipe else RunConfig()
        workers = Workers(run.folder if recipe else None, node_timeout=run.node_timeout, spare_nodes=run.spare_nodes)
        handle_stop_signals(workers.stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # recipes/cluster/restarts.py blocks them until this line
        if recipe is None or not recipe.run.prove_first:
            return launch(sys.argv[1:], workers)
        from recipes.cluster.proof import Proof

        return launch(sys.argv[1:], workers, Proof(recipe.run.folder, to_toml(recipe)))
    except UserError as error:
        tell(str(error))
        return exit_code(error)


if __name__ == "__main__":
    leave(main())
