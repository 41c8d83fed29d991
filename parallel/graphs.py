"""Changes to the graph of a compiled block: what is kept for the backward pass, and float8 operands written once."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
VIEWS = (aten.permute.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default)
OF_SCALES = (
    *(*VIEWS, aten.abs.default, aten.max.default, aten.amax.default, aten.clamp_min.default),
    *(aten.reciprocal.default, aten.mul.Tensor, torch.ops.prims.convert_element_type.default),
)
"""Operators with which torchao computes the scale of an operand in float8."""
PRODUCTS = (aten.mm.default, aten._scaled_mm.default)


def graph_passes() -> dict[str, Any]:
    """Options of torch.compile."""
    return {"joint_custom_post_pass": ChooseWhatIsKept(), "post_grad_custom_post_pass": WriteOperandsOnce()}


class GraphPass(CustomGraphPass):
    """A change to the graph of a compiled block, or a look at it."""

    def uuid(self) -> Any:
        """Part of the key of Inductor's cache."""
        return get_hash_for_files((inspect.getfile(type(self)),))


@dataclass(frozen=True)  # all are equal, so that models compiled with them can share code
class ChooseWhatIsKept(GraphPass):
    """Runs before the graph is cut into a forward and a backward pass."""

    def __call__(self, graph: Graph) -> None:
        """Mark what must or must not be kept; torch minimizes the bytes of everything else."""
        _merge_scales(graph)
        _keep_sums(graph)
        _recompute_copies_of_weights(graph)


@dataclass(frozen=True)
class WriteOperandsOnce(GraphPass):
    """Runs last. Inductor computes what is cheap, such as a cast or a scale, anew wherever it is read."""

    def __call__(self, graph: Graph) -> None:
        """Ask for a layout of what is to be computed once, for which Inductor must write it."""
        for node in list(graph.nodes):
            strides = value.stride() if isinstance(value := node.meta.get("val"), Tensor) else (None,)
            if node.op != "call_function" or node.target in VIEWS or not all(isinstance(one, int) for one in strides):
                continue  # also numbers, and tensors whose length changes
            readers = _readers(node)
            products = sum(reader.target is aten._scaled_mm.default for reader in readers)
            # Scales of row-wise casts, rounded to powers of two, take a division in float64 and a logarithm.
            is_scale = node.target is aten.exp2.default
            if (_is_float8(node) and products > 1) or is_scale or _is_measured_twice(readers):
                with graph.inserting_after(node):
                    written = graph.call_function(inductor_prims.force_stride_order, (node, strides))
                written.meta.update(node.meta)
                node.replace_all_uses_with(written, delete_user_cb=lambda user, written=written: user is not written)


def _is_measured_twice(readers: list[Node]) -> bool:
    """Whether the largest magnitudes along both axes are read: casts by rows and by columns read the tensor itself too.

    Inductor would compute it in each of four kernels, for the gradient of SwiGLU from three other tensors.
    """
    magnitudes = [one for reader in readers if reader.target is aten.abs.default for one in _readers(reader)]
    return len({str(one.args[1:]) for one in magnitudes if one.target is aten.amax.default}) > 1


def _keep_sums(graph: Graph) -> None:
    """Keep x + product, such as the residual stream, instead of the product.

    Either is as large. But kernels of the norm after it, forward and backward, then read one tensor instead of two.
    """
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        products = [_behind_views(summand) for summand in node.all_input_nodes]
        # A product with another mark is recomputed itself: checkpointing.
        free = (None, CheckpointPolicy.MUST_SAVE)
        if any(product.target in PRODUCTS and product.meta.get("recompute") in free for product in products):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _merge_scales(graph: Graph) -> None:
    """Read an operand once for its largest magnitude: both passes need its scale for their casts to float8.

    From torch 2.14, min_cut_rematerialization_partition() keeps apart what the forward pass alone uses.
    """
    first: dict[Any, Node] = {}
    for node in graph.nodes:
        if node.target in OF_SCALES and not any(user.op == "output" for user in node.users):
            kept = first.setdefault((node.target, repr(node.args)), node)
            if kept is not node:
                node.replace_all_uses_with(kept)


def _recompute_copies_of_weights(graph: Graph) -> None:
    """Compute in the backward pass what is made of float8 inputs alone: only weights arrive in float8.

    The backward product of a linear wants its weight transposed. That copy would be kept from the forward pass: torch
    2.13 takes weights that were gathered as float8, a tensor and its scale each, for activations, which are as
    expensive to keep as their copies. FSDP frees the weight itself, but not what was made of it.
    """
    of_weights: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and _is_float8(node):
            of_weights.add(node)
        elif node.all_input_nodes and of_weights.issuperset(node.all_input_nodes):
            of_weights.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _is_float8(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _behind_views(node: Node) -> Node:
    """What the node is a view of; itself, if it is no view."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node


def _readers(node: Node) -> list[Node]:
    """What reads the node, itself or by views."""
    return [reader for user in node.users for reader in (_readers(user) if user.target in VIEWS else [user])]
