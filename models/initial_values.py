"""Initial values of models of transformers, drawn by their own _init_weights()."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from models.interface import ModelInterface

PREFIX = "model."
"""Prefix of our names, before transformers' own."""


def drawn_by_units(
    twin: nn.Module, interface: ModelInterface, *, seed: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """(transformers' name, values on the device) of each parameter and buffer of a plain model on the meta device.

    Drawn unit by unit, because some modules scale what is in others (GPT-2's attention its projection): a block, or
    all that is outside of blocks, seeded by its name. So values do not depend on the mesh, and one unit is whole in
    memory at a time. Raises ValueError where a unit reaches into another.
    """
    for name, unit in units_of(twin, interface):
        allocate(unit.modules, device)
        others = [tensor for tensor in twin.parameters() if tensor.is_meta]
        versions = [tensor._version for tensor in others]
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type):
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            for module, owner in unit.in_order:
                cast(Any, owner)._init_weights(module)
        if versions != [tensor._version for tensor in others]:
            raise ValueError(f"initial values of {name or 'the model'} reach into other blocks, which are not there")
        for local, tensor in _tensors_of(unit.modules, twin):
            yield local, tensor.detach()
        allocate(unit.modules, torch.device("meta"))


class Unit(NamedTuple):
    modules: list[nn.Module]
    in_order: list[tuple[nn.Module, nn.Module]]
    """Each module with the model whose _init_weights() it is for; children first."""


def units_of(model: nn.Module, interface: ModelInterface) -> Iterator[tuple[str, Unit]]:
    """(name, unit) of every block of a plain model, and "" with all that is outside of them."""
    blocks = {model.get_submodule(name.removeprefix(PREFIX)): name for name in interface.blocks}
    owners: dict[nn.Module, nn.Module] = {}

    def below(module: nn.Module, owner: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            child_owner = child if hasattr(child, "_init_weights") else owner
            if child in blocks:
                owners[child] = child_owner
            else:
                yield from below(child, child_owner)
        owners[module] = owner
        yield module

    outside = list(dict.fromkeys(below(model, model)))
    yield "", Unit(outside, [(module, owners[module]) for module in outside])
    for block, name in blocks.items():
        inside = list(reversed(list(block.modules())))
        yield name, Unit(inside, [(module, owners[block]) for module in inside])


def allocate(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Give the modules' tensors memory there, full of NaN or the smallest integer; what they share stays shared."""
    moved: dict[Tensor, Tensor] = {}
    for module in modules:
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if tensor not in moved:
                    there = torch.empty_like(tensor, device=device)
                    moved[tensor] = nn.Parameter(there) if isinstance(tensor, nn.Parameter) else there
                    if not there.is_meta:
                        there.fill_(_unfilled(there))
                table[name] = moved[tensor]  # type: ignore[assignment]


def _unfilled(tensor: Tensor) -> float | int | bool:
    if tensor.is_floating_point():
        return float("nan")
    return False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min


def require_filled(name: str, tensor: Tensor) -> None:
    empty = tensor.isnan() if tensor.is_floating_point() else tensor == _unfilled(tensor)
    if tensor.dtype != torch.bool and empty.any():
        raise ValueError(f"transformers gives {name} no initial values (_init_weights)")


def _tensors_of(modules: Iterable[nn.Module], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in the model, tensor) of the modules' own parameters and buffers."""
    names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    for module in modules:
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        yield from ((names[module] + local, tensor) for local, tensor in own)
