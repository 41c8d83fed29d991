"""The state that a checkpoint holds: tensors by name, the optimizer's hyperparameters and the progress of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from annotated_types import Interval, MaxLen
from pydantic import AfterValidator, FiniteFloat, TypeAdapter
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from parallel.errors import UserError
from parallel.fsdp import plain_name, without_wrapper
from recipes.checkpoint.config import AVERAGED, KEEP_BEST, VALIDATION
from recipes.checkpoint.manifest import Count, Damage, Manifest
from recipes.checkpoint.storage import PARAMETERS
from recipes.data.history import from_json
from recipes.optimization.skip_steps import WINDOW

MOMENTS = "optimizer."
"""Prefix of the names of the optimizer's tensors in a checkpoint: optimizer.PARAMETER.KIND."""
PROGRESS: dict[str, TypeAdapter[Any]] = {
    "sequences": TypeAdapter(Count),
    "tokens": TypeAdapter(Count),
    "skipped_in_a_row": TypeAdapter(Annotated[int, Interval(ge=0, lt=2**31)]),
    "loss_window": TypeAdapter(Annotated[list[FiniteFloat], MaxLen(WINDOW)]),
    "history": TypeAdapter(Annotated[Any, AfterValidator(from_json)]),
    "trained_on": TypeAdapter(dict[str, str]),
    KEEP_BEST: TypeAdapter(Annotated[str, MaxLen(1000)]),
    VALIDATION: TypeAdapter(dict[str, FiniteFloat]),
    AVERAGED: TypeAdapter(list[Count]),
    "wandb_id": TypeAdapter(Annotated[str, MaxLen(200)]),
}
"""The keys of the progress that a run reads, with their types. Any may be missing: older versions saved fewer."""
REQUIRED = ("lr", "betas", "eps", "weight_decay", "momentum", "ns_steps")
"""The hyperparameters that recipes set. The others are defaults of torch, and differ between its versions."""


def named_tensors(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Parameters and optimizer tensors by name, not copied, and the optimizer's groups.

    Names are the plain model's. Parameters lack float8 all-gather's wrapper: checkpoints must load without torchao.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    copies = copies_in(model)
    tensors = {
        PARAMETERS + name: without_wrapper(cast(Tensor, value))
        for name, value in model_state.items()
        if name not in copies
    }
    for parameter, values in cast(Mapping[str, Any], optimizer_state["state"]).items():
        for kind, value in values.items():
            assert isinstance(value, Tensor), f"optimizer state {kind} of {parameter} is not a tensor"
            tensors[f"{MOMENTS}{parameter}.{kind}"] = value
    return tensors, cast(list[dict[str, Any]], optimizer_state["param_groups"])


def restore(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]
) -> None:
    """Put tensors by name, and the groups of the optimizer, into model and optimizer."""
    moments: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(MOMENTS):
            parameter, _, kind = name.removeprefix(MOMENTS).rpartition(".")
            moments.setdefault(parameter, {})[kind] = value
    values: dict[str, Any] = {n.removeprefix(PARAMETERS): v for n, v in tensors.items() if n.startswith(PARAMETERS)}
    set_state_dict(
        model,
        optimizer,
        model_state_dict=values | {copy: values[name] for copy, name in copies_in(model).items()},
        optim_state_dict={"state": cast(Any, moments), "param_groups": groups},
    )


def copies_in(model: nn.Module) -> dict[str, str]:
    """Another name of a tied parameter -> the one under which it is saved."""
    first: dict[nn.Parameter, str] = {}
    named = ((plain_name(name), one) for name, one in model.named_parameters(remove_duplicate=False))
    return {name: first[one] for name, one in named if first.setdefault(one, name) != name}


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and parameter names of an optimizer's group, without options such as which kernel to use."""
    return {key: value for key, value in group.items() if key == "params" or type(value) in (int, float, tuple)}


def checked_progress(manifest: Manifest, groups: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """Stored progress, types checked. Raises Damage, or UserError if the optimizer's groups were of a different one."""
    try:
        progress, stored = manifest.state["progress"], manifest.state["optimizer"]
        group_of = {name: group for group in stored for name in group["params"]}
        for group in groups:
            required = {key for key in REQUIRED if key in group}
            for name in group["params"]:
                if not group_of.get(name, {}).keys() >= required:
                    raise UserError(f"{path} was saved with a different optimizer, or without the moments of {name}")
        if not isinstance(progress, dict):
            raise TypeError("progress")
        for key in PROGRESS.keys() & progress.keys():
            PROGRESS[key].validate_python(progress[key], strict=True)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = " ".join(repr(error).split())[:300]
        raise Damage(f"{path}: the state in the manifest is not valid ({why})") from None
    return progress
