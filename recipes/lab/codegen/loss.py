"""Bytes that the loss moves on an H100, from logits to their gradient. Call machine.pretend_h100() first."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.loss import EAGER, Kernels, cross_entropy_sum
from parallel.kernels import UNTIMED, compiled_loss_kernels
from recipes.lab.codegen.count import assemble, read_code
from recipes.lab.codegen.machine import PROPERTIES
from recipes.lab.codegen.trace import GPU, generate
from recipes.recipe.schema import Recipe

SPARSE = ("gather", "index", "index_put_", "nll_loss_forward")
"""Operators that touch a few elements of each row."""


@dataclass(frozen=True)
class Compiled:
    """What a recipe's compiled loss launches."""

    bytes: int
    """Bytes moved by the kernels of all chunks, and by eager operators between them on a few numbers per token."""
    kernels: int
    """Kernels of one chunk, forward and backward."""
    verdicts: dict[str, str]
    """Kernel -> why it cannot be assembled for sm_90, or ""; empty where nobody asked."""


def compiled_loss(recipe: Recipe, *, with_ptxas: bool) -> Compiled:
    """The loss as the recipe runs it with compile.enabled, in its chunks."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        logits = _inputs(recipe, torch.device("cpu"))[0].flatten(0, 1)
        chunk = logits.tensor_split(recipe.batch.loss_chunks)[0]  # (C, V)
        codes = _code_for(chunk)
    found = [read_code(code) for code in codes]
    of_chunk = sum(sum(code.moved.values()) for code in found)
    free = Kernels(lambda rows: (torch.empty(len(rows), device=GPU),) * 2, lambda *_: None)
    verdicts = {name: error for code in codes if with_ptxas for name, error in assemble(code).items()}
    launches = sum(sum(code.calls.values()) for code in found)
    moved = of_chunk * len(logits) // len(chunk) + _traffic(recipe, free)
    return Compiled(moved, launches, verdicts)


def _code_for(chunk: Tensor) -> list[str]:
    """What Inductor writes for the kernels of a chunk (C, V)."""
    codes: list[str] = []

    def keep_code(module: GraphModule, examples: list[Any], **options: Any) -> Any:
        codes.append(generate(deepcopy(module), **options))

        def run_on_cpu(arguments: list[Any]) -> Any:
            return module.forward(*arguments)

        run_on_cpu._boxed_call = True  # type: ignore[attr-defined]
        return run_on_cpu

    torch._dynamo.reset()
    kernels = compiled_loss_kernels(backend=partial(compile_fx, inner_compile=keep_code))
    with torch._inductor.config.patch(UNTIMED):
        largest, sums = kernels.sum_exponentials(chunk)
        kernels.overwrite_by_exponentials(chunk, largest, sums)
    return codes


def eager_bytes(recipe: Recipe) -> int:
    """What the loss moves without compile.enabled, in the recipe's chunks, one kernel for each operator."""
    return _traffic(recipe, EAGER)


def _traffic(recipe: Recipe, kernels: Kernels) -> int:
    with FakeTensorMode(), _Traffic() as traffic:
        inputs = _inputs(recipe, GPU)
        node: Any = cross_entropy_sum(*inputs, chunks=recipe.batch.loss_chunks, kernels=kernels).grad_fn
        gradient = torch.empty((), device=GPU)
        # Autograd refuses to run on the pretended GPU, so its nodes are called here, one after the other.
        while node.next_functions:
            with torch.no_grad():
                found = node.apply(gradient) if hasattr(node, "apply") else node(gradient)
            gradient, node = (found[0] if isinstance(found, tuple) else found), node.next_functions[0][0]
    return traffic.bytes


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
