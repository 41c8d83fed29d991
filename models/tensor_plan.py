"""Where tensor parallelism cuts a model of transformers: read from the plan that its configuration class has.

The plan names linears. How they can be cut depends on what the block computes between them, so only families that were
compared with one process are cut. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from models.interface import BlockInterface, ModelInterface

if TYPE_CHECKING:
    from torch import nn

FAMILIES = (
    *("arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm"),
    *("glm4", "gpt_neox", "granite", "helium", "hyperclovax", "jais2", "llama", "ministral", "ministral3", "mistral"),
    *("nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2"),
)
"""Each `model_type` that tests/parallel/test_tensor_plan.py compares: the loss, and each gradient by its name."""

COLUMN = {"colwise": False, "colwise_gather_output": True}
ROW = {"rowwise": False, "rowwise_split_input": True}
"""Style in the plan -> whether the part of the block computes with all features."""


def name_of(settings: Mapping[str, Any]) -> str:
    """The name of the class in a config.json, or of the family."""
    return str((settings.get("architectures") or [settings.get("model_type", "this model")])[0])


def why_not_cut(settings: Mapping[str, Any]) -> str | None:
    """Why tensor parallelism cannot cut the model of this config.json; None if it can."""
    name = name_of(settings)
    if settings.get("model_type") not in FAMILIES:
        return f"{name} has no tp_plan of transformers that was compared with one process (docs/parallelism.md)"
    for key in ("clip_qkv", "use_qk_norm"):  # changes an output in place; has a weight for each head
        if settings.get(key):
            return f"{name} cannot be cut with {key} = {settings[key]} in its config.json"
    return None


def with_plan(
    interface: ModelInterface, model: "nn.Module", *, settings: Mapping[str, Any], plan: Mapping[str, str]
) -> ModelInterface:
    """The interface with what tensor parallelism must know of the whole model, if it can be cut. settings: its
    config.json. plan: `base_model_tp_plan` of its configuration class."""
    if why_not_cut(settings):
        return interface
    inside = _inside(model.get_submodule(interface.blocks[0]), plan)
    ends = {interface.embedding, interface.head, interface.tied_head}
    others = [
        name
        for name, module in model.named_modules()
        if _has_weights(module) and name not in ends and not _is_in(interface.blocks, name)
    ]
    return replace(interface, inside_block=inside, head_norm=others[0] if others else None)


def _inside(block: "nn.Module", plan: Mapping[str, str]) -> BlockInterface | None:
    """How to cut a block; None for a plan that was not compared: it leaves linears out, or cuts them differently."""
    styles = {pattern.partition(".*.")[2]: style for pattern, style in plan.items()}
    names = [name for name, module in block.named_modules() if _has_weights(module)]
    column = tuple(name for name in names if styles.get(name) in COLUMN)
    row = tuple(name for name in names if styles.get(name) in ROW)
    norms = [name for name in names if name not in column + row]
    parts = tuple(dict.fromkeys(name.rpartition(".")[0] for name in row))
    of_norms = [one for name in norms for one in block.get_submodule(name).parameters(recurse=False)]
    if not all(_is_in(parts, name) for name in column) or any(one.dim() > 1 for one in of_norms):
        return None
    whole = {name.rpartition(".")[0] for name in column + row if (COLUMN | ROW)[styles[name]]}
    return BlockInterface(
        norms=tuple(name for name in norms if not _is_in(parts, name)),
        parts=parts,
        inner_attention=None,
        column=column,
        row=row,
        whole_parts=tuple(part for part in parts if part in whole),
        inner_norms=tuple(name for name in norms if _is_in(parts, name)),
        whole_rows=True,  # positions and masks take their shape from the embedding's output
    )


def _has_weights(module: "nn.Module") -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _is_in(modules: tuple[str, ...], name: str) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)
