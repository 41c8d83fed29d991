"""GPUs by our names and by those that torch gives."""

import pytest

from parallel.errors import UserError
from recipes.plan.hardware import gpu_named
from tests.published.gpu import gpu_of_device


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_devices_are_known_by_the_name_that_torch_gives(device: str, name: str) -> None:
    assert gpu_of_device(device) is gpu_named(name.lower())


@pytest.mark.parametrize(
    "device",
    [
        *(
            "cpu",
            "NVIDIA GeForce RTX 4090",
            "NVIDIA H100 PCIe",
            "NVIDIA H100 NVL",
            "NVIDIA GH200 480GB",
            "NVIDIA GB200",
        ),
        *("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"),
    ],
)
def test_devices_with_other_rates_are_refused(device: str) -> None:
    with pytest.raises(UserError, match="its rates are not known"):
        gpu_of_device(device)


def test_an_unknown_gpu_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match="--gpu H300: unknown; write H100, H200, A100, A100-40, B200 or H100-500W"):
        gpu_named("H300")
