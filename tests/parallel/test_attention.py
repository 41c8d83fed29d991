"""The kernels that attention may run on."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention import causal_attention
from parallel.attention import choose_attention
from parallel.config import AttentionConfig
from parallel.errors import UserError


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    yield
    choose_attention(AttentionConfig(), device_type="cpu")


class Operators(TorchDispatchMode):
    """Names of the operators called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def attend() -> tuple[torch.Tensor, bool]:
    """Attention of fixed inputs, and whether it ran on the flash kernel."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 16, 8, generator=generator, requires_grad=True)
    key, value = (torch.randn(2, 2, 16, 8, generator=generator, requires_grad=True) for _ in range(2))
    with Operators() as operators:
        out = causal_attention(query, key, value)
    return out, any("flash" in name for name in operators.names)


def test_the_kernel_asked_for_is_the_one_that_runs() -> None:
    found = {}
    for backend, flash in (("auto", True), ("math", False), ("flash", True)):
        report = choose_attention(AttentionConfig(backend), device_type="cpu")  # type: ignore[arg-type]
        assert report == ([] if backend == "auto" else [f"attention: {backend} kernels only"])
        found[backend], ran_flash = attend()
        assert ran_flash == flash, backend
    assert torch.equal(found["auto"], found["flash"])
    assert torch.allclose(found["math"], found["flash"], atol=1e-6)
    assert not torch.equal(found["math"], found["flash"])


@pytest.mark.filterwarnings("ignore:Flash attention kernel", "ignore:Both fused kernels")
def test_a_kernel_that_cannot_is_an_error() -> None:
    choose_attention(AttentionConfig("flash"), device_type="cpu")
    wide = torch.randn(1, 1, 4, 8, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="No available kernel"):
        scaled_dot_product_attention(wide, wide, wide, dropout_p=0.5)  # CPUs' flash kernel has no dropout


def test_kernels_of_other_devices_are_refused() -> None:
    with pytest.raises(UserError, match=r'attention.backend = "cudnn" needs a CUDA device; write "auto"'):
        choose_attention(AttentionConfig("cudnn"), device_type="cpu")
