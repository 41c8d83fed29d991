"""The bytes that a block keeps, against the counts of the code that torch.compile generates."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._inductor.compile_fx import compile_fx

from models.activations import Kept, Widths, saved_per_token
from models.decoder import Decoder
from models.sizes import SIZES
from parallel.activation_checkpoint import checkpoint_blocks
from parallel.config import ActivationCheckpointingConfig
from parallel.graphs import graph_passes
from tests.generated_code import rows_of_generated_code

ROWS = [
    (row["block"].partition(",")[0], row["float8"], row["recompute"], row["saved kB"], row["weights kB"])
    for row in rows_of_generated_code()
]


def test_the_file_has_rows_of_several_models() -> None:
    assert len({row[0] for row in ROWS}) >= 4 and len(ROWS) >= 48


@pytest.mark.parametrize(("model", "float8", "mode", "saved", "weights"), sorted({*ROWS}))
def test_a_block_keeps_what_its_generated_code_keeps(
    model: str, float8: str, mode: str, saved: str, weights: str
) -> None:
    kept = Kept(mode=mode, float8=float8 != "none")  # type: ignore[arg-type]
    assert f"{saved_per_token(Widths.of(SIZES[model]), kept) / 1e3:.2f}" == saved
    assert weights == "0", "recipes/plan/memory.py counts no weights that are kept beside the gathered ones"


TOKENS = 64


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("name", ["llama3_debug", "qwen3_debug", "gemma3_debug"])
def test_a_compiled_block_keeps_what_the_plan_counts(name: str, mode: Any) -> None:
    """With the torch that is installed, to the byte: results of operators, and the block's input."""
    config, kept = replace(SIZES[name], layers=1, window=0), list[int]()
    model = Decoder(config).bfloat16()
    checkpoint_blocks(model, ActivationCheckpointingConfig(mode=mode))

    def note(graph: torch.fx.GraphModule, _: Any, **options: Any) -> torch.fx.GraphModule:
        [outputs] = graph.graph.output_node().args
        values = [(node.op, node.meta["val"]) for node in outputs[1:]] if not options.get("is_backward") else []
        whole = 1, TOKENS, config.width
        kept.extend(value.nbytes for op, value in values if op != "placeholder" or value.shape == whole)
        return graph

    torch._dynamo.reset()
    with torch._inductor.config.patch(graph_passes()):
        model.blocks[0].compile(fullgraph=True, backend=partial(compile_fx, inner_compile=note))
        tokens = torch.arange(TOKENS)[None]
        model(tokens, tokens).backward()
    assert sum(kept) / TOKENS == saved_per_token(Widths.of(config), Kept(mode=mode))
