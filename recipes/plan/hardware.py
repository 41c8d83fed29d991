"""GPUs that a plan can be made for, with what their makers promise of them. Imports no torch."""

import re
import subprocess
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from parallel.errors import UserError, listed
from recipes.metrics.hardware import MEMORY, bf16_peak

Family = Literal["hopper", "hopper, HBM3e", "hopper, 500 W", "ampere"]


@dataclass(frozen=True)
class Gpu:
    """Promised numbers; what a step reaches of them is in rates.py."""

    name: str
    memory: int
    """Bytes in all."""
    bandwidth: float
    """Bytes per second that its memory reads and writes."""
    bf16_peak: float
    """Dense FLOP/s."""
    float8_peak: float | None
    """Dense FLOP/s; None without float8 matrix units."""
    link: float
    """Bytes per second in each direction to the other GPUs of its node."""
    network: float
    """Bytes per second in each direction to other nodes: its share of the node's adapters."""
    source: str
    per_node: int = 8
    switched: bool = True
    """Any GPU has all of its links to any other; else each pair of a node has its own, and an equal share of them."""
    float32_peak: float | None = None
    """FLOP/s of products of float32; None: half of those of bfloat16."""
    units: int = 132
    """Parts that compute tiles of a product at the same time: streaming multiprocessors."""
    family: Family = "hopper"
    """The shares of the peak in rates.py that apply."""


def _sxm(name: str, *, float8: bool = True, **numbers: Any) -> Gpu:
    """A module with NVLink. numbers: fields of Gpu besides its memory and peaks; Hopper's where they are left out."""
    peak = bf16_peak(name.partition("-")[0])
    assert peak is not None
    hopper: dict[str, Any] = {
        "link": 450e9,
        "network": 50e9,
        "source": f"NVIDIA {name} data sheet, SXM",
        "float32_peak": 66.9e12,
    }
    return Gpu(name, MEMORY[name], bf16_peak=peak, float8_peak=2 * peak if float8 else None, **hopper | numbers)


_A100 = partial(_sxm, link=300e9, network=25e9, float8=False, float32_peak=19.5e12, units=108, family="ampere")
GPUS = {
    gpu.name: gpu
    for gpu in (
        _sxm("H100", bandwidth=3.35e12),
        _sxm("H200", bandwidth=4.8e12, family="hopper, HBM3e"),
        _A100("A100", bandwidth=2.039e12, source="NVIDIA A100 data sheet, SXM, 80 GB"),
        _A100("A100-40", bandwidth=1.555e12, source="NVIDIA A100 data sheet, SXM, 40 GB"),
        _sxm("B200", bandwidth=8e12, link=900e9, source="NVIDIA DGX B200 data sheet", float32_peak=75e12, units=148),
        _sxm(
            "H100-500W",
            bandwidth=2.4e12,
            source="Meta's H100 of 500 W with HBM2e (docs of torchtitan's benchmarks)",
            family="hopper, 500 W",
        ),
    )
}
"""Known GPUs, by name."""


def gpu_of(device: str) -> Gpu | None:
    """The GPU that a driver names so, such as "NVIDIA A100-SXM4-80GB"; None for any other, or a part of one."""
    found = re.search(r"\b(H100|H200|B200|A100)\b(?!.*\b(PCIe|NVL|MIG)\b)", device, re.IGNORECASE)
    return GPUS["A100-40" if "40GB" in device else found[1].upper()] if found else None


def gpu_named(name: str) -> Gpu:
    """The GPU with this name, in any case. Raises UserError for another."""
    if name.upper() not in (known_names := {known.upper(): gpu for known, gpu in GPUS.items()}):
        raise UserError(f"--gpu {name}: unknown; write {listed(list(GPUS), last='or')}")
    return known_names[name.upper()]


@cache
def devices() -> tuple[tuple[str, int], ...]:
    """Name and bytes of each GPU of this machine, from its driver's own tool, because torch takes a second."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = re.findall(r"^(.+), (\d+)\s*$", found.stdout, flags=re.MULTILINE)
    return tuple((name, int(mebibytes) * 2**20) for name, mebibytes in lines)
