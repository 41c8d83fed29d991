"""What a run makes of its model after its last step."""

from collections.abc import Callable

from torch import nn

from parallel.dist import World, on_main
from recipes.data.loader import DataLoader
from recipes.files.layout import CHECKPOINTS, EXPORT, step_folder
from recipes.recipe.schema import Recipe


def write_results(
    recipe: Recipe,
    model: nn.Module,
    loader: DataLoader,
    *,
    saved: bool,
    world: World,
    log: Callable[[str], None],
) -> None:
    """Write a sample to the log and the weights to files, if the recipe asks for them. All processes must call it.

    recipe, loader: of the last stage. saved: whether the last checkpoint is, of which weights are exported.
    """
    if recipe.validation.sample_tokens:
        from recipes.evaluation.evaluate import show_sample

        count, seed = recipe.validation.sample_tokens, recipe.run.seed
        show_sample(model, loader, recipe.batch, count, device=world.device, seed=seed, log=log)
    if recipe.checkpoint.export_hf and saved:
        from recipes.weights.convert import export_checkpoint

        checkpoint = step_folder(recipe.run.folder / CHECKPOINTS, recipe.run.steps)
        on_main(world, lambda: export_checkpoint(checkpoint, recipe.run.folder / EXPORT, replace=True))
