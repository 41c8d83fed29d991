"""What environment.json records of where a run ran."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from parallel.dist import allocator_settings
from recipes.metrics.throughput import device_name

PACKAGES = ("torch", "torchao", "datasets", "tokenizers", "safetensors", "numpy", "wandb")


def environment(*, world_size: int, device: torch.device) -> dict[str, Any]:
    """Versions, commit and device, so that a number can be traced to what produced it."""
    changes = _git("status", "--porcelain")
    return {
        "git_commit": _git("rev-parse", "HEAD"),
        "git_uncommitted_changes": None if changes is None else bool(changes),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "device": device_name(device),
        "host": platform.node(),
        "world_size": world_size,
        "allocator": allocator_settings() if device.type == "cuda" else None,
    }


def _git(*arguments: str) -> str | None:
    """The output of a git command in this checkout; None without git or without a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
