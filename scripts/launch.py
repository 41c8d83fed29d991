"""torchrun with useful exit codes and signals: `python scripts/launch.py [torchrun options] train.py [arguments]`.

A worker's own error stays the last thing on the screen and its exit code becomes the launcher's (128 + n for signal n);
torchrun would print its log and a traceback of its own below it and exit with 1. A stop signal is passed on to the
workers, which get as long as they need; a second one ends them at once. No worker is left behind. The processes of one
node listen on its loopback network only. LOGLEVEL=INFO shows torchrun's log.
"""

import os
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.files.interpreter import ROOT, explain_wrong_interpreter

explain_wrong_interpreter()

from parallel.errors import UserError  # noqa: E402
from recipes.cluster.launcher import PROVE, Workers, handle_stop_signals, launch  # noqa: E402
from recipes.cluster.quiet import await_turn  # noqa: E402
from recipes.files.exit_codes import SIGNALS, exit_code, leave  # noqa: E402
from recipes.files.screen import say, tell  # noqa: E402
from recipes.recipe.load import load, to_toml  # noqa: E402
from recipes.recipe.schema import RunConfig  # noqa: E402

if TYPE_CHECKING:
    from recipes.cluster.spares import Numbers


def trained() -> tuple[str, list[str]] | None:
    """The recipe that the workers train, and what overrides it; None if they do something else."""
    script = str(ROOT / "train.py")
    if script not in sys.argv[:-1] or PROVE in sys.argv:
        return None
    recipe, *overrides = sys.argv[sys.argv.index(script) + 1 :]
    return recipe, overrides


def numbers_of(run: RunConfig, recipe: str, overrides: list[str]) -> "Numbers | None":
    """With how many nodes the recipe trains; None: with all. Raises UserError without restarts."""
    asked = [name for name in ("spare_nodes", "least_nodes") if getattr(run, name)]
    if not asked:
        return None
    if (os.environ.get("RESTARTS") or "0") == "0":
        raise UserError(f"run.{asked[0]}: needs RESTARTS=10, or so, on all nodes; or write --run.{asked[0]} 0")

    from recipes.cluster.spares import Numbers

    def fits(processes: int, nodes: int) -> bool:
        with suppress(UserError):
            return bool(load(recipe, overrides, processes=processes, nodes=nodes, elsewhere=True))
        return False

    return Numbers(run.spare_nodes, run.least_nodes, lru_cache(fits))


def main() -> int:
    if sys.argv[1:] in (["-h"], ["--help"]):
        say(__doc__)
        return 0
    await_turn()
    try:
        words = trained()
        recipe = load(*words, rules=False) if words else None
        run = recipe.run if recipe else RunConfig()
        numbers = numbers_of(run, *words) if words else None
        workers = Workers(run.folder if recipe else None, node_timeout=run.node_timeout, numbers=numbers)
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
