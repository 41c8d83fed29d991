"""A change to compiled graphs that lets Inductor fuse more messages with products, and a look at what it fused.

It fuses a gather with the products of its very output, and a scatter with the one product that it follows. In the
backward pass of linears that read the same activation a scatter follows the sum of their products, A1 @ B1 + A2 @ B2,
which is the product [A1 A2] @ [B1; B2].
"""

import operator
from typing import Any

import torch
from torch._inductor.virtualized import V
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from parallel.errors import UserError
from parallel.graphs import GraphPass, aten


class BringMessagesToProducts(GraphPass):
    """Runs before Inductor looks for what to fuse."""

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
