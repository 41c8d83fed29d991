"""Attention within documents with the GPU kernels that take document lengths, compared with a mask."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention import attend
from models.decoder import Decoder
from models.documents import Documents, Lengths, Mask, of_chunk
from models.sizes import SIZES
from parallel.activation_checkpoint import checkpoint_blocks
from parallel.config import ActivationCheckpointingConfig, AttentionConfig
from parallel.errors import UserError
from parallel.kernels import choose_attention
from tests.models.test_documents import BATCH, END, documents_of, packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GPU = torch.device("cuda")
TOLERANCE = 2e-2  # relative norm, between different kernels in bfloat16


@pytest.fixture(params=["auto", "flash3"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """For documents: torch's own kernels, then those of FlashAttention 3 where it is installed."""
    try:
        choose_attention(AttentionConfig(request.param), device_type="cuda", masked=True)
    except UserError as error:
        pytest.skip(str(error))
    torch.backends.cuda.enable_math_sdp(True)  # for the mask
    yield
    choose_attention(AttentionConfig(), device_type="cuda")


def relative_norm(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def long_batch() -> Tensor:
    """(2, 1536): documents longer and shorter than the kernel's blocks, some of them across blocks."""
    return packed([700, 1, 515, 320], [1536])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("key_value_heads", [8, 2, 1])
def test_attention_by_lengths_equals_attention_with_a_mask(key_value_heads: int) -> None:
    for tokens in (packed(*BATCH), long_batch()):
        documents = documents_of(tokens).to(GPU)
        mask, lengths = documents.for_attention_in(torch.float32), documents.for_attention_in(torch.bfloat16)
        assert isinstance(mask, Mask) and isinstance(lengths, Lengths)
        torch.manual_seed(0)
        shapes = [(len(tokens), heads, tokens.shape[1], 64) for heads in (8, key_value_heads, key_value_heads, 8)]
        *inputs, gradient = (torch.randn(shape, device=GPU) for shape in shapes)
        results = []
        for inside, dtype in ((mask, torch.float32), (lengths, torch.bfloat16)):
            leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
            out = attend(*leaves, inside)
            assert out.shape == gradient.shape
            results.append((out, *torch.autograd.grad(out, leaves, gradient.to(dtype))))
        for expected, found in zip(*results, strict=True):
            assert relative_norm(found, expected) < TOLERANCE


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("key_value_heads", [8, 2])
def test_chunks_of_queries_attend_by_lengths_as_with_a_mask(key_value_heads: int) -> None:
    tokens = long_batch()
    documents = documents_of(tokens).to(GPU)
    whole = [documents.for_attention_in(dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert isinstance(whole[0], Mask) and isinstance(whole[1], Lengths)
    for first in range(0, 1536, 384):
        chunk = slice(first, first + 384)
        torch.manual_seed(0)
        sizes = [(8, 384), (key_value_heads, chunk.stop), (key_value_heads, chunk.stop), (8, 384)]
        *inputs, gradient = (torch.randn(2, heads, length, 64, device=GPU) for heads, length in sizes)
        results = []
        for inside, dtype in zip(whole, (torch.float32, torch.bfloat16), strict=True):
            leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
            out = attend(*leaves, of_chunk(inside, chunk, length=1536))
            results.append((out, *torch.autograd.grad(out, leaves, gradient.to(dtype))))
        for expected, found in zip(*results, strict=True):
            assert relative_norm(found, expected) < TOLERANCE


def model_of(config: Any, *, mode: Any = "none", compiled: bool = False) -> Decoder:
    torch.compiler.reset()
    model = Decoder(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.init_parameter(name, parameter, generator)
    model.to(GPU, torch.bfloat16)
    checkpoint_blocks(model, ActivationCheckpointingConfig(mode))
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
    return model


def results(model: Decoder, tokens: Tensor, documents: Documents) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    inputs = tokens.to(GPU)
    loss = model(inputs, inputs.roll(-1, 1), documents=documents.to(GPU))
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("size", ["smollm3_debug", "llama3_debug"])
@pytest.mark.parametrize(
    ("mode", "compiled"), [("none", False), ("full", False), ("selective", False), ("selective", True)]
)
def test_a_model_gives_the_same_loss_and_gradients_by_lengths_as_with_a_mask(
    size: str, mode: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(SIZES[size], vocabulary=END + 1, init_std=0.1)
    tokens = long_batch()
    documents = documents_of(tokens)
    loss, gradients = results(model_of(config, mode=mode, compiled=compiled), tokens, documents)
    mask = documents.to(GPU).for_attention_in(torch.float32)
    monkeypatch.setattr(Documents, "for_attention_in", lambda self, dtype: mask)
    expected_loss, expected_gradients = results(model_of(config), tokens, documents)
    assert relative_norm(loss, expected_loss) < 2e-3
    for found, expected in zip(gradients, expected_gradients, strict=True):
        assert relative_norm(found, expected) < 5 * TOLERANCE


def test_batches_with_other_documents_do_not_recompile() -> None:
    from torch._dynamo.utils import counters

    model = model_of(replace(SIZES["smollm3_debug"], vocabulary=END + 1), mode="selective", compiled=True)
    counters.clear()
    for step, rows in enumerate([[[512], [7, 505]], [[256, 256], [1, 1, 510]], [[64] * 8, [512]]]):
        tokens = packed(*rows)
        results(model, tokens, documents_of(tokens))
        assert counters["stats"]["unique_graphs"] == 2, step
