"""One run in one process: what the launcher starts, and how it ends."""

import time
from datetime import timedelta
from pathlib import Path

from parallel.dist import lost_a_peer, start, stop
from parallel.errors import UserError
from recipes.cluster.preflight import preflight
from recipes.cluster.watchdog import SLOW_LIMIT, Watchdog
from recipes.data.text.sources import is_prepared
from recipes.load import LoadedRecipe, to_toml
from recipes.metrics.clock import RunClock
from recipes.training.console import Console
from recipes.training.interruption import forget_signals
from recipes.training.trainer import Trainer


def train(loaded: LoadedRecipe, *, began: float) -> int:
    """Run a recipe in this process, one of those the launcher started.

    began: when the process did, by time.monotonic(). Returns the exit code, see recipes/files/exit_codes.py.
    A UserError that concerns all ranks is printed once, by rank 0.
    """
    recipe = loaded.recipe
    folder, limit = recipe.run.folder, recipe.run.hang_timeout
    world = start(
        recipe.run.device,
        seed=recipe.run.seed,
        # The watchdog comes first and knows more: torch's 10 minutes on CUDA are less than a first step may take.
        timeout=timedelta(seconds=SLOW_LIMIT + 2 * limit) if limit else None,
        flight_recorder=folder / "flight-recorder-",
    )
    clock = RunClock(world.device, began=began)
    watchdog = Watchdog(clock, world, timeout=limit, folder=folder)
    try:
        with Console(silent=not world.is_main) as console:
            tokenizes = not all(map(is_prepared, recipe.data.sources))
            cache = Path(recipe.data.cache) if tokenizes else None
            preflight(recipe.run.folder, world, recipe=to_toml(recipe), cache=cache, log=console.log)
            return Trainer(recipe, world, console, clock).run()
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
        watchdog.close()
