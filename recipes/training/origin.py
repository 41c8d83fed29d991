"""What the run that made some weights was told, from the recipe beside its checkpoints. Imports no torch."""

from recipes.data.config import DataConfig
from recipes.files.layout import RECIPE
from recipes.load import load
from recipes.weights.locate import Weights


def data_of_run(weights: Weights) -> DataConfig | None:
    """How the run of a checkpoint, or of its export, read its data; None for weights from elsewhere."""
    for folder in weights.path.absolute().parents[:2]:
        if (folder / RECIPE).is_file():
            return load(folder / RECIPE, rules=False).data
    return None
