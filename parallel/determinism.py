"""Equal bits: switches with which the same step on the same GPUs, with the same versions, gives the same numbers."""

import os

import torch
import torch.utils.deterministic

from parallel.errors import UserError, listed

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Those with which cuBLAS repeats its sums (its manual: "Results Reproducibility"). torch refuses products without."""
MESSAGES = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""One order of every sum. NCCL would choose by size and machine, and switches (NVLS) add up in the order of arrival."""


def repeat_bits(asked: bool) -> None:
    """Process-wide: torch, cuBLAS, cuDNN and NCCL compute every sum in one order, or refuse an operator by name.

    Call it before CUDA and the process group start. torch's switch is also Inductor's. Variables of NCCL that are set
    already stay: lines_about() says them. Raises UserError for a variable with which cuBLAS does not repeat its sums.
    """
    if not asked:
        torch.use_deterministic_algorithms(False)
        return
    if (workspace := os.environ.setdefault(WORKSPACE, WORKSPACES[0])) not in WORKSPACES:
        raise UserError(
            f"run.deterministic = true: with {WORKSPACE}={workspace}, cuBLAS need not repeat its sums; unset it, or"
            f" write {' or '.join(WORKSPACES)}"
        )
    for name, value in MESSAGES.items():
        os.environ.setdefault(name, value)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True)
    # It would write NaN into all new memory, to show who reads what nobody has written: a pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def lines_about() -> list[str]:
    """For the log: that bits repeat, and what NCCL was told."""
    if not torch.are_deterministic_algorithms_enabled():
        return []
    told = (f"{name}={os.environ[name]}" for name in (WORKSPACE, *MESSAGES))
    others = [name for name, ours in MESSAGES.items() if os.environ[name] != ours]
    return [f"deterministic: {', '.join(told)}" + (f"; {listed(others)} as set outside" if others else "")]
