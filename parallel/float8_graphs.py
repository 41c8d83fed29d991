"""Changes to compiled graphs with float8: each operand is written once, and copies of weights are not kept."""

from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
VIEWS = (aten.permute.default, aten.view.default, aten.reshape.default)


class RecomputeWeightCopies(CustomGraphPass):
    """Runs before the graph is cut into a forward and a backward pass.

    The backward product of a linear wants its weight transposed. Copied from a weight that was gathered as float8, it
    would be kept from the forward pass: torch 2.13 takes such weights, each a tensor and its scale, for activations,
    which are as expensive to keep as their copies. FSDP frees the weight itself, but not what was made of it.
    """

    def __call__(self, graph: Graph) -> None:
        """Compute in the backward pass whatever is made of float8 inputs alone; only weights arrive in float8."""
        of_weights: set[Node] = set()
        for node in graph.nodes:
            if node.op == "placeholder" and _is_float8(node):
                of_weights.add(node)
            elif node.all_input_nodes and of_weights.issuperset(node.all_input_nodes):
                of_weights.add(node)
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self) -> Any:
        """Part of the key of Inductor's cache."""
        return get_hash_for_files((__file__,))


class WriteOperandsOnce(CustomGraphPass):
    """Runs last. Inductor computes a cheap operand, such as a cast, anew for every product that reads it."""

    def __call__(self, graph: Graph) -> None:
        """Ask for a layout of every float8 operand that several products read, for which Inductor must write it."""
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target in VIEWS or not _is_float8(node):
                continue
            if sum(reader.target is aten._scaled_mm.default for reader in _readers(node)) > 1:
                with graph.inserting_after(node):
                    written = graph.call_function(inductor_prims.force_stride_order, (node, node.meta["val"].stride()))
                written.meta.update(node.meta)
                node.replace_all_uses_with(written, delete_user_cb=lambda user, written=written: user is not written)

    def uuid(self) -> Any:
        """Part of the key of Inductor's cache."""
        return get_hash_for_files((__file__,))


def _is_float8(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _readers(node: Node) -> list[Node]:
    """What reads the node, itself or by views."""
    return [reader for user in node.users for reader in (_readers(user) if user.target in VIEWS else [user])]
