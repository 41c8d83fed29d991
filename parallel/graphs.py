"""Changes to the graph of a compiled block: what is kept for the backward pass, float8 operands written once, and more
messages that Inductor fuses with products."""

import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from parallel.errors import UserError

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


class BringMessagesToProducts(GraphPass):
    """Runs before Inductor looks for what to fuse.

    It fuses a gather with the products of its very output, and a scatter with the one product that it follows. In the
    backward pass of linears that read the same activation a scatter follows the sum of their products,
    A1 @ B1 + A2 @ B2, which is the product [A1 A2] @ [B1; B2].
    """

    def __call__(self, graph: Graph) -> None:
        """Undo views of views, and replace before every scatter a sum of products by one product."""
        for view in graph.find_nodes(op="call_function", target=aten.reshape.default):
            inner = view.args[0]
            if inner.target is aten.reshape.default and inner.args[0].meta["val"].shape == view.meta["val"].shape:
                view.replace_all_uses_with(inner.args[0])
        for scatter in graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.reduce_scatter_tensor.default
        ):
            whole = _before_cutting(scatter.args[0])
            products = _summed_products(whole)
            if len(products) < 2:
                continue
            result = whole.meta["val"]
            sizes = {(product.meta["val"].shape[-1], product.meta["val"].numel()) for product in products}
            if sizes == {(result.shape[-1], result.numel())}:  # else the sum repeats one of them
                with graph.inserting_before(whole):
                    whole.replace_all_uses_with(_joined(graph, products, result.shape))
        graph.eliminate_dead_code()


class RequireFusedMessages(GraphPass):
    """Runs after Inductor has fused. It does nothing where it recognizes no message, as in other versions of torch."""

    def __call__(self, graph: Graph) -> None:
        """Raise UserError for the graph of a forward pass that sends messages, but none during a product.

        In every precision, the two scatters of a block's forward pass follow one product each.
        """
        names = [node.target.__name__ for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        sends = any(name.startswith(("all_gather_into_tensor", "reduce_scatter_tensor")) for name in names)
        fused = any(name.startswith("fused_") for name in names)
        backward = any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))
        if sends and not fused and not backward:
            raise UserError(
                f"mesh.overlap_tensor: torch {torch.__version__} fuses none of the tensor-parallel messages of a block"
                " with products; write overlap_tensor = false"
            )


def _before_cutting(node: Any) -> Node:
    """What a scatter scatters, before its parts are put one behind the other."""
    while node.target in (aten.cat.default, aten.slice.Tensor, aten.split.Tensor) or node.target is operator.getitem:
        source = node.args[0]
        node = source[0] if isinstance(source, (list, tuple)) else source
    return node


def _summed_products(node: Any) -> list[Node]:
    """The matrix products that add up to this node; empty if something else is added too, or read elsewhere."""
    if node.target is aten.mm.default:
        return [node]
    if node.target is aten.reshape.default:
        parts = node.args[:1]
    elif node.target is aten.add.Tensor and not node.kwargs:
        parts = node.args
    else:
        return []
    found = [_summed_products(part) if isinstance(part, Node) and len(part.users) == 1 else [] for part in parts]
    return [product for products in found for product in products] if all(found) else []


def _joined(graph: Graph, products: list[Node], shape: torch.Size) -> Node:
    """The sum of these products as one product, of this shape; written as torch writes the product of a linear."""

    def call(target: Any, *arguments: Any) -> Node:
        node = graph.call_function(target, arguments)
        with V.fake_mode:
            node.meta["val"] = target(*tree_map_only(Node, lambda one: one.meta["val"], arguments))
        return node

    left = call(aten.cat.default, [product.args[0] for product in products], 1)
    right = call(aten.cat.default, [product.args[1] for product in products], 0)
    if len(shape) == 2:
        return call(aten.mm.default, left, right)
    width = left.meta["val"].shape[1]
    rows = call(aten.reshape.default, left, [*shape[:-1], width])
    flat = call(aten.reshape.default, rows, [-1, width])
    return call(aten.reshape.default, call(aten.mm.default, flat, right), list(shape))
