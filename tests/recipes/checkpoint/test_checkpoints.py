"""Checkpoints of one process: what comes back, what is kept, what is passed over."""

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from models.sizes import SIZES
from parallel.dist import start, stop
from parallel.errors import UserError
from parallel.materialize import plain_name
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.optimizer import build_optimizer
from recipes.schema import OptimizerConfig
from tests.build import build_model

SMALL = replace(SIZES["llama3_debug"], layers=2, width=32, feed_forward_width=48, vocabulary=64)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one."""
    start("cpu", seed=0)
    yield
    stop()


def build(*, seed: int, mode: str = "none") -> tuple[nn.Module, Optimizer]:
    model, _ = build_model(SMALL, seed=seed, mode=mode)
    return model, build_optimizer(model, OptimizerConfig(lr=0.01))


def step(model: nn.Module, optimizer: Optimizer, *, seed: int) -> float:
    tokens = torch.randint(SMALL.vocabulary, (2, 9), generator=torch.Generator().manual_seed(seed))
    loss = model(tokens[:, :-1], tokens[:, 1:]) / 16
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every number that the next step depends on, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        states = {"": parameter, **optimizer.state[parameter]}
        for kind, value in states.items():
            local = value.to_local() if isinstance(value, DTensor) else value
            found[f"{plain_name(name)} {kind}"] = local.detach().clone()
    return found


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names whose values differ in a bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture
def trained() -> tuple[nn.Module, Optimizer]:
    model, optimizer = build(seed=0)
    for seed in (1, 2, 3):
        step(model, optimizer, seed=seed)
    return model, optimizer


def folders(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


@pytest.mark.parametrize("mode", ["none", "full"])
def test_parameters_and_moments_come_back_to_the_bit(
    mode: str, trained: tuple[nn.Module, Optimizer], tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    before = snapshot(*trained)
    assert {name.split()[-1] for name in before if name.count(" ") == 1} >= {"exp_avg", "exp_avg_sq", "step"}
    checkpoints.save(*trained, step=3)
    assert differences(snapshot(*trained), before) == []  # saving moves nothing

    fresh = build(seed=7, mode=mode)  # other weights, no moments, perhaps other names inside
    checkpoints.load(*fresh, step=3)
    assert differences(snapshot(*fresh), before) == []
    assert [group["weight_decay"] for group in fresh[1].param_groups] == [0.1, 0.0]

    assert step(*fresh, seed=4) == step(*trained, seed=4)
    assert differences(snapshot(*fresh), snapshot(*trained)) == []


def test_loading_replaces_what_was_trained_meanwhile(trained: tuple[nn.Module, Optimizer], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    before = snapshot(*trained)
    checkpoints.save(*trained, step=3)
    step(*trained, seed=4)
    assert set(differences(snapshot(*trained), before)) == set(before)
    checkpoints.load(*trained, step=3)
    assert differences(snapshot(*trained), before) == []


def test_the_oldest_are_deleted(trained: tuple[nn.Module, Optimizer], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a" / "checkpoints", keep=2)
    assert checkpoints.steps() == []  # nor is there a folder yet
    kept = []
    for number in (3, 9, 20, 100):
        checkpoints.save(*trained, step=number)
        kept.append(checkpoints.steps())
    assert kept == [[3], [3, 9], [9, 20], [20, 100]]
    assert folders(checkpoints) == ["step-00000020", "step-00000100"]
    Checkpoints(checkpoints.folder, keep=1).save(*trained, step=123_456_789)
    assert folders(checkpoints) == ["step-123456789"]
    assert checkpoints.steps() == [123_456_789]


def test_what_a_kill_left_is_passed_over_and_cleared(trained: tuple[nn.Module, Optimizer], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for left_over in (5, 6):
        (tmp_path / f".partial-{left_over:08d}").mkdir()
        (tmp_path / f".partial-{left_over:08d}" / "__0_0.distcp").write_text("half of it")
    assert checkpoints.steps() == []
    checkpoints.save(*trained, step=6)
    assert folders(checkpoints) == ["step-00000006"]
    before = snapshot(*trained)
    fresh = build(seed=1)
    checkpoints.load(*fresh, step=6)
    assert differences(snapshot(*fresh), before) == []


def test_a_save_that_breaks_off_leaves_no_checkpoint(trained: tuple[nn.Module, Optimizer], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(*trained, step=3)
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard_limit))  # as if the disk were full
    try:
        with pytest.raises(CheckpointException, match="File too large"):
            checkpoints.save(*trained, step=6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))
    assert checkpoints.steps() == [3]
    assert folders(checkpoints) == [".partial-00000006", "step-00000003"]
    checkpoints.save(*trained, step=9)
    assert folders(checkpoints) == ["step-00000009"]


def test_other_names_are_ignored(trained: tuple[nn.Module, Optimizer], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    others = ["step-5", "step-00000007-backup", "step-", "step-0000000x", "best", "old-step-00000009"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").write_text("a file")
    assert checkpoints.steps() == []
    for number in (3, 4):
        checkpoints.save(*trained, step=number)
    assert checkpoints.steps() == [4]
    assert folders(checkpoints) == sorted([*others, "step-00000099", "step-00000004"])


@pytest.mark.parametrize("damage", ["truncated", "missing", "no metadata"])
def test_a_damaged_checkpoint_is_named_with_the_way_out(
    damage: str, trained: tuple[nn.Module, Optimizer], tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in (1, 2):
        checkpoints.save(*trained, step=number)
    [numbers] = checkpoints.path(2).glob("*.distcp")
    if damage == "truncated":
        numbers.write_bytes(numbers.read_bytes()[:1000])
    elif damage == "missing":
        numbers.unlink()
    else:
        (checkpoints.path(2) / ".metadata").write_bytes(b"")
    with pytest.raises(UserError, match=r"step-00000002 cannot be loaded: .*; remove this folder to go on from step 1"):
        checkpoints.load(*trained, step=2)
    checkpoints.load(*trained, step=1)
