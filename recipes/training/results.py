"""What a run makes of its model after its last step."""

from collections.abc import Callable

from torch import nn

from parallel.dist import World
from recipes.data.loader import DataLoader
from recipes.files.layout import CHECKPOINTS, EXPORT, step_folder
from recipes.recipe.schema import Recipe
from recipes.weights.description import Description


def write_results(
    recipe: Recipe,
    model: nn.Module,
    loader: DataLoader,
    describe: Callable[[], Description] | None,
    *,
    world: World,
    log: Callable[[str], None],
) -> None:
    """Write a sample to the log and the weights to files, if the recipe asks for them. All processes must call it.

    recipe, loader: of the last stage. describe: returns what accompanies exported weights; None = the
    last checkpoint is not saved, without which nothing is exported.
    """
    if recipe.validation.sample_tokens:
        from recipes.evaluation.evaluate import show_sample

        count, seed = recipe.validation.sample_tokens, recipe.run.seed
        show_sample(model, loader, recipe.batch, count, device=world.device, seed=seed, log=log)
    if recipe.checkpoint.export_hf and describe:
        from recipes.weights.convert import export_model
        from recipes.weights.publish import with_card

        checkpoint = step_folder(recipe.run.folder / CHECKPOINTS, recipe.run.steps)
        description = with_card(describe(), checkpoint) if world.is_main else describe()
        export_model(model, recipe.run.folder / EXPORT, description, world=world)
