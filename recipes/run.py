"""One run in one process: what the launcher starts, and how it ends."""

import time

from parallel.dist import lost_a_peer, start, stop
from parallel.errors import UserError
from recipes.console import Console
from recipes.interruption import forget_signals
from recipes.preflight import preflight
from recipes.schema import Recipe
from recipes.trainer import Trainer


def train(recipe: Recipe) -> int:
    """Run a recipe in this process, one of those the launcher started.

    Returns the exit code, see recipes/exit_codes.py. A UserError that concerns all ranks is printed once, by rank 0.
    """
    world = start(recipe.run.device, seed=recipe.run.seed)
    try:
        with Console(silent=not world.is_main) as console:
            preflight(recipe.run.folder, world, say=console.say)
            return Trainer(recipe, world, console).run()
    except UserError as error:
        forget_signals()
        if world.is_main:
            raise
        # Rank 0 most likely says the same, and then the launcher ends the others: leave it the time to speak.
        time.sleep(10)
        raise UserError(f"rank {world.rank}: {error}") from None
    except Exception as error:
        forget_signals()
        if lost_a_peer(error):
            time.sleep(10)  # the launcher ends this process before a traceback hides what became of the other
        raise
    finally:
        stop()
