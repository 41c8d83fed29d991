"""Measuring the loop and recording what it measured."""

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from models.config import ModelConfig
from models.documents import Documents
from parallel.reduce import sum_over_processes
from recipes.files.atomic import Lines, sync
from recipes.files.layout import FLOAT8_SHARES, LOG_FILE, METRICS, QUARANTINE
from recipes.hardware import bf16_peak

PACKAGES = ("torch", "torchao", "datasets", "tokenizers", "safetensors", "numpy", "wandb")


class AttentionLength:
    """Mean length of the documents that tokens attend in, over all processes, since the last logged step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._squared_lengths = self._tokens = 0

    def count(self, micro_batches: Iterable[Documents | None]) -> None:
        """Take in a step of this process. These are the host's numbers: no device is waited for."""
        for documents in micro_batches:
            if documents is not None:
                self._squared_lengths += documents.squared_lengths
                self._tokens += documents.positions.numel()

    def take(self) -> float | None:
        """The mean in tokens, or None without documents; and start anew. All processes ask; the host waits for all."""
        if self._tokens == 0:
            return None
        sums = torch.tensor([self._squared_lengths, self._tokens], dtype=torch.float64, device=self._device)
        squared_lengths, tokens = sum_over_processes(sums).tolist()
        self._squared_lengths = self._tokens = 0
        return squared_lengths / tokens


class Throughput:
    """Tokens and FLOPs per second from a step's duration.

    MFU: achieved over peak FLOP/s, counting each token's forward and backward once, recomputation not. `mfu` counts
    causal attention, `mfu_full` full attention (see ModelConfig.flops_per_token). The peak is always the dense bf16
    one, also where linears run in float8: then the figure compares with bf16 runs and may exceed 1.
    """

    def __init__(
        self, model: ModelConfig, *, tokens_per_step: int, sequence_length: int, devices: int, device: torch.device
    ) -> None:
        self.tokens_per_step = tokens_per_step
        self.devices = devices
        self.device_name = device_name(device)
        self.peak = bf16_peak(self.device_name)
        self.model = model
        self.flops = model.flops_per_token(sequence_length, "causal")
        self.flops_full = model.flops_per_token(sequence_length, "full")

    def row(self, step_seconds: float, *, attention_length: float | None = None) -> dict[str, float | None]:
        """The rate columns of metrics.jsonl; tflops and mfu are null where the device's peak is unknown.

        attention_length: of AttentionLength, where documents are masked; counted instead of the sequence length.
        """
        per_second = self.tokens_per_step / step_seconds
        flops, flops_full = self.flops, self.flops_full
        if attention_length is not None:
            flops = self.model.flops_per_token(attention_length, "causal")
            flops_full = self.model.flops_per_token(attention_length, "full")
        per_device = per_second / self.devices
        known = self.peak is not None
        counted = {} if attention_length is None else {"attention_length": attention_length}
        return counted | {
            "tokens_per_second": per_second,
            "tokens_per_second_per_device": per_device,
            "tflops_per_device": per_device * flops / 1e12 if known else None,
            "mfu": per_device * flops / self.peak if self.peak else None,
            "mfu_full": per_device * flops_full / self.peak if self.peak else None,
        }


class MetricsWriter:
    """metrics.jsonl, and Weights & Biases when asked. On ranks other than 0 it does nothing."""

    def __init__(
        self,
        folder: Path,
        *,
        enabled: bool,
        wandb_project: str | None,
        run_name: str,
        recipe: dict[str, Any],
        before: Mapping[str, Any],
        tell: Callable[[str], None] = print,
    ) -> None:
        """before: state() of the run so far, where it goes on. tell: where lines for people go."""
        self._folder, self._tell = folder, tell
        self._lines = Lines(folder / METRICS, tell=tell)
        self._enabled = enabled
        self._wandb: Any = None
        if enabled and wandb_project is not None:
            self._wandb = _start_wandb(wandb_project, run_name, folder, recipe, run_id=before.get("wandb_id"))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a run that goes on is one run at Weights & Biases too."""
        return {} if self._wandb is None else {"wandb_id": self._wandb.id}

    def write(self, row: dict[str, Any]) -> None:
        """Append one row. In the file, nan and inf, which JSON does not have, are null."""
        if not self._enabled:
            return
        finite = {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()
        }
        self._lines.append(json.dumps(finite, allow_nan=False))
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in row.items() if k not in ("step", "documents")}, step=row["step"])

    def sync(self) -> None:
        """Before a checkpoint: a power cut must not leave that and take the rows of its steps, here and in the log."""
        if not self._enabled:
            return
        try:
            sync(self._folder, (METRICS, FLOAT8_SHARES, QUARANTINE, LOG_FILE))
        except OSError as error:
            self._tell(f"{self._folder} cannot be synced: {error.strerror}; a power cut would take lines with it")

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process held, in GiB: allocated on the GPU, or resident in the host for a CPU run."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def environment(*, world_size: int, device: torch.device) -> dict[str, Any]:
    """What environment.json records, so that a number can be traced to what produced it."""
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
    }


def _git(*arguments: str) -> str | None:
    """What git says about this checkout; None without git, and for a copy that is no checkout."""
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


def _start_wandb(project: str, name: str, folder: Path, recipe: dict[str, Any], *, run_id: str | None) -> Any:
    # It reports on itself over the network, also offline; where packets are dropped, the end of a run waits for that.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    # Without a key wandb would ask for one on the terminal and stop the run.
    offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
    return wandb.init(
        project=project,
        name=name,
        dir=folder,
        config=recipe,
        mode="offline" if offline else None,
        id=run_id,
        resume=None if run_id is None else "allow",
    )
