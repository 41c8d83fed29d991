"""What we assume of a model of transformers, checked on its modules.

Each function yields or returns a sentence for people about what breaks the assumption.
"""

import re
from collections.abc import Iterator

from torch import nn

from models.interface import ModelInterface

EXPERTS = re.compile("MoE|Moe|Expert|Router")
"""A module whose class has one of these in its name belongs to a mixture of experts."""


def broken(model: nn.Module, interface: ModelInterface, *, dropout: bool) -> Iterator[str]:
    """What keeps this model, the child of a TransformersModel, from being trained."""
    kind = type(model).__name__
    if expert := next(
        (type(module).__name__ for module in model.modules() if EXPERTS.search(type(module).__name__)), ""
    ):
        native = 'our own decoder has those of model_type "qwen3_moe" and "dots1"'
        yield f"{kind} is a mixture of experts ({expert}); transformers' are not supported, but {native}"
    if getattr(model, "_is_stateful", False):
        yield f"{kind} keeps a recurrent state; only models of attention are supported"
    blocks = tuple(f"{block}." for block in interface.blocks)
    for group in shared_parameters(model):
        if inside := [name for name in group if f"model.{name}".startswith(blocks)]:
            other = next(name for name in group if name != inside[0])
            yield f"{kind} uses {inside[0]} also as {other}; blocks that share weights are not supported"
            break
    found = dropouts(model)
    if not dropout and found:
        yield f"{kind} has dropout in {', '.join(found)}, which no key of its config.json turns off"
    if dropout and not found:
        yield "dropout = true, but config.json asks for no dropout; write false"
    if dropout and (layers := [key for key, value in vars(model.config).items() if "layerdrop" in key and value]):
        yield f"dropout = true: {layers[0]} leaves out blocks, others on each process; write dropout = false"


def require_sound_recomputation(model: nn.Module) -> None:
    """Raises ValueError for a model whose compiled blocks must not be computed again on a CPU.

    torch 2.13's compiled attention with a bias that learns (T5) then writes beyond its memory, also without parallel/:
    most runs end with "corrupted size vs. prev_size" or a segmentation fault.
    """
    if any(name.endswith("relative_attention_bias") for name, _ in model.named_modules()):
        raise ValueError(
            "compiled attention with a bias that learns corrupts memory where a CPU computes it again; write"
            ' compile.enabled = false, or activation_checkpointing.mode = "none"'
        )


def dropouts(model: nn.Module) -> list[str]:
    """The names of all modules that drop something."""
    found = []
    for name, module in model.named_modules():
        rates = [module.p] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        rates += [value for key, value in vars(module).items() if "drop" in key and isinstance(value, float | int)]
        if any(rates):
            found.append(name)
    return found


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]
