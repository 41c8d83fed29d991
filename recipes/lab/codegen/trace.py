"""The graphs and the generated code of one block of a recipe, for an H100. Call machine.pretend_h100() first.

torch.compile traces on the CPU, because a build without CUDA cannot run autograd on CUDA tensors. Each graph then moves
to the pretended GPU, and Inductor writes its kernels.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import models.attention
from models.decoder import Decoder
from models.documents import SMALLEST_LENGTHS, Lengths
from models.interface import blocks_of
from parallel.activation_checkpoint import checkpoint_blocks
from parallel.float8 import convert_linears
from parallel.graphs import graph_passes
from recipes.recipe.schema import Recipe

GPU = torch.device("cuda:0")
SETTINGS: dict[str, Any] = {
    "force_disable_caches": True,
    "compile_threads": 1,
    "profile_bandwidth": True,  # writes into each kernel how many bytes it moves
    "triton.autotune_at_compile_time": False,
}


@dataclass(frozen=True)
class Graph:
    """One pass through a block."""

    module: GraphModule
    """The graph that autograd and the partitioner made, on the CPU."""
    inputs: dict[str, str]
    """Inputs of the forward pass: name of the node -> "parameter", "activation", or "shared" (by all layers)."""
    code: str
    """What Inductor generated for sm_90."""


@dataclass(frozen=True)
class Traced:
    """Both passes of a block, and the number of tokens in them."""

    forward: Graph
    backward: Graph
    tokens: int


def trace_block(recipe: Recipe) -> Traced:
    """The first block of the recipe's model, which has rotary embeddings, on one micro-batch."""
    model = replace(recipe.model, layers=1)
    batch, length = recipe.batch.micro_batch_size, recipe.batch.sequence_length
    with FakeTensorMode(allow_non_fake_inputs=True):
        built = Decoder(model)
        dtype = getattr(torch, recipe.fsdp.param_dtype)
        for module in built.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, dtype=dtype)))
        if recipe.float8.recipe != "none":
            convert_linears(built, recipe.float8, device_type="cuda")
        _gather_float8_weights(built, dtype)
        checkpoint_blocks(built, replace(recipe.activation_checkpointing, blocks="all"))
        [block] = blocks_of(built)
        masked = recipe.data.document_mask
        x = torch.empty(batch, length, model.width, dtype=dtype, requires_grad=True)  # (B, T, D)
        positions = (batch, length) if masked else (length,)
        cos, sin = (torch.empty(*positions, model.head_width // 2) for _ in range(2))
        documents = Lengths(torch.empty(SMALLEST_LENGTHS + 1, dtype=torch.int32)) if masked else None
        attention = "auto" if masked else recipe.attention.backend
        forward, backward = trace(block, x, cos, sin, None, documents, attention=attention, options=graph_passes())
    return Traced(forward, backward, batch * length)


def _gather_float8_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace weights that FSDP gathers in float8 by what their linear then sees: float8 numbers and their scale."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if hasattr(weight, "fsdp_post_all_gather"):
            gathered = (torch.empty(weight.shape, dtype=torch.float8_e4m3fn),)
            module.weight = nn.Parameter(weight.fsdp_post_all_gather(gathered, (torch.empty(()),), dtype)[0])


def trace(call: Any, *inputs: Any, attention: str, options: dict[str, Any] | None = None) -> tuple[Graph, Graph]:
    """Forward and backward graph of a function or module of fake CPU tensors, compiled in one piece with options."""
    graphs: list[Graph] = []
    kinds: list[str] = []

    def kind(example: Any) -> str:
        if isinstance(example, nn.Parameter):
            return "parameter"
        return "activation" if isinstance(example, Tensor) and example.requires_grad else "shared"

    def backend(module: GraphModule, examples: list[Any]) -> Any:
        for example in examples:  # autograd's graph takes apart what wraps several tensors
            parts = len(example.__tensor_flatten__()[0]) if is_traceable_wrapper_subclass(example) else 1
            kinds.extend([kind(example)] * parts)
        return compile_fx(module, examples, inner_compile=inner, config_patches=options)

    def inner(module: GraphModule, examples: list[Any], **options: Any) -> Any:
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        inputs = dict(zip(names, kinds, strict=False)) if not graphs else {}
        graphs.append(Graph(deepcopy(module), inputs, generate(deepcopy(module), **options)))

        def run_on_cpu(arguments: list[Any]) -> Any:
            return module.forward(*arguments)

        run_on_cpu._boxed_call = True  # type: ignore[attr-defined]
        return run_on_cpu

    torch._dynamo.reset()
    with (
        mock.patch.object(models.attention, "scaled_dot_product_attention", ATTENTION[attention]),
        mock.patch.object(torch.nn.functional, "rms_norm", _rms_norm),
    ):
        torch.compile(call, fullgraph=True, backend=backend)(*inputs).sum().backward()
    forward, backward = graphs
    return forward, backward


def generate(module: GraphModule, **options: Any) -> str:
    """The Python module that Inductor writes for this graph on the GPU, without compiling its kernels."""
    _move(module)
    examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    written = []

    def keep_code(lowering: GraphLowering) -> Any:
        wrapper, _ = lowering.codegen()
        written.append(wrapper.value)
        return mock.MagicMock()

    with (
        mock.patch.object(GraphLowering, "compile_to_module", keep_code),
        torch._inductor.config.patch(SETTINGS),
        torch.no_grad(),
    ):
        compile_fx_inner(module, examples, **options)
    [code] = written
    return code


def _move(module: GraphModule) -> None:
    """Put a graph on the pretended GPU, in place. Inductor infers the shapes of what it computes from its inputs."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return GPU
        if not isinstance(value, Tensor):
            return value
        with value.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=GPU)

    for node in module.graph.nodes:
        node.args, node.kwargs = (torch.fx.node.map_aggregate(part, moved) for part in (node.args, node.kwargs))
        if node.op == "placeholder":
            node.meta["val"] = moved(node.meta["val"])
        elif node.op == "get_attr":
            raise NotImplementedError(f"{node.target}: a constant tensor in the graph")
        elif _makes_tensor(node):
            node.kwargs = {**node.kwargs, "device": GPU}
    module.recompile()


def _makes_tensor(node: Node) -> bool:
    """Whether the node makes a tensor from no other, on the default device."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", [])
    return any(argument.name == "device" for argument in arguments) and not node.all_input_nodes


def _cudnn(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, True, False)[0]


def _flash(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False)[0]


class _RMSNorm(torch.autograd.Function):
    """What rms_norm computes on CUDA: there its backward pass is an operator of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scales = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, eps)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        both = torch.ops.aten._fused_rms_norm_backward(gradient, x, x.shape[-1:], scales, weight, [True, True])
        return *both, None


def _rms_norm(x: Tensor, _: Any, weight: Tensor, eps: float) -> Tensor:
    return _RMSNorm.apply(x, weight, eps)


# What scaled_dot_product_attention calls on an H100, where torch chooses cuDNN for bfloat16.
ATTENTION = {"cudnn": _cudnn, "flash": _flash, "flash3": _flash, "auto": _cudnn}
