"""Peak matrix-multiplication rates by device. Imports no torch.

Dense rates, without structured sparsity: NVIDIA's data sheets print the sparse ones, twice as high. An unknown device
has no peak, and then metrics say null instead of guessing.
"""

import re

# (part of the name torch.cuda.get_device_name() reports, dense bf16 FLOP/s, source). The first match counts.
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
    """Dense bf16 peak in FLOP/s of a device by its name, or None where it is not in the table."""
    for part, peak, _ in BF16_PEAKS:
        # Whole words, and not the siblings of another speed that share them.
        if re.search(rf"\b{part}\b(?!.*\b(Ti|SUPER|Laptop|Max-Q)\b)", device_name, re.IGNORECASE):
            return peak
    return None
