"""What a run makes of its model after its last step."""

from collections.abc import Callable

from torch import nn

from parallel.dist import World
from recipes.data.loader import DataLoader
from recipes.files.layout import EXPORT
from recipes.recipe.schema import Recipe
from recipes.weights.description import Description


def write_results(
    recipe: Recipe,
    model: nn.Module,
    loader: DataLoader,
    description: Description,
    *,
    world: World,
    log: Callable[[str], None],
    saved: bool,
) -> None:
    """Write a sample to the log and the weights to files, if the recipe asks for them; and to the log what was read of
    each source, if that changed during the run.

    Args:
        recipe: of the last stage.
        model: trained.
        loader: of the last stage.
        description: what accompanies the weights.
        world: all processes, which must all call this.
        log: receives one line of text per message.
        saved: whether the last checkpoint is there, without which no weights are exported.
    """
    if recipe.validation.sample_tokens:
        from recipes.evaluation.evaluate import show_sample

        count, seed = recipe.validation.sample_tokens, recipe.run.seed
        show_sample(model, loader, recipe.batch, count, device=world.device, seed=seed, log=log)
    if recipe.checkpoint.export_hf and saved:
        from recipes.weights.convert import export_model

        export_model(model, recipe.run.folder / EXPORT, description, world=world)
    if len(loader.history(recipe.run.steps)) > 1:
        for line in loader.consumed(recipe.run.steps):
            log(line)
