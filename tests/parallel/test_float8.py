"""What parallel/ adds to torchao's linears: flat inputs, and changes to their compiled graphs."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import inductor_prims
from torch._inductor.compile_fx import compile_fx
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from models.interface import ModelInterface
from parallel import float8
from parallel.config import Float8Config
from parallel.float8 import convert_linears
from parallel.graphs import WriteOperandsOnce, graph_passes

pytestmark = pytest.mark.slow

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Two(nn.Module):
    """Two linears that read one tensor, which is computed from the input."""

    interface = ModelInterface((), "", None, None, None, "", None)

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(64, 32, bias=False)
        self.wide = nn.Linear(64, 48, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.sin(x) * x
        return self.narrow(x), self.wide(x)


def two(seed: int = 0) -> Two:
    torch.manual_seed(seed)
    return Two().to(torch.bfloat16)


def results(model: nn.Module, call: Callable[..., Any], *, shape: tuple[int, ...] = (2, 32, 64)) -> list[Tensor]:
    """Outputs and gradients of one step."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
    narrow, wide = call(x)
    (narrow.float().square().sum() + wide.float().sum()).backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(isinstance(gradient, Tensor) for gradient in gradients)
    return [narrow, wide, *gradients]  # type: ignore[list-item]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(2, 32, 64), (32, 64), (2, 2, 16, 64), (64,)])
def test_a_linear_of_any_shape_computes_what_torchao_does(recipe: Any, shape: tuple[int, ...]) -> None:
    plain = two()
    ours, torchaos = deepcopy(plain), deepcopy(plain)
    convert_linears(ours, Float8Config(recipe=recipe, emulate=True), device_type="cpu")
    convert_to_float8_training(torchaos, config=replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True))
    found, expected = results(ours, ours, shape=shape), results(torchaos, torchaos, shape=shape)
    assert equal(found, expected) and found[0].shape == (*shape[:-1], 32)
    assert not equal(found, results(plain, plain, shape=shape))


def test_compiled_linears_look_for_the_largest_magnitude_of_each_operand_once() -> None:
    found: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any, **options: Any) -> torch.fx.GraphModule:
        found.append(len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.max.default)))
        return graph

    model = two()
    convert_linears(model, Float8Config(recipe="tensorwise", emulate=True), device_type="cpu")
    with torch._inductor.config.patch(graph_passes()):
        results(model, torch.compile(model, fullgraph=True, backend=partial(compile_fx, inner_compile=count)))
    assert found == [3, 2]  # of the input and two weights; of two gradients


class Counting(WriteOperandsOnce):
    """Counts what it changes."""

    written = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        self.written += len(graph.find_nodes(op="call_function", target=inductor_prims.force_stride_order))

    def uuid(self) -> None:
        """A graph from Inductor's cache would not be counted."""


def compared(model: nn.Module) -> tuple[Any, Any, int]:
    """What a compiled model computes with our passes and without them, and how many operands they write."""
    counting = Counting()
    options = graph_passes() | {"post_grad_custom_post_pass": counting}
    # Else compiled code rounds to bfloat16 where it writes, and its numbers depend on what is fused. torch 2.11 and
    # 2.12 do not do that on CPUs, so the numbers are compared with code without our passes, not with eager operators.
    with torch._inductor.config.patch(emulate_precision_casts=True):
        without = results(model, torch.compile(model, fullgraph=True))
        model.zero_grad()
        torch._dynamo.reset()
        return results(model, torch.compile(model, fullgraph=True, options=options)), without, counting.written


def test_compiled_products_of_a_shared_operand_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With real float8 products, which a CPU has, too."""
    monkeypatch.setattr(float8, "_require_float8_units", lambda *_: None)
    model = two()
    convert_linears(model, Float8Config(recipe="tensorwise"), device_type="cuda")
    computed, expected, written = compared(model)
    assert equal(computed, expected)
    assert written == 2  # the input for the outputs, and its transposed form for the gradients of both weights


class Waves(Two):
    """Two linears whose outputs are computed with, so that each computes the gradient of its output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        narrow, wide = super().forward(x)
        return torch.sin(narrow), torch.sin(wide)


def test_compiled_row_wise_scales_and_gradients_are_written_once_and_change_no_bit() -> None:
    torch.manual_seed(0)
    model = Waves().to(torch.bfloat16)
    convert_linears(model, Float8Config(recipe="rowwise", emulate=True), device_type="cpu")
    computed, expected, written = compared(model)
    if torch.__version__ >= "2.13":  # before, what is written is rounded on CPUs, and what is not written is not
        assert equal(computed, expected)
    # Forward: scales of the input and two weights. Backward: of the input, and for each linear of the weight, of the
    # gradient by rows and by columns, and that gradient itself.
    assert written == 3 + 1 + 2 * 4


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiled_linears_change_no_bit_where_lengths_change(recipe: Any) -> None:
    """torch compiles for any length once it has seen two."""
    torch.manual_seed(0)
    model = Waves().to(torch.bfloat16)
    convert_linears(model, Float8Config(recipe=recipe, emulate=True), device_type="cpu")
    with torch._inductor.config.patch(emulate_precision_casts=True):
        expected = results(model, torch.compile(model, fullgraph=True, dynamic=True))
        model.zero_grad()
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=True, options=graph_passes())
        computed = results(model, compiled)
    if torch.__version__ >= "2.13":  # as above
        assert equal(computed, expected)
