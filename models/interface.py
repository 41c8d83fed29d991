"""What parallel/ may know of a model: the names of its repeated blocks, its embedding and its head.

A model says so in its `interface`; everything else about it stays its own business. Names are fully qualified and
hold before and after parallelization. Imports no torch.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class BlockInterface:
    """The parts of repeated blocks, by name inside them: what tensor and context parallelism cut, and how.

    Blocks may differ: inside_of() leaves out what one does not have.
    """

    norms: tuple[str, ...]
    """Norms of the residual stream, and what else each process has whole and computes its own tokens with."""
    parts: tuple[str, ...]
    """What reads a norm's output and adds to the residual stream: attention and feed-forward."""
    inner_attention: str | None
    """The module without parameters in which tokens see each other; None where it is not a module of its own."""
    column: tuple[str, ...]
    """Linears whose outputs (heads, feed-forward features) are independent of each other."""
    row: tuple[str, ...]
    """Linears that sum over what the column linears produce."""
    whole_parts: tuple[str, ...] = ()
    """Parts that look at all features between their column and row linears, for which these must be gathered."""
    inner_norms: tuple[str, ...] = ()
    """Norms inside parts, of what column linears produce: of each head by itself, or, in whole parts, of all."""
    experts: str | None = None
    """What holds routed experts, one after the other along the first axis of its parameters."""
    exchange: str | None = None
    """The module without parameters that brings rows of tokens to these experts and back."""
    post_norms: tuple[str, ...] = ()
    """Norms of what parts return, before it is added to the residual stream."""
    feature_norms: tuple[str, ...] = ()
    """Norms inside parts over all features that a column linear produces, by whose mean square they divide, and other
    modules whose weight is cut as these features are: sinks of heads."""
    shared: tuple[str, ...] = ()
    """Modules without parameters, inside parts, that pass on what all heads read."""
    whole_rows: bool = False
    """Whether what is between the embedding and the first block must see all tokens of a row."""


@dataclass(frozen=True)
class ModelInterface:
    """The parts of a model that are parallelized, by fully qualified name."""

    stacks: tuple[tuple[str, ...], ...]
    """The repeated blocks of each stack (one for a decoder; encoder, decoder), in the order of the forward pass."""
    embedding: str | None
    """The token embedding; None in a part of a model that neither begins it nor ends it with a tied head."""
    head: str | None
    """The output projection; None where it is tied to the embedding, and in a part that does not end the model."""
    head_norm: str | None
    """The norm before the output projection: where the last part of the forward pass begins; None where unknown, and in
    a part that does not end the model."""
    tied_head: str | None
    """The module that projects with the embedding's weight; None where there is a head, and in a part without one."""
    loss: str
    """The module without parameters that takes logits and targets, or None, and returns the summed loss."""
    inside_block: BlockInterface | None
    """None where tensor and context parallelism cannot cut the blocks."""
    skips_uneven: bool = False
    """Whether float8 leaves out linears of widths that it cannot take; else the recipe is to change such widths."""
    draws_random: bool = False
    """Whether the blocks draw random numbers: dropout."""
    layers: tuple[int, ...] = ()
    """Indexes of the blocks in the whole model, where this is a part of one; () = all of them."""
    all_layers: int = 0
    """Number of blocks of that whole model."""
    routers: str | None = None
    """What chooses experts, in float32 and outside the blocks; None where all blocks are dense."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The repeated blocks of all stacks."""
        return tuple(name for stack in self.stacks for name in stack)

    @property
    def block_at(self) -> dict[int, str]:
        """Index in the whole model -> the name of a block that is here."""
        return dict(zip(self.layers or range(len(self.blocks)), self.blocks, strict=True))


def interface_of(model: "nn.Module") -> ModelInterface:
    """The interface that the model declares."""
    return cast(ModelInterface, model.interface)


def require_interface(model: "nn.Module") -> None:
    """Raise ValueError, with all that is wrong, unless a model, or the part that a process has, keeps its promises."""
    interface = getattr(model, "interface", None)
    if not isinstance(interface, ModelInterface):
        raise ValueError(f"{type(model).__name__} declares no interface (models/interface.py)")
    single = interface.embedding, interface.head, interface.head_norm, interface.tied_head, interface.routers
    missing = [name for name in (*interface.blocks, interface.loss, *single) if name and not has_part(model, name)]
    if not missing and (inside := interface.inside_block):
        missing = [
            f"parts of {name}" for name in interface.blocks if not inside_of(model.get_submodule(name), inside).parts
        ]
    if missing:
        raise ValueError(f"its interface names what {type(model).__name__} lacks: {', '.join(missing)}")


def blocks_of(model: "nn.Module") -> "list[nn.Module]":
    """The repeated blocks, or what wraps them by now, in the order of the forward pass."""
    return [model.get_submodule(name) for name in interface_of(model).blocks]


def has_part(block: "nn.Module", name: str | None) -> bool:
    """Whether the block has a module of this name."""
    try:
        return name is not None and block.get_submodule(name) is not None
    except AttributeError:
        return False


def inside_of(block: "nn.Module", inside: BlockInterface) -> BlockInterface:
    """What this block has of the parts, their linears and norms."""
    column, row, norms = (
        tuple(name for name in names if has_part(block, name))
        for names in (inside.column, inside.row, inside.inner_norms)
    )
    parts = tuple(part for part in inside.parts if any(name.rpartition(".")[0] == part for name in row))
    return replace(inside, column=column, row=row, inner_norms=norms, parts=parts)
