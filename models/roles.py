"""What the parameters of a model are for: embedding, head, norms, attention, feed-forward, routers."""

import re

from torch import nn

from models.interface import interface_of

IN_BLOCK = {"attention": "attn|attention", "mlp": "mlp|feed_?forward|ffn|ffw|dense|fc"}
"""Role -> pattern of the names, inside a block, of the modules that have it; the first match counts."""


def parameters_by_role(model: nn.Module) -> dict[str, tuple[nn.Parameter, ...]]:
    """Role -> its parameters, plain or sharded, each in one role only; no role is empty.

    What is tied to the embedding belongs to it. "other" is what the names of a model of transformers do not tell.
    """
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(_role(model, name), []).append(parameter)
    return {role: tuple(parameters) for role, parameters in found.items()}


def _role(model: nn.Module, name: str) -> str:
    interface = interface_of(model)
    owner = name.rpartition(".")[0]
    module = model.get_submodule(owner)
    if "norm" in type(module).__name__.lower():
        return "norms"
    if block := next((block for block in interface.blocks if owner.startswith(f"{block}.")), None):
        inside = owner.removeprefix(block).lower()
        return next((role for role, pattern in IN_BLOCK.items() if re.search(pattern, inside)), "other")
    if owner == interface.embedding or isinstance(module, nn.Embedding):  # of positions, too
        return "embedding"
    if interface.routers and owner.startswith(f"{interface.routers}."):
        return "routers"
    return "head" if owner == interface.head else "other"
