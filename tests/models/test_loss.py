"""The chunked loss compared with the loss at once: values, gradients, precision and memory."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from models.decoder import Decoder
from models.loss import EAGER, IGNORED, Kernels, cross_entropy_sum
from models.sizes import SIZES
from parallel.kernels import compiled_loss_kernels
from parallel.passes import backward

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TIED = replace(SIZES["smollm3_debug"], layers=2, vocabulary=112, init_std=0.2)


def batch(length: int = 13) -> tuple[Tensor, Tensor]:
    """Tokens and targets (3, length); some targets are ignored, among them all targets of one chunk."""
    tokens = torch.randint(0, 112, (3, length + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0] = targets[2, 4] = IGNORED
    return tokens[:, :-1], targets


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def logit_results(dtype: torch.dtype, chunks: int, kernels: Kernels = EAGER) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of a third of it with respect to the logits."""
    logits = (3 * torch.randn(3, 13, 112, generator=torch.Generator().manual_seed(2))).to(dtype).requires_grad_()
    loss = cross_entropy_sum(logits.clone(), batch()[1], chunks=chunks, kernels=kernels)
    (loss / 3).backward()
    assert logits.grad is not None and logits.grad.dtype == dtype
    return loss.detach(), logits.grad


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return compiled_loss_kernels() if request.param == "compiled" else EAGER


both = pytest.mark.parametrize("kernels", ["eager", "compiled"], indirect=True)
CHUNKS = (2, 3, 4, 39, 100)
"""Of 39 tokens: equal, unequal, single and empty ones."""


@both
def test_chunks_change_neither_loss_nor_gradient(kernels: Kernels) -> None:
    plain_loss, plain = logit_results(torch.float32, 1)
    for chunks in CHUNKS if kernels is EAGER else (1, *CHUNKS):
        loss, gradient = logit_results(torch.float32, chunks, kernels)
        assert relative(loss, plain_loss) < 1e-6
        assert relative(gradient, plain) < 1e-6
        assert not gradient[0].any() and not gradient[2, 4].any()  # ignored targets


@both
def test_the_gradient_of_bfloat16_logits_is_rounded_only_once(kernels: Kernels) -> None:
    _, exact = logit_results(torch.bfloat16, 1)
    _, gradient = logit_results(torch.bfloat16, 4, kernels)
    different = gradient != exact  # where the last float32 bit decides the rounding
    assert different.float().mean() < 1e-3
    torch.testing.assert_close(gradient, exact, rtol=2**-7, atol=0)


@both
def test_the_loss_without_any_target_is_zero(kernels: Kernels) -> None:
    logits = torch.randn(2, 5, 11, requires_grad=True)
    loss = cross_entropy_sum(logits.clone(), torch.full((2, 5), IGNORED), chunks=3, kernels=kernels)
    loss.backward()
    assert loss == 0 and not logits.grad.any()


@both
def test_a_second_backward_pass_is_refused(kernels: Kernels) -> None:
    logits = torch.randn(2, 5, 11, requires_grad=True)
    loss = cross_entropy_sum(logits.clone(), torch.zeros(2, 5, dtype=torch.int64), chunks=3, kernels=kernels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@both
def test_without_gradients_the_logits_are_not_overwritten(kernels: Kernels) -> None:
    logits, (_, targets) = torch.randn(3, 13, 112), batch()
    before = logits.clone()
    with torch.no_grad():
        loss = cross_entropy_sum(logits, targets, chunks=4, kernels=kernels)
    assert not loss.requires_grad and torch.equal(logits, before)
    torch.testing.assert_close(loss, cross_entropy_sum(logits, targets))


@both
def test_a_loss_that_is_nan_makes_every_gradient_nan_where_the_trainer_asks_for_it(kernels: Kernels) -> None:
    logits = torch.randn(2, 5, 11)
    logits[1, 2, 3] = torch.nan
    logits.requires_grad_()
    loss = cross_entropy_sum(logits.clone(), torch.zeros(2, 5, dtype=torch.int64), chunks=3, kernels=kernels)
    backward(loss)
    assert loss.isnan() and logits.grad.isnan().all()


@both
def test_logits_may_be_some_columns_of_a_wider_tensor(kernels: Kernels) -> None:
    wide, (_, targets) = torch.randn(3, 13, 128, requires_grad=True), batch()
    [found] = torch.autograd.grad(cross_entropy_sum(wide[..., :112], targets, chunks=4, kernels=kernels), wide)
    [expected] = torch.autograd.grad(cross_entropy_sum(wide[..., :112], targets), wide)
    assert relative(found, expected) < 1e-6


def test_chunks_of_all_sizes_share_one_compilation() -> None:
    torch._dynamo.reset()
    graphs = CompileCounter()
    kernels = compiled_loss_kernels(backend=graphs)
    for tokens, chunks in ((39, 1), (39, 4), (40, 4), (12, 5), (200, 3)):
        logits = torch.randn(1, tokens, 112, requires_grad=True)
        targets = torch.zeros(1, tokens, dtype=torch.int64)
        cross_entropy_sum(logits.clone(), targets, chunks=chunks, kernels=kernels).backward()
        with torch.no_grad():
            cross_entropy_sum(logits, targets, chunks=chunks, kernels=kernels)
    torch._dynamo.reset()
    assert graphs.frame_count == 2  # forward, backward


# Memory


def saved_bytes(chunks: int) -> int:
    """Bytes of tensors as large as the logits that are kept for the backward pass, each storage counted once."""
    model = Decoder(TIED, loss_chunks=chunks).bfloat16()
    x, y = batch()
    logits, storages = x.numel() * 112, {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == logits:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x, y)
    return sum(storages.values())


def test_the_backward_pass_keeps_only_the_logits() -> None:
    size = batch()[0].numel() * 112
    assert saved_bytes(chunks=1) == 4 * size  # float32 log softmax
    assert saved_bytes(chunks=4) == 2 * size


PEAK = """
import torch
from models.loss import EAGER, cross_entropy_sum
from parallel.kernels import compiled_loss_kernels

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

def step(tokens, chunks, kernels=EAGER):
    logits = torch.ones(1, tokens, 16384, dtype=torch.bfloat16, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.zeros(1, tokens, dtype=torch.int64), chunks=chunks, kernels=kernels)
    torch.autograd.grad(loss, logits)

compiled = compiled_loss_kernels()
for case in ((8, compiled), (1, compiled), (8, EAGER), (1, EAGER)):
    step(16, *case)
    open("/proc/self/clear_refs", "w").write("5")  # from here on, the peak is that of what follows
    before = peak()
    step(2048, *case)
    print((peak() - before) / (2048 * 16384))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_lower_with_chunks_and_lowest_compiled() -> None:
    """In bytes per logit: 2 for the logit, and 8 for two float32 copies of a chunk. Without chunks, three copies.
    Compiled there are none, whatever the chunks."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory returns to the system
    printed = subprocess.check_output([sys.executable, "-c", PEAK], cwd=ROOT, env=environment)
    compiled, compiled_at_once, chunked, plain = map(float, printed.split())
    assert plain > 12
    assert chunked < 2 + 8 / 8 + 0.5
    assert max(compiled, compiled_at_once) < 2 + 0.2
