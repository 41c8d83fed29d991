"""The choice of attention kernels."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention import attend as attention_of
from models.sizes import SIZES
from parallel.config import AttentionConfig
from parallel.errors import UserError
from parallel.kernels import choose_attention, kernel_of_auto, without_plans


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
        out = attention_of(query, key, value)
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


def test_cudnn_is_not_taken_for_rows_of_several_lengths() -> None:
    for masked in (True, False):
        choose_attention(AttentionConfig(), device_type="cuda", masked=masked)
        assert torch.backends.cuda.cudnn_sdp_enabled() != masked


def test_kernels_give_nearly_equal_but_not_identical_results() -> None:
    auto, math, flash = (attend(backend)[0] for backend in ("auto", "math", "flash"))
    assert torch.equal(auto, flash)
    assert torch.allclose(math, flash, atol=1e-6)
    assert not torch.equal(math, flash)


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_kernels_of_16_bits_are_refused_in_float32_on_a_device_found_to_be_a_gpu(backend: Any) -> None:
    with pytest.raises(UserError, match=r'write fsdp\.param_dtype = "bfloat16", or backend = "auto"'):
        choose_attention(AttentionConfig(backend), device_type="cuda", dtype=torch.float32)
    choose_attention(AttentionConfig(backend), device_type="cuda", dtype=torch.bfloat16)


def test_the_log_names_the_kernel_that_torch_chooses_and_warns_of_one_that_writes_all_scores() -> None:
    """By a CPU's choice, which is flash for all heads. What an H100 chooses, the null GPU shows."""
    model = SIZES["smollm3_3b"]
    how = {"tokens": (2, 8192), "device": torch.device("cpu")}
    assert kernel_of_auto(model, dtype=torch.float32, masked=False, **how) == (
        "flash",
        "attention: flash kernels, as torch chooses",
    )
    choose_attention(AttentionConfig("math"), device_type="cpu")
    kernel, scores = kernel_of_auto(model, dtype=torch.float32, masked=False, **how)
    assert kernel == "math"
    assert "WARNING: torch has only math kernels for float32 and these heads" in scores
    assert f"{2 * 16 * 8192**2 * 4 / 1e9:.3g} GB in each block" in scores


@pytest.mark.filterwarnings("ignore:Flash attention kernel", "ignore:Both fused kernels")
def test_a_kernel_that_does_not_support_the_call_raises_instead_of_another_running() -> None:
    choose_attention(AttentionConfig("flash"), device_type="cpu")
    wide = torch.randn(1, 1, 4, 8, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="No available kernel"):
        scaled_dot_product_attention(wide, wide, wide, dropout_p=0.5)  # the CPU's flash kernel has no dropout


@pytest.mark.parametrize("backend", ["cudnn", "flash3"])
def test_a_kernel_that_the_device_does_not_have_is_refused(backend: str) -> None:
    with pytest.raises(UserError, match=rf'attention.backend = "{backend}" needs a CUDA device; write "auto"'):
        choose_attention(AttentionConfig(backend), device_type="cpu")  # type: ignore[arg-type]


# FlashAttention 3. Its kernels need a GPU: here, torch's own registry takes a package that has only their names.

PACKAGE = """
from torch import library
ours = library.Library("flash_attn_3", "DEF")
for name in ("fwd", "bwd"):
    ours.define(f"{name}(Tensor query) -> Tensor")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module of the package, empty, on a machine that seems to have a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    module = tmp_path / "flash_attn_interface.py"
    module.touch()
    yield module
    choose_attention(AttentionConfig(), device_type="cpu")
    sys.modules.pop("flash_attn_interface", None)
    vars(torch.ops).pop("flash_attn_3", None)


def test_flash3_is_activated_when_asked_for_and_only_then(package: Path) -> None:
    package.write_text(PACKAGE)
    for _ in range(2):  # a second run in this process
        assert choose_attention(AttentionConfig("flash3"), device_type="cuda") == ["attention: flash3 kernels only"]
        assert current_flash_attention_impl() == "FA3"
        assert torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
        choose_attention(AttentionConfig("flash"), device_type="cuda")
        assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "does not expose FA3 forward kernels"),
        ("raise ImportError('undefined symbol: aoti')", "undefined symbol: aoti"),
        ("raise OSError('libcudart.so.12: cannot open')", "libcudart.so.12: cannot open"),
    ],
)
def test_flash3_with_a_package_that_torch_cannot_use_is_refused(package: Path, source: str, reason: str) -> None:
    package.write_text(source)
    with pytest.raises(UserError, match=rf"package flash-attn-3, which torch {torch.__version__[:4]}.*{reason}"):
        choose_attention(AttentionConfig("flash3"), device_type="cuda")
    assert current_flash_attention_impl() is None


@pytest.mark.usefixtures("package")
def test_flash3_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # as if it were not installed
    with pytest.raises(
        UserError, match=r'needs the package flash-attn-3.*install the one that PyTorch builds, or write "auto"'
    ):
        choose_attention(AttentionConfig("flash3"), device_type="cuda")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_flash3_on_another_gpu_than_hopper_is_refused(
    capability: tuple[int, int], package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.write_text(PACKAGE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    found = f"Some GPU has compute capability {capability[0]}.{capability[1]}"
    with pytest.raises(UserError, match=rf"needs a Hopper GPU \(9.0\), and {found}"):
        choose_attention(AttentionConfig("flash3"), device_type="cuda")
    assert current_flash_attention_impl() is None


def test_texts_that_grow_have_no_kernel_that_plans_for_every_length() -> None:
    """What was asked for by name stays."""
    for backend, inside, after in (("auto", False, True), ("math", False, False), ("cudnn", True, True)):
        choose_attention(AttentionConfig(backend), device_type="cuda")  # type: ignore[arg-type]
        with without_plans():
            assert torch.backends.cuda.cudnn_sdp_enabled() == inside
        assert torch.backends.cuda.cudnn_sdp_enabled() == after
