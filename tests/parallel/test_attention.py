"""The choice of attention kernels."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention import causal_attention
from parallel.config import AttentionConfig
from parallel.errors import UserError
from parallel.kernels import choose_attention


@pytest.fixture(autouse=True)
def all_kernels_allowed_again() -> Iterator[None]:
    yield
    choose_attention(AttentionConfig(), device_type="cpu")


class Operators(TorchDispatchMode):
    """Records the names of the operators called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def attend(backend: str) -> tuple[torch.Tensor, bool]:
    """Attention of fixed inputs with this backend, and whether it ran on the flash kernel."""
    choose_attention(AttentionConfig(backend), device_type="cpu")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 16, 8, generator=generator, requires_grad=True)
    key, value = (torch.randn(2, 2, 16, 8, generator=generator, requires_grad=True) for _ in range(2))
    with Operators() as operators:
        out = causal_attention(query, key, value)
    return out, any("flash" in name for name in operators.names)


@pytest.mark.parametrize(("backend", "flash"), [("auto", True), ("math", False), ("flash", True)])
def test_attention_runs_on_the_chosen_kernel(backend: str, flash: bool) -> None:
    _, ran_flash = attend(backend)
    assert ran_flash == flash


@pytest.mark.parametrize(
    ("backend", "lines"),
    [("auto", []), ("math", ["attention: math kernels only"]), ("flash", ["attention: flash kernels only"])],
)
def test_the_log_names_a_backend_that_is_not_the_default(backend: str, lines: list[str]) -> None:
    assert choose_attention(AttentionConfig(backend), device_type="cpu") == lines  # type: ignore[arg-type]


def test_kernels_give_nearly_equal_but_not_identical_results() -> None:
    auto, math, flash = (attend(backend)[0] for backend in ("auto", "math", "flash"))
    assert torch.equal(auto, flash)
    assert torch.allclose(math, flash, atol=1e-6)
    assert not torch.equal(math, flash)


@pytest.mark.filterwarnings("ignore:Flash attention kernel", "ignore:Both fused kernels")
def test_a_kernel_that_does_not_support_the_call_raises_instead_of_another_running() -> None:
    choose_attention(AttentionConfig("flash"), device_type="cpu")
    wide = torch.randn(1, 1, 4, 8, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="No available kernel"):
        scaled_dot_product_attention(wide, wide, wide, dropout_p=0.5)  # the CPU's flash kernel has no dropout


def test_a_kernel_that_the_device_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match=r'attention.backend = "cudnn" needs a CUDA device; write "auto"'):
        choose_attention(AttentionConfig("cudnn"), device_type="cpu")
