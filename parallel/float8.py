"""Float8 matrix multiplications through torchao, the only file that imports it."""

import logging
import warnings
from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.config import Float8Config
from parallel.errors import UserError

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig


def convert_linears(model: nn.Module, config: Float8Config, *, device_type: str) -> str:
    """Swap every nn.Linear that is not excluded for torchao's Float8Linear, in place. Returns a line for the log.

    Raises UserError where the device has no float8 units and emulation was not asked for, where a linear's widths
    are no multiples of 16 (torchao and the hardware need that), and where nothing at all would be converted.
    """
    if config.recipe == "none":
        return "float8: off"
    if not config.emulate:
        _require_float8_units(config, device_type)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = {name: module for name, module in linears.items() if not set(name.split(".")) & set(config.exclude)}
    if unknown := set(config.exclude) - {part for name in linears for part in name.split(".")} - {"lm_head"}:
        raise UserError(f"float8.exclude names {sorted(unknown)}, but no linear is called so: {_parts(linears)}")
    # The norms beside a block's linears make FSDP gather bytes; a group of float8 alone is gathered as such.
    if config.all_gather and device_type == "cpu" and (alone := [name for name in chosen if "blocks" not in name]):
        raise UserError(f"float8.all_gather: gloo cannot gather {alone[0]} in float8; add it to float8.exclude")
    uneven = [
        f"{name} ({module.in_features} -> {module.out_features})"
        for name, module in chosen.items()
        if module.in_features % 16 or module.out_features % 16
    ]
    if uneven:
        raise UserError(
            f"float8: widths must be multiples of 16, but {uneven[0]} and {len(uneven) - 1} more are not"
            "; add their names to float8.exclude or change the model's widths"
        )
    if not chosen:
        raise UserError(
            f"float8.recipe = {config.recipe!r} would convert none of the {len(linears)} linears: float8.exclude ="
            f' {list(config.exclude)} leaves nothing; exclude less, or write recipe = "none"'
        )
    # The public entry point, because it also works around a Triton miscompile (see torchao's _inductor_patch.py).
    _torchao_float8().convert_to_float8_training(
        model, config=_torchao_config(config), module_filter_fn=lambda _, name: name in chosen
    )
    gathered = ", float8 all-gather" if config.all_gather else ""
    emulated = ", emulated" if config.emulate else ""
    return f"float8: {config.recipe}, {len(chosen)} of {len(linears)} linears converted{gathered}{emulated}"


def _parts(linears: Iterable[str]) -> str:
    """The components of the linears' names, to choose from."""
    return ", ".join(sorted({part for name in linears for part in name.split(".") if not part.isdigit()}))


def precompute_scales(model: nn.Module) -> None:
    """For float8 all-gather: all weights' scales with one all-reduce. Call it after every optimizer step."""
    _torchao_float8().precompute_float8_dynamic_scale_for_fsdp(model)


def without_wrapper(tensor: Tensor) -> Tensor:
    """The numbers that float8 all-gather wraps in a class of torchao's, in the same memory; other tensors as they are.

    For what writes them down: whoever reads a checkpoint need not have torchao.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    plain = getattr(local, "_tensor", local)
    if plain is local:
        return tensor
    if not isinstance(tensor, DTensor):
        return plain
    return DTensor.from_local(
        plain,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _torchao_float8() -> ModuleType:
    """torchao.float8, imported only where float8 is asked for (3 s), without its notes to its own developers.

    On CPU machines it tells of C++ extensions that failed to load, and that torch will drop a call it makes.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torchao")
        import torchao.float8

    return torchao.float8


def _torchao_config(config: Float8Config) -> "Float8LinearConfig":
    preset = _torchao_float8().Float8LinearConfig.from_recipe_name(config.recipe)
    return replace(preset, enable_fsdp_float8_all_gather=config.all_gather, emulate=config.emulate)


def _require_float8_units(config: Float8Config, device_type: str) -> None:
    remedy = '; write float8.emulate = true to try the numerics without speed, or float8.recipe = "none"'
    if device_type != "cuda":
        raise UserError(f"float8.recipe = {config.recipe!r}: a {device_type} device has no float8 matrix units{remedy}")
    # Per-tensor scaling came with Ada (8.9); the row-wise kernels need Hopper (9.0).
    needed = (8, 9) if config.recipe == "tensorwise" else (9, 0)
    if (found := torch.cuda.get_device_capability()) < needed:
        raise UserError(
            f"float8.recipe = {config.recipe!r} needs compute capability {needed[0]}.{needed[1]}, but"
            f" {torch.cuda.get_device_name()} has {found[0]}.{found[1]}{remedy}"
        )
