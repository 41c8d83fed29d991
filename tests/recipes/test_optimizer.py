"""Which parameters decay, and that the groups do what their numbers say."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from models.sizes import SIZES
from parallel.dist import start, stop
from parallel.materialize import plain_name
from recipes.optimizer import build_optimizer
from recipes.schema import OptimizerConfig
from tests.build import build_model

CONFIG = OptimizerConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5)
MATRICES = [f"attention.{letter}_proj" for letter in "qkvo"] + [
    f"feed_forward.{part}_proj" for part in ("gate", "up", "down")
]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one."""
    start("cpu", seed=0)
    yield
    stop()


def build(size: str, *, mode: str = "none") -> nn.Module:
    """Two layers of that size."""
    return build_model(replace(SIZES[size], layers=2), mode=mode)[0]


def names(model: nn.Module, group: dict) -> set[str]:
    """Plain names of a group's parameters."""
    by_identity = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return {by_identity[id(parameter)] for parameter in group["params"]}


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("size", ["smollm3_debug", "llama3_debug"], ids=["tied", "untied"])
def test_matrices_decay_and_norms_and_embeddings_do_not(size: str, mode: str) -> None:
    model = build(size, mode=mode)
    decayed, undecayed = build_optimizer(model, CONFIG).param_groups
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.5, 0.0)
    blocks = ("blocks.0", "blocks.1")
    matrices = {f"{block}.{matrix}.weight" for block in blocks for matrix in MATRICES}
    norms = {f"{block}.{norm}_norm.weight" for block in blocks for norm in ("attention", "feed_forward")}
    assert names(model, decayed) == matrices | ({"lm_head.weight"} if size == "llama3_debug" else set())
    assert names(model, undecayed) == norms | {"norm.weight", "embedding.weight"}
    assert len(decayed["params"]) + len(undecayed["params"]) == len(list(model.parameters()))


def test_numbers_come_from_the_recipe_and_the_kernel_is_fused() -> None:
    optimizer = build_optimizer(build("smollm3_debug"), CONFIG)
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.9), 1e-6)
        assert group["fused"] is True and not group["amsgrad"] and not group["maximize"]


def test_without_gradient_only_the_decay_moves_anything() -> None:
    model = build("llama3_debug")
    optimizer = build_optimizer(model, CONFIG)
    decayed = names(model, optimizer.param_groups[0])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        shrunk = 1 - 0.01 * 0.5 if name in decayed else 1.0
        assert torch.allclose(parameter.to_local(), before[name].to_local() * shrunk, rtol=1e-6, atol=0), name


def test_the_learning_rate_can_be_set_group_by_group() -> None:
    model = build("smollm3_debug")
    optimizer = build_optimizer(model, CONFIG)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    decayed, undecayed = optimizer.param_groups
    decayed["lr"], undecayed["lr"] = 0.0, 0.25
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        # AdamW's first step is the learning rate itself, whatever the gradient.
        step = 0.0 if name in names(model, decayed) else 0.25
        moved = (before[name] - parameter).to_local()
        assert torch.allclose(moved, torch.full_like(moved, step), rtol=1e-4), name
