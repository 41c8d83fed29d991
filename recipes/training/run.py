"""One run in one process: what the launcher starts, and how it ends."""

import time
from datetime import timedelta
from pathlib import Path

from parallel.dist import World, lost_a_peer, start, stop
from parallel.errors import UserError
from recipes.cluster.watchdog import SLOW_LIMIT, Watchdog
from recipes.data.text.sources import is_prepared
from recipes.files.exit_codes import OUT_OF_MEMORY
from recipes.load import LoadedRecipe, to_toml
from recipes.metrics.clock import RunClock
from recipes.schema import Recipe
from recipes.training.build import build_run
from recipes.training.console import Console
from recipes.training.interruption import forget_signals
from recipes.training.trainer import Trainer


def train(loaded: LoadedRecipe, *, began: float) -> int:
    """Run a recipe in this process, one of those the launcher started.

    began: when the process started, by time.monotonic(). Returns the exit code, see recipes/files/exit_codes.py.
    A UserError that concerns all ranks is printed once, by rank 0.
    """
    folder, limit = loaded.recipe.run.folder, loaded.recipe.run.hang_timeout
    world = start(
        loaded.recipe.run.device,
        seed=loaded.recipe.run.seed,
        # The watchdog acts first and knows more: torch's 10 minutes on CUDA are less than a first step may take.
        timeout=timedelta(seconds=SLOW_LIMIT + 2 * limit) if limit else None,
        flight_recorder=folder / "flight-recorder-",
    )
    clock = RunClock(world.device, began=began)
    watchdog = Watchdog(clock, world, timeout=limit, folder=folder)
    try:
        with Console(silent=not world.is_main) as console:
            if world.size > 1:
                _preflight(loaded.recipe, world, console)
            return Trainer(build_run(loaded, world, console, clock)).run()
    except UserError as error:
        forget_signals()
        if world.is_main:
            raise
        # Rank 0 most likely prints the same error, and then the launcher ends the others: give it time to do so.
        time.sleep(10)
        raise type(error)(f"rank {world.rank}: {error}") from None
    except Exception as error:
        forget_signals()
        from recipes.training.out_of_memory import out_of_memory, report

        if cause := out_of_memory(error):
            report(cause, loaded.recipe, world, clock)
            return OUT_OF_MEMORY
        if lost_a_peer(error):
            time.sleep(10)  # the launcher ends this process before a traceback hides the other's error
        raise
    finally:
        stop()
        watchdog.close()


def _preflight(recipe: Recipe, world: World, console: Console) -> None:
    from recipes.cluster.links import groups_along
    from recipes.cluster.preflight import preflight

    texts = [*recipe.data.sources, *filter(None, recipe.validation.texts.values())]
    tokenizes = not all(map(is_prepared, texts))
    cache = Path(recipe.data.cache) if tokenizes else None
    groups = groups_along(context=recipe.mesh.context, tensor=recipe.mesh.tensor, processes=world.size)
    preflight(recipe.run.folder, world, recipe=to_toml(recipe), cache=cache, groups=groups, log=console.log)
