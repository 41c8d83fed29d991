"""Which parameters decay, the effect of each group's settings, and moments in bfloat16."""

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from models.sizes import SIZES
from parallel.config import Float8Config, FSDPConfig
from parallel.errors import UserError
from parallel.float8 import precompute_scales
from parallel.fsdp import plain_name, without_wrapper
from parallel.passes import Passes
from recipes.optimization.config import OPTIMIZERS, OptimizerConfig, OptimizerFacts
from recipes.optimization.optimizer import build_optimizer, require_as_described
from recipes.optimization.skip_steps import take_step
from tests.build import NO_FLOAT8, build_model, cpu_mesh
from tests.families import family_config
from tests.recipes.checkpoint.small import checkpoints_in
from tests.sources import ROOT

CONFIG = OptimizerConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5)
TENSORWISE = Float8Config(recipe="tensorwise", all_gather=True, emulate=True)
MATRICES = [f"attention.{letter}_proj" for letter in "qkvo"] + [
    f"feed_forward.{part}_proj" for part in ("gate", "up", "down")
]
T5_DISTANCES = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


pytestmark = pytest.mark.usefixtures("alone")


def build(size: str, *, mode: str = "none") -> nn.Module:
    """A model of this size with two layers."""
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


@pytest.mark.parametrize("size", ["smollm3_debug", "llama3_debug"], ids=["tied", "untied"])
def test_embeddings_decay_where_the_recipe_asks_for_it(size: str) -> None:
    model = build(size)
    decayed, undecayed = build_optimizer(model, replace(CONFIG, decay_embeddings=True)).param_groups
    assert "embedding.weight" in names(model, decayed)
    assert all(parameter.dim() == 1 for parameter in undecayed["params"])


def test_norms_decay_where_the_recipe_asks_for_it() -> None:
    model = build("smollm3_debug")
    decayed, undecayed = build_optimizer(model, replace(CONFIG, decay_norms=True)).param_groups
    assert names(model, undecayed) == {"embedding.weight"}
    assert {"norm.weight", "blocks.0.attention_norm.weight"} <= names(model, decayed)


@pytest.mark.parametrize(
    ("family", "embeddings"),
    [
        ("gpt2", {"model.transformer.wte.weight", "model.transformer.wpe.weight"}),
        ("t5", {"model.shared.weight", *(f"model.{stack}.{T5_DISTANCES}" for stack in ("encoder", "decoder"))}),
    ],
)
def test_embeddings_of_positions_and_distances_do_not_decay(family: str, embeddings: set[str]) -> None:
    model, _ = build_model(family_config(family))
    decayed, undecayed = build_optimizer(model, CONFIG).param_groups
    assert {name for name in names(model, undecayed) if model.get_parameter(name).dim() >= 2} == embeddings
    assert all(parameter.dim() >= 2 for parameter in decayed["params"])


def test_settings_come_from_the_recipe_and_the_kernel_is_fused() -> None:
    optimizer = build_optimizer(build("smollm3_debug"), CONFIG)
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.9), 1e-6)
        assert group["fused"] is True and not group["amsgrad"] and not group["maximize"]


# Moments in bfloat16

HALF = replace(CONFIG, state_dtype="bfloat16", weight_decay=0.1)
# Largest distance after many steps from the result with float32 moments, relative to the distance travelled: a step's
# moments are off by at most 2^-9, and the errors of different steps point in different directions.
PATH_TOLERANCE = 1e-2


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, first: int = 0) -> list[torch.Tensor]:
    """Step along random gradients of several sizes, the same for every optimizer. Returns the parameters afterwards."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.to_local().copy_(torch.randn(parameter.shape, generator=generator) * 10 ** (step % 3 - 3))
        optimizer.step()
    return [parameter.detach().to_local().clone() for parameter in model.parameters()]


def test_moments_in_bfloat16_are_stored_in_two_bytes_and_sharded_like_their_parameters() -> None:
    model = build("llama3_debug")
    optimizer = build_optimizer(model, HALF)
    take_steps(model, optimizer, steps=1)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert parameter.dtype == torch.float32
        assert {name: value.dtype for name, value in state.items()} == {
            "step": torch.float32,
            "exp_avg": torch.bfloat16,
            "exp_avg_sq": torch.bfloat16,
        }
        assert state["exp_avg"].placements == parameter.placements


def test_steps_equal_the_formula_with_moments_rounded_after_each_step() -> None:
    model = build("smollm3_debug")
    parameter = next(iter(model.parameters()))
    optimizer = build_optimizer(model, HALF)
    decay = next(g["weight_decay"] for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    p = parameter.detach().to_local().clone().double()
    first = second = torch.zeros_like(p)
    for step in range(1, 6):
        take_steps(model, optimizer, steps=1, first=step)
        gradient = parameter.grad.to_local().double()
        first, second = first.lerp(gradient, 0.2), second.lerp(gradient.square(), 0.1)
        size = (second / (1 - 0.9**step)).sqrt() + 1e-6
        p = p * (1 - 0.01 * decay) - 0.01 * first / (1 - 0.8**step) / size
        first, second = (moment.float().bfloat16().double() for moment in (first, second))
    assert torch.allclose(parameter.to_local().double(), p, rtol=0, atol=1e-4)


def test_many_steps_with_bfloat16_moments_stay_close_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.optimization.adamw.BATCH", 50_000)  # several batches, some of one large tensor
    one, other = build("smollm3_debug"), build("smollm3_debug")
    start = [parameter.detach().to_local().clone() for parameter in one.parameters()]
    found = take_steps(one, build_optimizer(one, HALF), steps=60)
    expected = take_steps(other, build_optimizer(other, replace(HALF, state_dtype="float32")), steps=60)
    for a, b, began in zip(found, expected, start, strict=True):
        assert 0 < (a - b).norm() < PATH_TOLERANCE * (b - began).norm()


def test_a_checkpoint_restores_bfloat16_moments(tmp_path: Path) -> None:
    model = build("llama3_debug")
    optimizer = build_optimizer(model, HALF)
    take_steps(model, optimizer, steps=3)
    checkpoints_in(tmp_path, keep=1).save(model, optimizer, step=3)
    expected = take_steps(model, optimizer, steps=3, first=3)

    again = build("llama3_debug")
    resumed = build_optimizer(again, HALF)
    checkpoints_in(tmp_path, keep=1).load(again, resumed, step=3)
    assert {state["exp_avg"].dtype for state in resumed.state.values()} == {torch.bfloat16}
    assert all(map(torch.equal, take_steps(again, resumed, steps=3, first=3), expected))


@pytest.mark.parametrize("float8", [NO_FLOAT8, TENSORWISE], ids=["plain", "float8"])
def test_steps_equal_those_of_torchs_adamw_to_the_bit(float8: Float8Config) -> None:
    states = []
    for own in (False, True):
        model, _ = build_model(replace(SIZES["smollm3_debug"], layers=2), float8=float8, fsdp=FSDPConfig())
        ours = build_optimizer(model, CONFIG)
        optimizer = ours if own else torch.optim.AdamW(ours.param_groups, lr=0.01, fused=True)
        tokens = torch.randint(4096, (2, 17), generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            (model(tokens[:, :-1], tokens[:, 1:]) / 32).backward()
            optimizer.step()
            optimizer.zero_grad()
            if float8.all_gather:
                precompute_scales(model)
        states.append(optimizer.state_dict())
    theirs, mine = states
    assert {key for group in theirs["param_groups"] for key in group} == {
        key for group in mine["param_groups"] for key in group
    }
    assert theirs["state"].keys() == mine["state"].keys()
    for number, state in theirs["state"].items():
        assert state.keys() == mine["state"][number].keys()
        for name, value in state.items():
            other = mine["state"][number][name]
            assert (type(other), other.dtype, other.device) == (type(value), value.dtype, value.device), name
            assert torch.equal(_whole(other), _whole(value)), name


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return without_wrapper(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


# The contract of every optimizer, of those to come as well


class Mine(torch.optim.SGD):
    """One that knows nothing of found_inf and grad_scale."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig, **_: Any) -> None:
        super().__init__(groups, lr=config.lr, momentum=0.9)


class Deaf(Mine):
    """One that says that it reads them, and does not."""

    found_inf = grad_scale = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.found_inf = self.grad_scale = None  # torch's own raises if it does not read what is set
        super().step()


class Stubborn(Mine):
    """One that keeps the learning rate that it was built with."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1
        super().step()


class Greedy(Mine):
    """One that takes the first of the groups alone."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig, **options: Any) -> None:
        super().__init__(groups[:1], config, **options)


class Fussy(Mine):
    """One whose builder takes less than it is given."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        super().__init__(groups, config)


def facts(kind: type, **described: Any) -> OptimizerFacts:
    return OptimizerFacts(f"{__name__}:{kind.__name__}", reads=(), **described)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "mine", facts(Mine, moments=1))


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "mine"])
def test_every_optimizer_is_as_described_clips_and_leaves_a_bad_step_out(name: str, state_dtype: Any) -> None:
    """On shards, to the bit: parameters, moments and counts."""
    config = replace(CONFIG, name=name)
    if "state_dtype" in config.facts.reads:
        config = replace(config, state_dtype=state_dtype)
    require_as_described(config)
    results = []
    for inside in (False, True):
        model = build("smollm3_debug")
        optimizer = build_optimizer(model, config, cpu_mesh())
        for step, bad in enumerate((False, True, False)):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator) * (math.nan if bad else 1)
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad.to_local().copy_(gradient if inside else gradient / 3)
            skip, divisor = torch.tensor(float(bad)), torch.tensor(3.0) if inside else None
            if inside or not bad:
                take_step(optimizer, model.parameters(), skip=skip, divisor=divisor)
        states = [value for state in optimizer.state.values() for value in state.values()]
        results.append([_whole(tensor).clone() for tensor in (*model.parameters(), *states)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("described", "refusal"),
    [
        (facts(Mine, moments=2), "promises 32 bytes of four numbers, but it keeps 16; correct moments"),
        (facts(Mine, moments=1, counts_steps=True), "promises 20 bytes of four numbers, but it keeps 16"),
        (facts(Mine, moments=1, skips=True), "says skips = True, but it lacks found_inf and grad_scale"),
        (facts(Deaf, moments=1), "says skips = False, but it has found_inf and grad_scale"),
        (facts(Deaf, moments=1, skips=True), "does not read both found_inf and grad_scale; write False"),
        (facts(Stubborn, moments=1), "its step does not read the learning rate of each group"),
        (facts(Fussy, moments=1), "which builds nothing: .*unexpected keyword argument 'matrices'"),
        (
            OptimizerFacts("recipes.optimization.lost:Lost", reads=(), moments=1),
            "which builds nothing: No module named",
        ),
        (facts(Greedy, moments=1), "leaves 6 parameters untrained, such as embedding.weight"),
    ],
)
def test_an_optimizer_that_is_not_as_described_is_refused_by_name(
    described: OptimizerFacts, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "mine", described)
    with pytest.raises(UserError, match=f'optimizer.name = "mine": .*{refusal}'):
        config = OptimizerConfig(name="mine")
        require_as_described(config)
        build_optimizer(build("smollm3_debug"), config)


def test_a_step_before_the_gradients_of_the_last_one_are_gone_is_refused() -> None:
    """Summed twice, they would lie in memory that is used again (parallel/fsdp.py, Gather)."""
    model, _ = build_model(replace(SIZES["smollm3_debug"], layers=1))
    passes = Passes(model, cpu_mesh(), reshards=True, has_z_loss=False)
    tokens = torch.ones(1, 9, dtype=torch.int64)
    run = partial(passes.run, [(tokens, tokens, None)], torch.tensor(9), step=1, progressed=lambda: None)
    run()
    with pytest.raises(AssertionError, match="a step without zero_grad"):
        run()
    model.zero_grad()
    run()


def test_few_files_outside_their_owner_name_an_optimizer() -> None:
    """What a new optimizer reaches. The others ask OptimizerFacts."""
    naming = re.compile(r"""optimizer\.name\b|["'](adamw|muon)["']""")
    files = [file for room in ("models", "parallel", "recipes", "scripts") for file in (ROOT / room).rglob("*.py")]
    elsewhere = [file for file in files if file.parent.name != "optimization" and naming.search(file.read_text())]
    assert len(elsewhere) <= 10, elsewhere
