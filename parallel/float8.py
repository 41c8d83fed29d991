"""Float8 matrix multiplications through torchao, the only file that imports it."""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from models.interface import ModelInterface, interface_of
from parallel.config import Float8Config
from parallel.errors import UserError
from parallel.float8_limits import UNIT, fit, why_not_excluded, why_not_shared


def convert_linears(model: nn.Module, config: Float8Config, *, device_type: str, shards: int = 1) -> str:
    """Swap every nn.Linear that is not excluded for torchao's Float8Linear, in place. Returns a line for the log.

    Raises UserError where the device has no float8 units and emulation was not asked for, and as chosen_linears does.
    """
    if not config.emulate:
        _require_float8_units(config, device_type)
    chosen, skipped, count = chosen_linears(model, config, device_type=device_type, shards=shards)
    torchao_float8 = _torchao_float8()
    preset = torchao_float8.Float8LinearConfig.from_recipe_name(config.recipe)
    settings = replace(preset, enable_fsdp_float8_all_gather=config.all_gather, emulate=config.emulate)
    # The public entry point, because it also works around a Triton miscompile (see torchao's _inductor_patch.py).
    torchao_float8.convert_to_float8_training(model, config=settings, module_filter_fn=lambda _, name: name in chosen)
    for name in chosen:
        model.get_submodule(name).__class__ = _linear_of_rows()
    gathered = ", float8 all-gather" if config.all_gather else ""
    emulated = ", emulated" if config.emulate else ""
    uneven = f", {skipped} not because of widths that are no multiples of {UNIT}" if skipped else ""
    return f"float8: {config.recipe}, {len(chosen)} of {count} linears converted{uneven}{gathered}{emulated}"


def chosen_linears(
    model: nn.Module, config: Float8Config, *, device_type: str, shards: int = 1
) -> tuple[dict[str, nn.Linear], int, int]:
    """The linears to convert, how many are left out because of their widths, in models that allow it, and of how many.

    Raises UserError for names to exclude that no linear has, where a linear's widths are not multiples of 16 (torchao
    and the hardware need that), where FSDP's `shards` processes cannot have equal parts of weights to gather in
    float8, and where nothing at all would be converted.
    """
    interface = interface_of(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linears.pop(interface.tied_head or "", None)  # its weight is the embedding's
    chosen = {name: module for name, module in linears.items() if not _is_excluded(name, config, interface)}
    if refused := why_not_excluded(config.exclude, [*linears, *(["experts"] if interface.routers else [])]):
        raise UserError(f"float8.exclude {refused}")
    # The norms beside a block's linears make FSDP gather bytes; a group of float8 alone is gathered as such.
    if config.all_gather and device_type == "cpu":
        in_blocks = tuple(f"{name}." for name in interface.blocks)
        if alone := [name for name in chosen if not name.startswith(in_blocks)]:
            raise UserError(f"float8.all_gather: gloo cannot gather {alone[0]} in float8; add it to float8.exclude")
    uneven = {
        name: f"{name} ({module.in_features} -> {module.out_features})"
        for name, module in chosen.items()
        if not fit([module.in_features, module.out_features])
    }
    if interface.skips_uneven:
        chosen = {name: module for name, module in chosen.items() if name not in uneven}
    elif uneven:
        raise UserError(
            f"float8: widths must be multiples of {UNIT}, but {next(iter(uneven.values()))} and {len(uneven) - 1} more"
            " are not; add their names to float8.exclude or change the model's widths"
        )
    if not chosen:
        raise UserError(
            f"float8.recipe = {config.recipe!r} would convert none of the {len(linears)} linears: float8.exclude ="
            f" {list(config.exclude)} leaves nothing{f' whose widths are multiples of {UNIT}' if uneven else ''}"
            '; exclude less, or write recipe = "none"'
        )
    uncut = why_not_shared({name: module.out_features for name, module in chosen.items()}, shards)
    if config.all_gather and uncut:
        raise UserError(
            f"float8.all_gather: {uncut}; write all_gather = false, add it to float8.exclude, or change mesh.shard"
        )
    return chosen, len(uneven), len(linears)


def _is_excluded(name: str, config: Float8Config, interface: ModelInterface) -> bool:
    """Whether a component of its name excludes it; "lm_head" stands for the output projection of every model."""
    named = {*name.split("."), *(["lm_head"] if name == interface.head else [])}
    return bool(named & set(config.exclude))


@cache
def _linear_of_rows() -> type[nn.Module]:
    """Float8Linear that flattens its input at once to (tokens, width).

    torchao flattens after its casts in the forward pass, but before them in the backward pass. Compile does not see
    that both need the same scales, and would look for the largest magnitude of every input twice.
    """
    from torchao.float8.float8_linear import Float8Linear

    class FlatFloat8Linear(Float8Linear):
        def forward(self, input: Tensor) -> Tensor:
            if isinstance(input, DTensor):  # Inductor fuses messages only with products in torchao's own form
                return cast(Tensor, super().forward(input))
            rows = cast(Tensor, super().forward(input.reshape(-1, input.shape[-1])))
            return rows.reshape(*input.shape[:-1], rows.shape[-1])

    return FlatFloat8Linear


def precompute_scales(model: nn.Module) -> None:
    """Compute all weights' scales for float8 all-gather with one all-reduce. Call it after every optimizer step."""
    _torchao_float8().precompute_float8_dynamic_scale_for_fsdp(model)


Move = Callable[[DTensor, Placement], DTensor]
"""What gives rows, of which each process has a part, another placement."""


def float8_gather(linears: Sequence[nn.Module]) -> Move | None:
    """What gathers rows that are cut by tokens in the float8 form that these linears, which read them, need.

    Equal to gathering first: the rows have one scale, which is computed over all parts. None if no linear was
    converted; raises UserError if only some were.
    """
    found = [functions for linear in linears if (functions := _float8_functions(linear))]
    if found and len(found) < len(linears):
        raise UserError(
            "float8.gather_activations: linears that read the same activation must all be float8, but float8.exclude"
            f" leaves {len(found)} of {len(linears)}; exclude all or none, or write gather_activations = false"
        )
    return found[0][0] if found else None


def float8_scatter(linear: nn.Module) -> Move | None:
    """What scatters the sum of this linear's outputs, and gathers its gradient as float8; None if not converted."""
    functions = _float8_functions(linear)
    return functions[1] if functions else None


def _float8_functions(linear: Any) -> tuple[Move, Move] | None:
    """(float8_gather, float8_scatter) of one linear. torchao is imported here: runs without float8 have no time."""
    _torchao_float8()
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_training_tensor import GemmInputRole

    if not isinstance(linear, Float8Linear):
        return None
    products, config = linear.linear_mm_config, linear.config
    of_input = (config.cast_config_input.target_dtype, products, GemmInputRole.INPUT)
    of_gradient = (config.cast_config_grad_output.target_dtype, products, GemmInputRole.GRAD_OUTPUT)
    return (
        lambda rows, _: cast(DTensor, _Gather.apply(rows, *of_input)),
        # The axis alone, because torch 2.11 compiles no function of a placement.
        lambda rows, placement: cast(DTensor, _Scatter.apply(rows, cast(Shard, placement).dim, *of_gradient)),
    )


@torch._dynamo.allow_in_graph
class _Gather(torch.autograd.Function):
    """Gathers as float8; scatters the gradient's sum as it is."""

    @staticmethod
    def forward(ctx: Any, rows: DTensor, dtype: torch.dtype, products: Any, role: Any) -> DTensor:
        ctx.placements = rows.placements
        return _gathered(rows, dtype, products, role)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:
        return gradient.redistribute(placements=ctx.placements), None, None, None


@torch._dynamo.allow_in_graph
class _Scatter(torch.autograd.Function):
    """Scatters the sum as it is; gathers the gradient as float8."""

    @staticmethod
    def forward(ctx: Any, rows: DTensor, axis: int, dtype: torch.dtype, products: Any, role: Any) -> DTensor:
        ctx.cast = dtype, products, role
        return rows.redistribute(placements=(Shard(axis),))

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:
        return _gathered(gradient, *ctx.cast), None, None, None, None


def _gathered(rows: DTensor, dtype: torch.dtype, products: Any, role: Any) -> DTensor:
    """The float8 form of the whole of rows that are cut by tokens."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    cut: Any = hp_tensor_to_float8_dynamic(rows, dtype, products, gemm_input_role=role)
    part, group = cut.to_local(), rows.device_mesh.get_group()
    operators = torch.ops._c10d_functional  # their names are stable, those of their functions are not
    sent = _as_sent(part._data, rows.device_mesh.device_type).contiguous()
    found = operators.wait_tensor(operators.all_gather_into_tensor(sent, group.size(), group.group_name))
    if rows.placements != (Shard(0),):  # a concatenation of bytes: not every device knows one of float8
        found = torch.cat([piece.view(torch.uint8) for piece in found.chunk(group.size())], dim=1)
    whole = Float8TrainingTensor(found.view(dtype), part._scale, rows.dtype, products, gemm_input_role=role)
    return DTensor.from_local(whole, rows.device_mesh, (Replicate(),), run_check=False)


def _as_sent(data: Tensor, device_type: str) -> Tensor:
    """Float8 numbers as a device sends them: gloo knows bytes only, and Inductor fuses no gather of bytes."""
    return data if device_type == "cuda" else data.view(torch.uint8)


def _torchao_float8() -> ModuleType:
    """torchao.float8, imported only where float8 is asked for (3 s), without its notes to its own developers.

    On CPU machines it warns of C++ extensions that failed to load, and of a call it makes that torch will drop.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torchao")
        import torchao.float8

    return torchao.float8


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
