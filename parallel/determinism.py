"""Equal bits: switches with which the same step on the same GPUs, with the same versions, gives the same numbers."""

import os

import torch
import torch.utils.deterministic

from parallel.errors import UserError, listed

VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree"),
    "NCCL_PROTO": ("Simple", "LL", "LL128"),
}
"""Values with which sums repeat (cuBLAS's manual: "Results Reproducibility"); the first is set where there is none.
NCCL would choose by size and machine, and switches (NVLS) add up in the order of arrival."""


def repeat_bits(asked: bool) -> None:
    """Process-wide: torch, cuBLAS, cuDNN and NCCL compute every sum in one order, or refuse an operator by name.

    Call it before CUDA and the process group start. torch's switch is also Inductor's. Raises UserError for a variable
    with which sums need not repeat.
    """
    if not asked:
        torch.use_deterministic_algorithms(False)
        return
    for name, values in VARIABLES.items():
        if (value := os.environ.setdefault(name, values[0])) not in values:
            rule = f"run.deterministic = true: with {name}={value}, sums need not repeat"
            raise UserError(f"{rule}; unset it, or write {listed(values, last='or')}")
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True)
    # It would write NaN into all new memory, to show who reads what nobody has written: a pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def lines_about() -> list[str]:
    """For the log: that bits repeat, and by which variables."""
    if not torch.are_deterministic_algorithms_enabled():
        return []
    return [f"deterministic: {', '.join(f'{name}={os.environ[name]}' for name in VARIABLES)}"]
