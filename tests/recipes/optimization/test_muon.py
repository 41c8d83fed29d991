"""Muon: torch's arithmetic, the same on every mesh."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from models import decoder
from models.config import ModelConfig
from models.interface import blocks_of
from models.sizes import SIZES
from parallel.errors import UserError
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.muon import COEFFICIENTS, Muon, orthogonalized
from recipes.optimization.optimizer import build_optimizer, matrices_of
from tests.build import build_model, cpu_mesh
from tests.families import family_config

CONFIG = OptimizerConfig(name="muon", lr=0.004, matrix_lr=0.01, weight_decay=0.1)
STEPS = 10


def muon(model: nn.Module, config: OptimizerConfig = CONFIG, *, dtype: torch.dtype = torch.float32) -> Muon:
    optimizer = build_optimizer(model, config, cpu_mesh(), dtype=dtype)
    assert isinstance(optimizer, Muon)
    return optimizer


def torch_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """torch's own for plain parameters: Muon for matrices of blocks, AdamW for the others, decayed and not."""
    matrices = [one for block in blocks_of(model) for one in block.parameters() if one.dim() >= 2]
    chosen = {*matrices}
    rest = [one for one in model.parameters() if one not in chosen]
    head = [] if model.lm_head is None else [model.lm_head.weight]
    head += [] if model.routers is None else [*model.routers.parameters()]
    undecayed = [one for one in rest if all(one is not other for other in head)]
    adamw = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    flat = [one for one in matrices if one.dim() == 2]
    # Each expert by itself, in the memory of all.
    alone = {nn.Parameter(one.data[e]): (one, e) for one in matrices if one.dim() == 3 for e in range(len(one))}
    muon = torch.optim.Muon(
        [*flat, *alone],
        lr=config.matrix_lr or config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        adjust_lr_fn=config.lr_adjust,
    )

    def take_gradients(*_: object) -> None:
        for parameter, (experts, index) in alone.items():
            assert experts.grad is not None
            parameter.grad = experts.grad[index]

    muon.register_step_pre_hook(take_gradients)
    groups = [{"params": undecayed, "weight_decay": 0.0}, {"params": head}]
    return [muon, torch.optim.AdamW(groups, **adamw, weight_decay=0.1)]


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 512, (2, 33), generator=generator)
    return model(tokens[:, :-1], tokens[:, 1:]) / 64


@pytest.fixture
def float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon casts every matrix to bfloat16; here it computes in float32."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


def plain_copy(model: nn.Module, config: ModelConfig) -> nn.Module:
    """The same weights in a model that is not parallel."""
    plain = decoder.build_model(config)
    plain.load_state_dict({name: one.full_tensor() for name, one in model.state_dict().items()})
    return plain


@pytest.mark.slow
@pytest.mark.usefixtures("alone", "float32_products")
@pytest.mark.parametrize(
    ("size", "config"),
    [
        ("smollm3_debug", CONFIG),
        ("moe_debug", CONFIG),
        ("llama3_debug", replace(CONFIG, lr_adjust="original", nesterov=False, momentum=0.9, ns_steps=6)),
    ],
)
def test_ten_steps_equal_those_of_torch_in_one_process(size: str, config: OptimizerConfig) -> None:
    shape = replace(SIZES[size], vocabulary=512)
    ours, _ = build_model(shape)
    theirs = plain_copy(ours, shape)
    optimizers = {ours: [muon(ours, config)], theirs: torch_optimizers(theirs, config)}
    for step in range(STEPS):
        losses = []
        for model, stepped in optimizers.items():
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss.item())
            for one in stepped:
                one.step()
            model.zero_grad()
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), step
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # Not element by element: where gradients are nearly zero, AdamW makes much of their rounding.
        # Routed experts get few rows each, so their gradients are rounded more.
        assert (one.to_local() - other).norm() < (1e-4 if shape.experts else 1e-5) * other.norm(), name


@pytest.mark.usefixtures("alone")
def test_bfloat16_products_are_those_of_torch() -> None:
    matrix = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    ours = orthogonalized(matrix.to(torch.bfloat16), steps=5)
    for one, other in zip(ours, matrix, strict=True):
        theirs = torch.optim._muon._zeropower_via_newtonschulz(other, COEFFICIENTS, 5, 1e-7)
        # Batches may be summed in another order, and bfloat16 has 8 bits.
        assert (one - theirs).float().norm() < 0.02 * theirs.float().norm()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("family", "matrices", "others"),
    [
        ("gpt2", {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}, {"wte", "wpe"}),
        ("t5", {"q", "k", "v", "o", "wi", "wo"}, {"shared", "relative_attention_bias"}),
        ("qwen3", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}, {"lm_head"}),
    ],
)
def test_muon_steps_the_linears_in_blocks_of_transformers(family: str, matrices: set[str], others: set[str]) -> None:
    model, _ = build_model(family_config(family))
    stepped = {id(parameter) for parameter in matrices_of(muon(model))}
    named = [(name.removesuffix(".weight"), id(one), one.dim()) for name, one in model.named_parameters()]
    assert all(dimensions == 2 for _, one, dimensions in named if one in stepped)
    of_muon, of_adamw = ([name for name, one, _ in named if (one in stepped) is chosen] for chosen in (True, False))
    assert all(any(f".{name}".endswith(f".{end}") for end in matrices) for name in of_muon)
    assert all(any(f".{name}".endswith(f".{end}") for name in of_muon) for end in matrices)
    assert all(any(f".{name}".endswith(f".{end}") for name in of_adamw) for end in others)


@pytest.mark.usefixtures("alone")
def test_muon_is_refused_for_a_model_without_a_matrix_in_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build_model(SIZES["smollm3_debug"])
    monkeypatch.setattr("recipes.optimization.optimizer.blocks_of", lambda model: [])
    with pytest.raises(UserError, match='"muon": the blocks of this model have no matrix; write name = "adamw"'):
        muon(model)


@pytest.mark.usefixtures("alone")
def test_matrices_have_a_learning_rate_of_their_own() -> None:
    model, _ = build_model(SIZES["smollm3_debug"])
    *others, matrices = muon(model).param_groups
    assert matrices["lr"] == 0.01 and [group["lr"] for group in others] == [0.004]
    assert CONFIG.lr * matrices["lr_share"] == pytest.approx(0.01)
