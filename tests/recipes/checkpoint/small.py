"""A model of a few kilobytes, trained for a few steps, and helpers that compare its state."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from models.sizes import SIZES
from parallel.config import MeshConfig
from parallel.fsdp import plain_name
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.checkpoint.config import CheckpointConfig
from recipes.checkpoint.manifest import Contents, Manifest
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer
from tests.build import SHARD_ALL, build_model, cpu_mesh
from tests.whole import whole as gathered

SMALL = replace(
    SIZES["llama3_debug"],
    layers=1,
    width=16,
    heads=2,
    key_value_heads=1,
    head_width=8,
    feed_forward_width=24,
    vocabulary=20,
)


def checkpoints_in(
    folder: Path, *, keep: int, keep_every: int = 0, keep_best: str = "", asynchronous: bool = False, **options: Any
) -> Checkpoints:
    """The checkpoints of a run in this folder. options: as of Checkpoints."""
    config = CheckpointConfig(every=1, keep=keep, keep_every=keep_every, keep_best=keep_best, asynchronous=asynchronous)
    return Checkpoints(folder, config, **options)


def build(
    *, seed: int, mode: str = "none", mesh: MeshConfig = SHARD_ALL, moments: str = "float32", name: str = "adamw"
) -> tuple[nn.Module, Optimizer]:
    """The model on a mesh of the current process group, and its optimizer."""
    model, _ = build_model(SMALL, seed=seed, mode=mode, mesh=mesh)
    config = OptimizerConfig(name, lr=0.01, state_dtype=moments)
    return model, build_optimizer(model, config, cpu_mesh(mesh))


def step(model: nn.Module, optimizer: Optimizer, *, seed: int) -> float:
    """Do one optimizer step on random tokens, the same on all processes. Returns its loss."""
    tokens = torch.randint(SMALL.vocabulary, (2, 9), generator=torch.Generator().manual_seed(seed))
    loss = model(tokens[:, :-1], tokens[:, 1:]) / 16
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(
    steps: int = 2, *, mesh: MeshConfig = SHARD_ALL, moments: str = "float32", name: str = "adamw"
) -> tuple[nn.Module, Optimizer]:
    model, optimizer = build(seed=0, mesh=mesh, moments=moments, name=name)
    for seed in range(steps):
        step(model, optimizer, seed=seed)
    return model, optimizer


def snapshot(model: nn.Module, optimizer: Optimizer, *, whole: bool = False) -> dict[str, Tensor]:
    """Copies of all tensors that the next step depends on, by name: this process's shards, or whole tensors."""
    found = {}
    for name, parameter in model.named_parameters():
        states = {"": parameter, **optimizer.state[parameter]}
        for kind, value in states.items():
            if isinstance(value, DTensor):
                value = gathered(value) if whole else value.to_local()
            found[f"{plain_name(name)} {kind}"] = value.detach().clone()
    return found


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names whose values differ in any bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def spoil(shard: Path) -> None:
    """Flip a bit of the first tensor in this file."""
    content = bytearray(shard.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    shard.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def all_contents(manifest: Manifest) -> Iterator[tuple[str, Contents]]:
    """(shard, contents) of all shards."""
    return ((name, manifest.contents(number)) for number, name in manifest.shards.items())
