"""AdamW's updates as torch.compile's kernels: the numbers of torch's fused kernel, and each state moved once."""

import logging
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._inductor import metrics
from torch._inductor.compile_fx import inductor_metrics_log
from torch.testing import assert_close

from models.sizes import SIZES
from parallel.config import Float8Config, FSDPConfig
from parallel.float8 import precompute_scales
from parallel.fsdp import without_wrapper
from recipes.optimization.adamw import _update
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer
from tests.build import NO_FLOAT8, build_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]

CONFIG = OptimizerConfig(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
TENSORWISE = Float8Config(recipe="tensorwise", all_gather=True, emulate=True)
BETAS, RATE, DECAY, EPS, DIVISOR = (0.9, 0.95), 1e-2, 0.1, 1e-8, 3.0
FUSED_MULTIPLY_ADD = {"cpp.enable_floating_point_contract_flag": "fast"}
"""Kernels for GPUs round a product and its sum once, as torch's do; those for CPUs only if told so."""


def built(float8: Float8Config = NO_FLOAT8) -> nn.Module:
    """A small model of two layers."""
    return build_model(replace(SIZES["smollm3_debug"], layers=2), float8=float8, fsdp=FSDPConfig())[0]


def take_steps(model: nn.Module, optimizer: Any, steps: range, *, bad: int = -1) -> list[Tensor]:
    """Take steps along random gradients, at rates that change; `bad` has NaN in its gradients, and is skipped."""
    first = next(model.parameters())
    for step in steps:
        torch.manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = 0.001 * (step + 1)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape) if step != bad else torch.full(parameter.shape, torch.nan)
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.to_local().copy_(gradient)
        if step % 3 == 2:
            first.grad = None
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(step == bad)), torch.tensor(2.0)
        optimizer.step()
    return [parameter.detach().to_local().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_step_differs_from_torchs_kernel_by_a_rounding(dtype: torch.dtype) -> None:
    """Numbers of 12 magnitudes, at the first step and late. The errors are relative to the largest summand."""
    update = torch.compile(_update, fullgraph=True, options=FUSED_MULTIPLY_ADD)
    torch.manual_seed(0)
    numbers = 100_000
    for done in (1, 10, 10_000):
        p, g, m, v = (torch.randn(numbers).sign() * 10.0 ** (torch.rand(numbers) * 12 - 9) for _ in range(4))
        m, v = m.to(dtype), v.abs().to(dtype)
        theirs = [p.clone(), g.clone(), m.to(torch.float32, copy=True), v.to(torch.float32, copy=True)]
        steps, scale = [torch.tensor(float(done))], torch.tensor(DIVISOR)
        options = {"lr": RATE, "beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": DECAY, "eps": EPS}
        lists = [[tensor] for tensor in theirs]
        torch._fused_adamw_(*lists, [], steps, **options, amsgrad=False, maximize=False, grad_scale=scale)
        g_before, ours = g.clone(), [p.clone(), g, m.clone(), v.clone()]
        of_step = torch.tensor([RATE / (1 - BETAS[0] ** done), (1 - BETAS[1] ** done) ** 0.5, RATE * DECAY, EPS])
        with torch.no_grad():
            update([(*ours, of_step, BETAS)], scale, torch.tensor(0.0))
        assert torch.equal(g, g_before)
        largest = torch.maximum(m.float().abs(), g.abs())  # of what is mixed into the first moment
        change = of_step[0] * largest / (theirs[3].sqrt() / of_step[1] + EPS)
        for number, size in ((0, p.abs() + 3 * change), (2, largest), (3, theirs[3])):
            error = (ours[number].float() - theirs[number].to(ours[number].dtype).float()).abs()
            assert (error <= 2 * torch.finfo(ours[number].dtype).eps * size).all(), (number, done)
            if number > 0 and dtype == torch.bfloat16:
                assert (error > 0).float().mean() < 1e-4  # where the float32 number is next to the middle of two


@pytest.mark.parametrize(("state_dtype", "least"), [("float32", 28), ("bfloat16", 20)])
def test_compiled_kernels_read_and_write_each_state_once(
    state_dtype: Any, least: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=inductor_metrics_log.name)  # else nothing is counted
    torch.compiler.reset()
    model = built()
    optimizer = build_optimizer(model, replace(CONFIG, state_dtype=state_dtype), compiled=True)
    metrics.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        take_steps(model, optimizer, range(1))
    blocks = [parameter.numel() for name, parameter in model.named_parameters() if "blocks.1" not in name]
    assert metrics.num_bytes_accessed / sum(blocks) == pytest.approx(least, rel=1e-3)  # one of two equal blocks


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_steps_go_on_between_both_kernels_and_a_skipped_one_changes_nothing(state_dtype: Any) -> None:
    """With rates that change and gradients that are missing: nothing is compiled again."""
    torch.compiler.reset()
    config = replace(CONFIG, state_dtype=state_dtype)
    models = [built() for _ in range(3)]
    fused, compiled, mixed = (build_optimizer(model, config, compiled=model is not models[0]) for model in models)
    take_steps(models[2], mixed, range(4))
    with torch._dynamo.config.patch(error_on_recompile=True):
        results = [take_steps(models[index], one, range(9), bad=4) for index, one in enumerate((fused, compiled))]
        mixed.load_state_dict(deepcopy(fused.state_dict()))
        for mine, theirs in zip(models[2].parameters(), models[0].parameters(), strict=True):
            mine.detach().copy_(theirs)
        before = take_steps(models[2], mixed, range(9, 9))
        skipped = take_steps(models[2], mixed, range(9, 10), bad=9)
    assert all(map(torch.equal, before, skipped))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-7 if state_dtype == "float32" else 1e-4)
    results = [take_steps(models[index], one, range(10, 12)) for index, one in ((0, fused), (2, mixed))]
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-7 if state_dtype == "float32" else 1e-4)
    kinds = [[type(value), value.dtype, value.shape] for state in fused.state.values() for value in state.values()]
    assert kinds == [[type(x), x.dtype, x.shape] for state in compiled.state.values() for x in state.values()]


def test_compiled_kernels_update_weights_that_float8_wraps() -> None:
    weights, losses = [], []
    for compiled in (False, True):
        model = built(TENSORWISE)
        optimizer = build_optimizer(model, CONFIG, compiled=compiled)
        tokens = torch.randint(4096, (2, 17), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            loss = model(tokens[:, :-1], tokens[:, 1:]) / 32
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            precompute_scales(model)
            weights.append([without_wrapper(parameter.to_local()).clone() for parameter in model.parameters()])
    for one, other in zip(weights[0], weights[2], strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert losses[1] < losses[0] and losses[3] == pytest.approx(losses[1], rel=1e-4)
