"""What we assume of a model of transformers, checked on its modules; and that it sees only what it may, no later token
and no other document, which is tried, not read.

Configs have many switches for that (is_causal, use_bidirectional_attention, kinds of layers), and a model that sees
later tokens trains without a complaint: its loss falls below that of any language model.

Each function yields or returns a sentence for people about what breaks the assumption. T tokens, V vocabulary.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from models.documents import Documents
from models.encoder_decoder import EncoderDecoderInputs
from models.initial_values import units_of
from models.interface import ModelInterface

EXPERTS = re.compile("MoE|Moe|Expert|Router")
"""A module whose class has one of these in its name belongs to a mixture of experts."""
COUNTS = re.compile(".*layer_?(id|ind|num)")
"""Names of attributes that tell which layer of the model a module is in."""
DOCUMENT = 4
"""Tokens of each of the two documents of the trial."""
RANK = 16
"""Of linears: with 1, a norm behind them would leave nothing but a sign."""


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


def why_it_sees_too_much(twin: Any, *, vocabulary: int, documents: bool) -> str | None:
    """Why a model, TransformersModel on the meta device, which this changes, must not be trained; None if it may.

    Two texts that differ in one token go through it, with the first block of each kind and all that is outside of the
    blocks. Raises ValueError if they cannot, or if the token moves nothing at all.
    """
    kind = type(twin.model).__name__
    _make_small(twin)
    twin.eval()  # without dropout
    text = 1 + torch.arange(2 * DOCUMENT)[None] % (vocabulary - 1)  # (1, T)
    whole = [None, Documents.from_starts(torch.arange(2 * DOCUMENT)[None] % DOCUMENT == 0)][: 1 + documents]
    for packed in whole:
        # The last token of its document, which is the one that a convolution carries into the next.
        changed_at = 2 * DOCUMENT - 1 if packed is None else DOCUMENT - 1
        other = text.clone()
        other[0, changed_at] = 0
        one, two = (_outputs(twin, tokens, packed) for tokens in (text, other))  # (T, V)
        moved = (one - two).abs().amax(-1) > 1e-4 * one.abs().max()  # (T,)
        if not (one.isfinite().all() and moved[changed_at]):
            raise ValueError(f"{kind} was tried on a short text, and its last token changed nothing that it computes")
        if packed is None and moved[:-1].any():
            return (
                f"{kind} lets tokens see later ones: another last token changes what it computes for those before. A"
                " language model must not; correct its config.json (is_causal, is_decoder, use_bidirectional_attention)"
            )
        if packed is not None and moved[DOCUMENT:].any():
            return f"{kind} lets documents packed into one row see each other; write data.document_mask = false"
    return None


@torch.no_grad()
def _outputs(twin: nn.Module, tokens: Tensor, packed: Documents | None) -> Tensor:
    """What the model computes of each token, (T, V)."""
    inputs: Any = tokens
    if cast(Any, twin).config.is_encoder_decoder:
        prompt = torch.ones_like(tokens)
        inputs = EncoderDecoderInputs(prompt, prompt.bool(), tokens)
    try:
        return cast(Tensor, twin(inputs, documents=packed)[0])
    except Exception as error:  # a class of transformers, in which anything may go wrong
        kind, text = type(cast(Any, twin).model).__name__, " ".join(str(error).split())[:200]
        raise ValueError(f"{kind} cannot be tried on a short text: {type(error).__name__}: {text}") from error


def _make_small(twin: Any) -> None:
    """Give the model values that take no memory, in the first block of each kind; the others pass on what they get."""
    kinds: dict[tuple[Any, ...], list[Any]] = {}  # kind -> what its first block has returned
    for block in map(twin.get_submodule, twin.interface.blocks):
        if (kind := tuple(_kind_of(block))) in kinds:
            inside = block.named_children(), block.named_parameters(recurse=False), block.named_buffers(recurse=False)
            for name in [name for table in inside for name, _ in table]:
                delattr(block, name)
            vars(block)["forward"] = partial(_passed_on, kinds[kind])
        else:
            returned = kinds[kind] = list[Any]()
            block.register_forward_hook(lambda *call, returned=returned: returned.append(call[-1]))
    for module in twin.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.zeros_like(buffer, device="cpu")
    with torch.no_grad():  # parameters are on the meta device still, where drawing takes no time
        for _, unit in units_of(twin.model, twin.interface):
            for module, owner in unit.in_order:
                if "forward" not in vars(module):  # a block that passes on has nothing left to draw
                    cast(Any, owner)._init_weights(module)
    random = torch.Generator().manual_seed(0)
    for module in twin.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_values_like(parameter, random), requires_grad=False)
        if isinstance(module, nn.Linear):  # or each product would copy the weight into memory
            sizes = (module.in_features, RANK), (RANK, module.out_features)
            vars(module)["forward"] = partial(_of_low_rank, *(torch.randn(size, generator=random) for size in sizes))


def _values_like(parameter: Tensor, random: torch.Generator) -> Tensor:
    """Random values of this shape: each diagonal of a matrix is one number, so that it takes a row and a column."""
    shape = parameter.shape
    values = torch.randn(1 + sum(size - 1 for size in shape), generator=random)
    spread = values / (shape[-1] ** 0.5 if len(shape) > 1 else 10) + (len(shape) == 1)
    return spread.as_strided(shape, (1,) * len(shape))


def _of_low_rank(down: Tensor, up: Tensor, inputs: Tensor) -> Tensor:
    """Stands for a product with a weight (in, out) of low rank, which takes no time."""
    return (inputs @ down / len(down) ** 0.5) @ up / len(up) ** 0.5  # (..., in) -> (..., RANK) -> (..., out)


def _kind_of(block: nn.Module) -> Iterator[Any]:
    """What distinguishes blocks: their classes, and numbers and words in them but for those that count layers."""
    for name, module in block.named_modules():
        said = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        yield name, type(module), *sorted((key, value) for key, value in said.items() if not COUNTS.match(key))


def _passed_on(returned: list[Any], *arguments: Any, **named: Any) -> Any:
    """Stands for a block: what it gets, in the form in which the last block of its kind returned it."""
    hidden = (arguments or (named.get("hidden_states"),))[0]
    return hidden if isinstance(returned[-1], Tensor) else (hidden, *returned[-1][1:])
