"""What the changes to compiled graphs keep for the backward pass; test_float8.py has those for float8."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint

from parallel.graphs import graph_passes

pytestmark = pytest.mark.slow


class Residual(nn.Module):
    """A linear that adds to the residual stream, and a norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16, bias=False), nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x)
        return x + self.norm(x)


def kept(passes: dict[str, Any], *, recompute: bool = False) -> list[str]:
    """The operators whose results, as large as the input, the forward pass keeps for the backward pass."""
    found: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any, **options: Any) -> torch.fx.GraphModule:
        [outputs] = graph.graph.output_node().args
        if not options.get("is_backward"):
            large = [node for node in outputs[1:] if node.op != "placeholder" and node.meta["val"].numel() == 8 * 16]
            found.extend(node.target.__name__ for node in large)
        return graph

    model = Residual()
    call = partial(checkpoint, model, use_reentrant=False) if recompute else model
    torch._dynamo.reset()
    with torch._inductor.config.patch(passes):
        compiled = torch.compile(call, fullgraph=True, backend=partial(compile_fx, inner_compile=note))
        compiled(torch.randn(8, 16, requires_grad=True)).sum().backward()
    return found


def test_the_sum_is_kept_instead_of_the_product_that_was_added() -> None:
    assert kept({}) == ["mm.default"]
    assert kept(graph_passes()) == ["add.Tensor"]


def test_checkpointing_recomputes_the_sum_with_the_product() -> None:
    assert kept(graph_passes(), recompute=True) == []


def test_passes_of_different_models_are_equal_so_that_these_share_code() -> None:
    assert graph_passes() == graph_passes()
