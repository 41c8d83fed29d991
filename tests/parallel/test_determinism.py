"""The switches for equal bits are set, and what would undo them is refused or said."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config
import torch.utils.deterministic

from parallel.config import AttentionConfig
from parallel.determinism import MESSAGES, WORKSPACE, lines_about, repeat_bits
from parallel.errors import UserError
from parallel.kernels import choose_attention


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (WORKSPACE, *MESSAGES):
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
    assert os.environ[WORKSPACE] == ":4096:8"
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


def test_variables_of_nccl_stay_and_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    repeat_bits(True)
    [line] = lines_about()
    assert line.endswith("NCCL_ALGO=Tree, NCCL_PROTO=Simple; NCCL_ALGO as set outside")


def test_a_workspace_with_which_cublas_does_not_repeat_sums_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    repeat_bits(True)
    monkeypatch.setenv(WORKSPACE, ":4096:2:16:8")
    with pytest.raises(UserError, match=r"CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8, .* unset it"):
        repeat_bits(True)
