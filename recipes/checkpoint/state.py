"""What is no tensor in a checkpoint, the progress of the run and the optimizer's numbers, checked when it is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval, MaxLen
from pydantic import FiniteFloat, TypeAdapter

from parallel.errors import UserError
from recipes.checkpoint.manifest import Count, Damage, Manifest
from recipes.optimization.skip_steps import WINDOW

PROGRESS: dict[str, TypeAdapter[Any]] = {
    "sequences": TypeAdapter(Count),
    "tokens": TypeAdapter(Count),
    "skipped_in_a_row": TypeAdapter(Annotated[int, Interval(ge=0, lt=2**31)]),
    "loss_window": TypeAdapter(Annotated[list[FiniteFloat], MaxLen(WINDOW)]),
    "trained_on": TypeAdapter(dict[str, str]),
    "wandb_id": TypeAdapter(Annotated[str, MaxLen(200)]),
}
"""What a run goes on from, each where it is there: older versions saved less. Other keys nobody reads."""
REQUIRED = ("lr", "betas", "eps", "weight_decay")
"""What recipes set of an optimizer. The rest are defaults of torch, of which another version may have others."""


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an optimizer's group, and its parameters' names. Which kernel steps them is no state of a run."""
    numbers = (int, float, tuple)
    return {key: value for key, value in group.items() if key == "params" or type(value) in numbers}


def checked(manifest: Manifest, groups: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """The progress, and the optimizer's groups with the stored numbers in them, of the types that a run needs.

    Raises Damage, or UserError for another optimizer.
    """
    try:
        progress, stored = manifest.state["progress"], manifest.state["optimizer"]
        by_names = {tuple(sorted(group["params"])): group for group in stored}
        found = []
        for group in groups:
            match = by_names.get(tuple(sorted(group["params"])))
            required = [key for key in REQUIRED if key in group]
            if match is None or not match.keys() >= set(required):
                raise UserError(f"{path} was saved with another optimizer, or other groups of parameters in it")
            found.append(dict(group) | {key: _as(group[key], match[key]) for key in required})
        if not isinstance(progress, dict):
            raise TypeError("progress")
        for key in PROGRESS.keys() & progress.keys():
            PROGRESS[key].validate_python(progress[key], strict=True)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = " ".join(repr(error).split())[:300]
        raise Damage(f"{path}: the manifest's state is not what a run needs ({why})") from None
    return {"progress": progress, "optimizer": found}


def _as(present: Any, stored: Any) -> Any:
    """A hyperparameter from JSON, of the type that the optimizer has now."""
    if isinstance(present, tuple | list):
        return type(present)(_as(one, other) for one, other in zip(present, stored, strict=True))
    if isinstance(present, float) and type(stored) is int:
        return float(stored)
    if type(present) is not type(stored):
        raise TypeError(f"{stored!r:.100} instead of {present!r}")
    return stored
