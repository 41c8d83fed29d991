"""What environment.json records of where a run ran."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from parallel.dist import allocator_settings
from recipes.files.version import commit
from recipes.metrics.throughput import device_name

PACKAGES = ("torch", "torchao", "datasets", "tokenizers", "safetensors", "numpy", "wandb")


def environment(*, world_size: int, device: torch.device) -> dict[str, Any]:
    """Versions, commit and device, so that a number can be traced to what produced it."""
    return {
        **commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "device": device_name(device),
        "host": platform.node(),
        "world_size": world_size,
        "allocator": allocator_settings() if device.type == "cuda" else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
