"""What is known about devices: peak matrix multiplication rates, and the memory of those that recipes are named after.

The rates are dense ones; NVIDIA's data sheets print the rates with structured sparsity, which are twice as high. For an
unknown device the metrics contain null, not a guess. Imports no torch.
"""

import re
from dataclasses import dataclass

_MEBIBYTES = {"H100": 81_559, "H200": 143_771, "A100": 81_920, "A100-40": 40_960, "B200": 183_359, "H100-500W": 97_871}
MEMORY = {gpu: mebibytes * 2**20 for gpu, mebibytes in _MEBIBYTES.items()}
"""Bytes in all, as nvidia-smi reports them of the SXM modules, by their name in recipes."""
# (part of the name from torch.cuda.get_device_name(), dense bf16 FLOP/s, source). The first match counts.
BF16_PEAKS: tuple[tuple[str, float, str], ...] = (
    ("GB200", 2500e12, "NVIDIA GB200 NVL72 data sheet: 5,000 TFLOP/s bf16 sparse per GPU"),
    ("B200", 2250e12, "NVIDIA DGX B200 data sheet: 36 PFLOP/s bf16 sparse for 8 GPUs"),
    ("H200 NVL", 835.5e12, "NVIDIA H200 data sheet, NVL: 1,671 TFLOP/s bf16 sparse"),
    ("H200", 989.4e12, "NVIDIA H200 data sheet: 1,979 TFLOP/s bf16 sparse"),
    ("GH200", 989.4e12, "NVIDIA GH200 data sheet: 1,979 TFLOP/s bf16 sparse"),
    ("H100 PCIe", 756.4e12, "NVIDIA H100 data sheet, PCIe: 1,513 TFLOP/s bf16 sparse"),
    ("H100 NVL", 835.5e12, "NVIDIA H100 data sheet, NVL: 1,671 TFLOP/s bf16 sparse per GPU"),
    ("H100", 989.4e12, "NVIDIA H100 data sheet, SXM: 1,979 TFLOP/s bf16 sparse"),
    ("H800", 989.4e12, "same matrix units as the H100 SXM"),
    ("A100", 312e12, "NVIDIA A100 data sheet: 312 TFLOP/s bf16 dense"),
    ("L40S", 362.05e12, "NVIDIA L40S data sheet: 362.05 TFLOP/s bf16 dense"),
    ("RTX 4090", 165.2e12, "NVIDIA Ada architecture white paper: 165.2 TFLOP/s bf16 dense, float32 accumulation"),
    ("RTX 3090", 71e12, "NVIDIA Ampere GA102 white paper: 71 TFLOP/s bf16 dense, float32 accumulation"),
    ("MI300X", 1307.4e12, "AMD Instinct MI300X data sheet: 1,307.4 TFLOP/s bf16 dense"),
)


def bf16_peak(device_name: str) -> float | None:
    """The dense bf16 peak in FLOP/s of the device with this name, or None if it is not in the table."""
    for part, peak, _ in BF16_PEAKS:
        # Match whole words, but not variants of another speed that share the name.
        if re.search(rf"\b{part}\b(?!.*\b(Ti|SUPER|Laptop|Max-Q)\b)", device_name, re.IGNORECASE):
            return peak
    return None


@dataclass(frozen=True)
class Hardware:
    """What a recipe is made for."""

    gpu: str
    """A key of MEMORY."""
    processes: int = 1
    """Number of processes, one for each GPU."""
    nodes: int = 1

    @property
    def memory(self) -> int:
        """Bytes of each GPU."""
        return MEMORY[self.gpu]


_NUMBER = r"([1-9]\d{0,5})"
_WRITTEN = rf"(?:{_NUMBER}x)??(?:{_NUMBER}x?)?({'|'.join(sorted(MEMORY, key=len, reverse=True))})"


def hardware_of(name: str, *, written: str = "") -> Hardware | None:
    """The hardware in the name of a recipe or of its run, such as "llama3_70b_64x8h100"; None if there is none.

    written: run.hardware, such as "64x8h100", which counts instead of the name if it is not empty.
    """
    if written:
        match = re.fullmatch(_WRITTEN, written, re.IGNORECASE)
    else:
        match = re.search(rf"_{_WRITTEN}(?![a-z0-9])", name, re.IGNORECASE)
    if match is None:
        return None
    nodes, each = int(match[1] or 1), int(match[2] or 1)
    return Hardware(match[3].upper(), nodes * each, nodes)
