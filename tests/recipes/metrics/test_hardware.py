"""Peaks are found by the names that devices report."""

import pytest

from recipes.metrics.hardware import BF16_PEAKS, bf16_peak


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.4e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("cpu", None),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA Quantum 9000", None),
    ],
)
def test_the_peak_is_found_by_the_exact_device_and_unknown_devices_have_none(name: str, peak: float | None) -> None:
    assert bf16_peak(name) == peak


def test_every_peak_has_a_source() -> None:
    assert all(len(source) > 20 for _, _, source in BF16_PEAKS)
