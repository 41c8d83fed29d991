"""The switches for equal bits are set, and what would undo them is refused or said."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config
import torch.utils.deterministic

from parallel.config import AttentionConfig
from parallel.determinism import VARIABLES, lines_about, repeat_bits
from parallel.errors import UserError
from parallel.kernels import choose_attention


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    yield
    repeat_bits(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.deterministic = False
    choose_attention(AttentionConfig(), device_type="cpu")


def test_every_switch_is_set_and_torch_refuses_instead_of_warning() -> None:
    repeat_bits(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch._inductor.config.deterministic
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert lines_about() == ["deterministic: CUBLAS_WORKSPACE_CONFIG=:4096:8, NCCL_ALGO=Ring, NCCL_PROTO=Simple"]


def test_cudnn_attends_to_nothing_even_where_torch_would_not_ask() -> None:
    repeat_bits(True)
    choose_attention(AttentionConfig(), device_type="cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_later_run_of_the_process_does_not_repeat_bits_unasked() -> None:
    repeat_bits(True)
    repeat_bits(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert lines_about() == []


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("CUBLAS_WORKSPACE_CONFIG", ":16:8", ":4096:2:16:8"), ("NCCL_ALGO", "Tree", "NVLS"), ("NCCL_PROTO", "LL", "")],
)
def test_a_variable_with_which_sums_need_not_repeat_is_refused(
    name: str, good: str, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, good)
    repeat_bits(True)
    assert f"{name}={good}" in lines_about()[0]
    monkeypatch.setenv(name, bad)
    with pytest.raises(UserError, match=f"with {name}={bad}, sums need not repeat; unset it, or write"):
        repeat_bits(True)
