"""Tensor parallelism: what its graph looks like, and that no way to send activations changes a gradient."""

import itertools
import math
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, library, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention import rope_tables
from models.decoder import Decoder
from models.loss import EAGER, IGNORED, Kernels, SummedLoss, cross_entropy_sum
from models.sizes import SIZES
from parallel.config import CompileConfig, Float8Config, FSDPConfig, MeshConfig
from parallel.dist import start, stop
from parallel.errors import UserError
from parallel.fsdp import expect_micro_batch, units_of
from parallel.kernels import compile_blocks, compiled_loss_kernels
from parallel.order import to_float8
from parallel.tensor import VocabularyParallelLoss, cut_matrices
from tests.build import build_model
from tests.compiling import compiling_in_turn
from tests.processes import run_processes

pytestmark = pytest.mark.slow

MODEL = SIZES["smollm3_debug"]
TOKENS = 64
TENSORWISE = Float8Config(recipe="tensorwise", emulate=True)
GATHERED = Float8Config(recipe="tensorwise", emulate=True, gather_activations=True)
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor")
CHUNKS = (1, 3, 100)
"""Of the loss; the last are more than there are tokens."""
DTYPES = (torch.float32, torch.bfloat16)
ROWS = (1, 2)
"""Micro-batch sizes: torch writes the gather of a single row's tokens as another graph."""


def split_model(float8: Float8Config, *, overlapped: bool = False) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(MODEL).to(torch.bfloat16)
    to_float8(model, float8, device_type="cpu")
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    cut_matrices(model, axis, float8_gathers=float8.gather_activations, overlapped=overlapped)
    return model


def gradients_of_a_block(block: nn.Module, rows: int, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Name -> gradient, of every parameter (this process's part) and of the input."""
    part = tokens // dist.get_world_size()
    x = torch.randn(rows, tokens, MODEL.width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x = x.narrow(1, dist.get_rank() * part, part).contiguous().requires_grad_()
    block(x, *rope_tables(MODEL, torch.arange(tokens))).square().sum().backward()
    found = {name: parameter.grad for name, parameter in block.named_parameters()} | {"x": x.grad}
    block.zero_grad()
    return {name: g.to_local() if isinstance(g, DTensor) else g for name, g in found.items() if g is not None}


def run_graphs_without_generating_code(graphs: list[Counter[str]]) -> library.Library:
    """Let Inductor change every graph as for GPUs, and then run it operator by operator. Counts its operators.

    Returns what must be kept until the last graph has run.

    A CPU build of torch has no NCCL, and a CPU no symmetric memory, without which Inductor overlaps nothing, and its
    fused operators have an implementation (a gather, then a product) for shapes only.
    """
    import torch._inductor.compile_fx as inductor
    import torch.distributed._symmetric_memory as fused
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.output_code import OutputCode
    from torch._inductor.virtualized import V

    class Operators(OutputCode):
        def __init__(self, graph: torch.fx.GraphModule) -> None:
            self.graph, self._boxed_call = graph, True

        def __call__(self, inputs: Any) -> Any:
            return self.graph(*inputs)

        def post_compile(self, *_: Any) -> None: ...

        def set_triton_bundle(self, _: Any) -> None: ...

    def change_only(graph: torch.fx.GraphModule, inputs: Any, _: Any, **options: Any) -> Operators:
        inductor.view_to_reshape(graph)
        with V.set_fake_mode(inductor.fake_tensor_prop(graph, inputs)):
            post_grad_passes(graph, options["is_inference"])
        graph.recompile()
        graphs.append(Counter(node.target.__name__.partition(".")[0] for node in calls(graph)))
        return Operators(graph)

    inductor.fx_codegen_and_compile = change_only
    torch._inductor.config.fx_graph_cache = False
    dist.is_nccl_available = fused.is_symm_mem_enabled_for_group = lambda *_: True
    implementations = library.Library("symm_mem", "IMPL")
    for product in ("matmul", "scaled_matmul"):
        for name in (f"fused_all_gather_{product}", f"fused_{product}_reduce_scatter"):
            implementations.impl(name, getattr(fused, f"_{name}_fallback"), "CPU")
    return implementations


def calls(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def overlapped() -> dict[str, Any]:
    start("cpu", seed=0)
    graphs: list[Counter[str]] = []
    _implementations = run_graphs_without_generating_code(graphs)
    plain, compiled = split_model(Float8Config()), split_model(Float8Config(), overlapped=True)
    compile_blocks(compiled, CompileConfig(True), device_type="cuda", overlapped=dist.group.WORLD)
    differences = {}
    for rows in ROWS:
        torch._dynamo.reset()
        expected = gradients_of_a_block(plain.blocks[0], rows)
        found = gradients_of_a_block(compiled.blocks[0], rows)
        differences |= {(rows, n): ((found[n] - g).norm() / g.norm()).item() for n, g in expected.items()}
    seen = [dict(graph) for graph in graphs]
    torch._dynamo.reset()
    compile_blocks(plain, CompileConfig(True), device_type="cuda")
    longer = [len(gradients_of_a_block(plain.blocks[0], 1, tokens)) for tokens in (TOKENS, 2 * TOKENS)]
    torch._dynamo.reset()
    # As a version of torch that writes or looks for other graphs.
    nothing = patch("torch._inductor.fx_passes.post_grad.micro_pipeline_tp_pass", lambda graph: None)
    with nothing, pytest.raises(Exception, match="fuses none of the tensor-parallel") as refusal:
        gradients_of_a_block(compiled.blocks[0], 1)
    stop()
    return {"graphs": seen, "differences": differences, "longer": longer, "refusal": str(refusal.value)}


@pytest.fixture(scope="module")
def overlap() -> dict[str, Any]:
    [found, _] = run_processes(2, overlapped)
    return found


def test_overlap_fuses_the_messages_of_a_block_with_its_products(overlap: dict[str, Any]) -> None:
    assert len(overlap["graphs"]) == 2 * len(ROWS)
    for forward, backward in zip(overlap["graphs"][::2], overlap["graphs"][1::2], strict=True):
        assert forward["fused_all_gather_matmul"] == 2 and forward["fused_matmul_reduce_scatter"] == 2
        assert not any(name in forward for name in COLLECTIVES)
        assert backward["fused_all_gather_matmul"] == 2 and backward["fused_matmul_reduce_scatter"] == 2
        assert not any(name in backward for name in COLLECTIVES)


def test_overlap_changes_no_gradient_beyond_rounding(overlap: dict[str, Any]) -> None:
    assert len(overlap["differences"]) == len(ROWS) * 10
    assert max(overlap["differences"].values()) < 0.01


def test_a_single_row_of_another_length_is_compiled_too(overlap: dict[str, Any]) -> None:
    """torch 2.13 cannot, where the axis of the row is dropped, as it is for overlap."""
    assert overlap["longer"] == [10, 10]


def test_overlap_that_fuses_nothing_is_an_error(overlap: dict[str, Any]) -> None:
    assert "write overlap_tensor = false" in overlap["refusal"]


def overlapped_in_float8() -> dict[str, list[Counter[str]]]:
    """Of two ranks, one of which is fake: gloo sends no float8 numbers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    graphs: list[Counter[str]] = []
    _implementations = run_graphs_without_generating_code(graphs)
    found = {}
    with patch("parallel.float8._require_float8_units"), patch("parallel.float8._as_sent", lambda data, _: data):
        for name, gathers in (("plain", False), ("gathered", True)):
            torch._dynamo.reset()
            model = split_model(Float8Config(recipe="tensorwise", gather_activations=gathers), overlapped=True)
            compile_blocks(model, CompileConfig(True), device_type="cuda", overlapped=dist.group.WORLD)
            gradients_of_a_block(model.blocks[0], 2)
            found[name] = graphs[-2:]
    stop()
    return found


def test_overlap_fuses_gathers_of_float8_and_the_scatters_of_the_forward_pass() -> None:
    [found] = run_processes(1, overlapped_in_float8)
    for name, gathers in (("plain", 0), ("gathered", 2)):
        forward, backward = found[name]
        assert forward["fused_all_gather_scaled_matmul"] == backward["fused_all_gather_scaled_matmul"] == gathers
        assert forward["fused_scaled_matmul_reduce_scatter"] == 2
        assert backward["fused_scaled_matmul_reduce_scatter"] == 0


class LargestOfFloat32(TorchDispatchMode):
    """Remembers the largest number of float32 numbers in what an operator made."""

    largest = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operator(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.dtype == torch.float32:
            self.largest = max(self.largest, output.numel())
        return output


class Sent(TorchDispatchMode):
    """Counts the messages of a kind, by type."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind, self.types = kind, Counter[torch.dtype]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is self.kind:
            self.types[args[0].dtype] += 1
        return operator(*args, **(kwargs or {}))


def types_of_sums(micro_batches: int) -> set[torch.dtype]:
    start("cpu", seed=0)
    model, _ = build_model(MODEL, mesh=MeshConfig(tensor=2), fsdp=FSDPConfig(param_dtype="bfloat16"))
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    with Sent(torch.ops._c10d_functional.all_reduce.default) as sums:
        for number in range(micro_batches):
            expect_micro_batch(units_of(model), is_last=number == micro_batches - 1, reshards=True)
            model(tokens, tokens).backward()
    stop()
    return {*sums.types}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_of_norms_are_summed_in_float32(micro_batches: int) -> None:
    """Up to torch 2.14, FSDP adds up the first gradient of a step in the dtype in which it was computed."""
    rounds = torch.__version__ < "2.15" and micro_batches == 1
    expected = torch.bfloat16 if rounds else torch.float32
    assert run_processes(2, types_of_sums, micro_batches) == [{expected}] * 2


def loss_in_parts(chunks: int, dtype: torch.dtype, kernels: Kernels) -> dict[str, float]:
    """How far loss and gradient are from those of the whole vocabulary, and the largest float32 tensor on the way."""
    torch.manual_seed(2)
    whole = torch.randn(2, 20, 64).mul(8).to(dtype)
    targets = torch.randint(0, 64, (2, 20)).masked_fill(torch.rand(2, 20) < 0.2, IGNORED)
    part = whole.chunk(2, -1)[dist.get_rank()].clone().requires_grad_()
    loss = VocabularyParallelLoss(SummedLoss(chunks), dist.group.WORLD)
    loss.kernels = kernels
    # torch.compile leaves alone what runs under such a mode.
    with LargestOfFloat32() if kernels is EAGER else nullcontext() as seen:
        found = loss(part * 1, targets)
        (found * 0.5).backward()
    whole.requires_grad_()
    expected = cross_entropy_sum(whole, targets)
    (expected * 0.5).backward()
    gradient = whole.grad.chunk(2, -1)[dist.get_rank()]
    return {
        "loss": abs(found.item() / expected.item() - 1),
        "gradient": ((part.grad - gradient).norm() / gradient.norm()).item(),
        "float32": seen.largest if seen else 0,
    }


def without_compiling() -> dict[str, Any]:
    start("cpu", seed=0)
    plain, gathered = split_model(TENSORWISE), split_model(GATHERED)
    equal = {}
    for rows in ROWS:
        expected = gradients_of_a_block(plain.blocks[0], rows)
        with Sent(torch.ops._c10d_functional.all_gather_into_tensor.default) as gathers:
            found = gradients_of_a_block(gathered.blocks[0], rows)
        equal |= {f"{name}, {rows}": torch.equal(found[name], gradient) for name, gradient in expected.items()}
    kernels = {"eager": EAGER, "compiled": compiled_loss_kernels()}
    cases = itertools.product(CHUNKS, DTYPES, kernels)
    with compiling_in_turn():
        losses = {case: loss_in_parts(*case[:2], kernels[case[2]]) for case in cases}
    excluded = Float8Config(recipe="tensorwise", emulate=True, gather_activations=True, exclude=("q_proj",))
    with pytest.raises(UserError) as refusal:
        split_model(excluded)
    stop()
    return {"equal": equal, "gathers": dict(gathers.types), "losses": losses, "refusal": str(refusal.value)}


@pytest.fixture(scope="module")
def eager() -> list[dict[str, Any]]:
    return run_processes(2, without_compiling)


def test_activations_and_gradients_gathered_in_float8_change_no_bit_of_a_gradient(eager: list[dict[str, Any]]) -> None:
    for found in eager:
        assert len(found["equal"]) == len(ROWS) * 10
        assert not [name for name, same in found["equal"].items() if not same]
        assert found["gathers"] == {torch.uint8: 4}  # for attention and feed-forward, forward and backward


def test_activations_are_not_gathered_in_float8_for_only_some_linears(eager: list[dict[str, Any]]) -> None:
    assert "float8.exclude leaves 2 of 3; exclude all or none" in eager[0]["refusal"]


def test_the_loss_of_a_vocabulary_in_parts_is_that_of_the_whole(eager: list[dict[str, Any]]) -> None:
    for found in eager:
        for (_, dtype, _), error in found["losses"].items():
            assert error["loss"] < 1e-6 and error["gradient"] < (1e-6 if dtype == torch.float32 else 4e-3)


def test_the_loss_makes_float32_numbers_of_one_chunk_of_its_own_vocabulary_only(eager: list[dict[str, Any]]) -> None:
    for chunks in CHUNKS:
        one_number_a_token = 2 * 40  # denominators and targets' logits, of all chunks
        chunk = math.ceil(40 / chunks) * 64 // 2
        assert eager[0]["losses"][chunks, torch.bfloat16, "eager"]["float32"] <= max(chunk, one_number_a_token)


def test_overlap_is_refused_without_cuda() -> None:
    with pytest.raises(UserError, match="but the device is a cpu; write overlap_tensor = false"):
        compile_blocks(nn.Module(), CompileConfig(True), device_type="cpu", overlapped=dist.ProcessGroup(0, 2))
