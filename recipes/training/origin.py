"""What the run that made some weights was told, from the recipe beside its checkpoints. Imports no torch."""

from recipes.data.config import DataConfig
from recipes.files.layout import RECIPE
from recipes.recipe.load import load
from recipes.recipe.stages import stage_of
from recipes.weights.locate import Weights


def data_of_run(weights: Weights) -> DataConfig | None:
    """How the run of a checkpoint, or of its export, read its data; None for weights from elsewhere."""
    for folder in weights.path.absolute().parents[:2]:
        if (folder / RECIPE).is_file():
            recipe = load(folder / RECIPE, rules=False)
            step = weights.path.name.removeprefix("step-")  # an export is made after the last step
            return stage_of(recipe, int(step) - 1 if step.isdecimal() else recipe.run.steps).recipe.data
    return None
