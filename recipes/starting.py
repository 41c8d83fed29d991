"""What a run takes its weights from at its start. Imports no torch."""

from pathlib import Path

from recipes.checkpoint.folder import check
from recipes.checkpoint.manifest import Damage
from recipes.files.layout import CHECKPOINTS, checkpoint_steps, step_folder
from recipes.weights import Weights, find_weights


def starting_point(weights: str, run_folder: Path) -> Weights:
    """What a run with this model.weights begins with: its own newest checkpoint, which needs them no more, or them.

    Damaged checkpoints are passed over here as they will be when the run goes on, which sets them aside.
    """
    place, damaged = run_folder / CHECKPOINTS, None
    for step in reversed(checkpoint_steps(place)):
        try:
            check(place, step)
            return find_weights(step_folder(place, step))
        except Damage as damage:
            damaged = damaged or damage
    if damaged is not None and not weights:
        raise damaged
    return find_weights(weights)
