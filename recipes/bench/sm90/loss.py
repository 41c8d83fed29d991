"""Bytes that the loss moves on an H100, from logits to their gradient. Call machine.pretend_h100() first."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.loss import cross_entropy_sum
from recipes.bench.sm90.count import read_code
from recipes.bench.sm90.machine import PROPERTIES
from recipes.bench.sm90.trace import GPU, trace
from recipes.schema import Recipe

SPARSE = ("gather", "scatter_", "nll_loss_forward")
"""Operators that touch a few elements of each row."""


def eager_bytes(recipe: Recipe) -> int:
    """What the loss moves as the recipe runs it, in its chunks, one kernel for each operator."""
    with FakeTensorMode(), _Traffic() as traffic:
        node: Any = cross_entropy_sum(*_inputs(recipe, GPU), chunks=recipe.batch.loss_chunks).grad_fn
        gradient = torch.empty((), device=GPU)
        # Autograd refuses to run on the pretended GPU, so its nodes are called here, one after the other.
        while node.next_functions:
            with torch.no_grad():
                found = node.apply(gradient) if hasattr(node, "apply") else node(gradient)
            gradient, node = (found[0] if isinstance(found, tuple) else found), node.next_functions[0][0]
    return traffic.bytes


def compiled_bytes(recipe: Recipe) -> int:
    """What it would move if torch.compile had the whole loss, without chunks."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        passes = trace(cross_entropy_sum, *_inputs(recipe, torch.device("cpu")), attention="auto")
    return sum(sum(read_code(graph.code).moved.values()) for graph in passes)


def _inputs(recipe: Recipe, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = recipe.batch.micro_batch_size, recipe.batch.sequence_length
    dtype = getattr(torch, recipe.fsdp.param_dtype)
    logits = torch.empty(*shape, recipe.model.vocabulary, dtype=dtype, device=device, requires_grad=True)
    return logits, torch.empty(shape, dtype=torch.int64, device=device)


class _Traffic(TorchDispatchMode):
    """Adds up what each operator reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = operator(*arguments, **options)
        name = operator.overloadpacket.__name__
        if operator.is_view or name in ("empty", "detach") or not isinstance(result, Tensor | tuple | list):
            return result
        if name in SPARSE:
            self.bytes += 2 * min(_size(tensor) for tensor in tree_leaves(arguments) if isinstance(tensor, Tensor))
            return result
        given = [value for name, value in options.items() if name != "out"]
        reads = sum(map(_size, tree_leaves([arguments, given])))
        if "softmax" in name and "backward" not in name:
            row = arguments[0].shape[-1] * arguments[0].element_size()
            # torch's kernel reads a row for its maximum, its sum and its result, unless shared memory can hold it.
            reads *= 1 if row < PROPERTIES.shared_memory_per_block else 3
        if name == "nll_loss_backward":  # reads only at the targets
            reads = 0
        self.bytes += reads + sum(map(_size, tree_leaves(result)))
        return result


def _size(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
