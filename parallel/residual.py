"""Which tensor a compiled block keeps where attention adds to the residual stream: the sum, not what is added."""

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy


class KeepSums(CustomGraphPass):
    """Runs on the graph of both passes, before torch chooses what the forward pass keeps.

    Left alone, torch keeps the product that is added, because no fused kernel can skip writing it, and the backward
    pass computes the sum again. The sum is as large, so keeping it instead costs no memory. Then fewer tensors are
    read, and the backward pass of the second norm reads nothing that the first one reads: else Inductor joins the two
    sums for the norms' weights in one kernel, and then computes the gradient of the first norm's input in one of its
    own, which reads everything again.
    """

    def __call__(self, graph: Graph) -> None:
        """Mark each sum of the block's input and something that is kept, or may be."""
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            stream, term = node.args
            if _is_input(stream) and _may_be_kept(term, like=stream):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> Any:
        """Part of the key of Inductor's cache."""
        return get_hash_for_files((__file__,))


def _is_input(node: Any) -> bool:
    """Whether it enters the forward pass; what enters the backward pass is called a tangent."""
    return isinstance(node, Node) and node.op == "placeholder" and not node.name.startswith("tangents")


def _may_be_kept(term: Any, *, like: Node) -> bool:
    """Whether it is an activation of this shape that activation checkpointing does not have computed again."""
    if not isinstance(term, Node) or term.meta["val"].shape != like.meta["val"].shape:
        return False
    while isinstance(term.target, torch._ops.OpOverload) and term.target.is_view:
        term = term.all_input_nodes[0]
    return term.meta.get("recompute") in (None, CheckpointPolicy.MUST_SAVE)
