"""Models of transformers train as they do without us: losses and gradients of plain transformers and torch's AdamW.

All meshes and options for all families, which takes minutes, are compared by `pytest -m exhaustive` on this file.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from models.transformers import TransformersModel, stored_layout
from models.transformers_config import TransformersConfig
from parallel.config import Float8Config
from parallel.dist import World, start, stop
from parallel.errors import CorruptState, UserError
from parallel.float8 import convert_linears
from parallel.fsdp import plain_name
from parallel.mesh import build_mesh
from parallel.passes import sum_over_group
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from recipes.training.build import Built, build
from recipes.training.step import require_sound_state, train_step
from tests.compiling import compiling_in_turn, graphs_only
from tests.families import FAMILIES, batch_for, family_config, rows_of
from tests.meshes import mesh_degrees
from tests.parallel.combinations import FLOAT8, degrees_of, options_of, sections_of
from tests.processes import run_processes
from tests.training import DEBUG, change

STEPS, SLOW_STEPS, SEED, RATE, CLIP = 2, 10, 3, 1e-3, 1.0


class Limits(NamedTuple):
    """How far a run may be from plain transformers in float32."""

    loss: float
    """Of each of the losses, absolute."""
    gradient: float
    """Of each parameter's gradient in the first step: the norm of the difference, relative."""


FLOAT32 = Limits(1e-5, 1e-4)
BFLOAT16 = Limits(0.1, 0.15)  # measured: 0.06 of a loss of 27, 0.09
FLOAT8_LIMITS = Limits(0.6, 0.5)  # measured: 0.4 of a loss of 27, 0.3; the emulation itself is compared below

CORE = {
    "1.1.1.1:": [*FAMILIES],
    "1.1.1.1:accumulate": ["gpt2", "t5"],
    "1.2.1.1:": [*FAMILIES],
    "1.2.1.1:zero2,accumulate,chunks": ["t5_gated", "gemma2"],
    "1.2.1.1:selective": ["t5", "qwen3"],
    "1.2.1.1:full,half": ["gpt2", "gemma2"],
    "1.2.1.1:offload,prefetch": ["t5", "mistral"],
    "1.2.1.1:bf16": ["gpt2", "t5_gated"],
    "1.2.1.1:tensorwise,all_gather": ["t5", "qwen3"],
    "1.2.1.1:rowwise,full": ["t5_gated", "mistral"],
    "2.2.1.1:": ["gpt2", "t5"],
    "2.2.1.1:offload,selective": ["qwen3", "gemma2"],
}
"""Case -> families: every family on one and on two processes, every option with two families that differ much."""
QUICK = [(name, case) for case, names in CORE.items() for name in names]
QUICK += [("gpt2", "1.1.1.1:compile,selective"), ("mistral", "1.1.1.1:compile")]
GENERATED = ("mistral", "1.1.1.1:compile")
"""The case that runs generated code; of the others that are compiled, only those in SLOW do."""
SLOW = """
1.1.1.1  accumulate
1.2.1.1  zero2,accumulate,chunks selective full,half offload,prefetch bf16 tensorwise,all_gather rowwise,full
2.2.1.1  plain offload,selective
1.1.1.1  selective full offload compile compile,selective compile,full
2.1.1.1  plain zero2,accumulate full
1.2.1.1  full chunks offload selective,offload tensorwise rowwise rowwise_with_gw_hp,selective bf16,reduce16,zero2
1.2.1.1  compile compile,selective compile,full compile,bf16 compile,tensorwise zero2,accumulate,compile,offload
1.4.1.1  plain full zero2,accumulate
2.2.1.1  zero2,accumulate,chunks compile,selective bf16 tensorwise,all_gather
"""


def cases_of(text: str) -> list[tuple[str, str]]:
    """(family, case) of each."""
    found = []
    for mesh, *of_mesh in filter(None, map(str.split, text.splitlines())):
        found += [(name, f"{mesh}:{case}".removesuffix("plain")) for case in of_mesh for name in FAMILIES]
    return [one for one in found if not (one[0].startswith("t5") and is_refused(options_of(one[1])))]


def is_refused(options: set[str]) -> bool:
    """Compiled and computed again, which torch cannot do for a T5 on a CPU."""
    return "compile" in options and not options.isdisjoint({"selective", "full"})


def limits_of(case: str) -> Limits:
    options = options_of(case)
    return FLOAT8_LIMITS if options & {*FLOAT8} else BFLOAT16 if "bf16" in options else FLOAT32


def initial_state(config: TransformersConfig) -> dict[str, Tensor]:
    """transformers' names and layouts of what a run with SEED starts from."""
    with torch.device("meta"):
        model = TransformersModel(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    values = model.initial_values(shapes, seed=SEED, device=torch.device("cpu"))
    layout = stored_layout(config).tensors
    return {layout[name].name: value.t() if layout[name].transposed else value for name, value in values}


def plain_transformers(config: TransformersConfig) -> nn.Module:
    """The model as transformers makes it, with eager attention, without dropout, and with what a run starts from."""
    theirs = CONFIG_MAPPING[config.settings["model_type"]].from_dict(config.settings)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(theirs, attn_implementation="eager").eval()
    state = initial_state(config)
    if "lm_head.weight" in state:  # which transformers never builds for a T5, but reads from a file
        model.lm_head.weight = nn.Parameter(state["lm_head.weight"].clone())
    with torch.no_grad():
        for name, value in state.items():
            model.get_parameter(name).copy_(value)
    return model


def train_plainly(config: TransformersConfig, model: nn.Module | None = None, *, steps: int = STEPS) -> dict[str, Any]:
    """Losses, norms and the first gradients, in our names and layouts."""
    model = model or plain_transformers(config)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed = [p for p in model.parameters() if p.dim() >= 2 and p not in embeddings]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2 or p in embeddings], "weight_decay": 0.0},
        ],
        lr=RATE,
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )
    losses, norms, gradients = [], [], {}
    for step in range(1, steps + 1):
        inputs, targets = batch_for(config, step)
        given: dict[str, Any] = {"input_ids": inputs}
        if config.is_encoder_decoder:
            given = {"input_ids": inputs.encoder_tokens, "attention_mask": inputs.encoder_mask.long()}
            given["decoder_input_ids"] = inputs.decoder_tokens
        loss = cross_entropy(model(**given).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        if not gradients:
            layout, named = stored_layout(config).tensors, dict(model.named_parameters())
            found = {name: named[stored.name].grad for name, stored in layout.items() if stored.name in named}
            gradients = {n: (g.t() if layout[n].transposed else g).numpy().copy() for n, g in found.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "gradients": gradients}


def built_for(config: TransformersConfig, case: str, recipe: Recipe, world: World) -> Built:
    sections = {section: fields for section, fields in sections_of(case).items() if section != "model"}
    sections["optimizer"] |= {"weight_decay": 0.1, "grad_clip": CLIP}
    sections["run"] |= {"seed": SEED}
    recipe = change(recipe, **sections)
    mesh = build_mesh(mesh_degrees(degrees_of(case)), device_type="cpu")
    return build(replace(recipe, model=config), world, mesh=mesh)


def step_of(
    built: Built, config: TransformersConfig, step: int, guard: StepGuard, clock: RunClock, *, parts: int = 1
) -> Any:
    """One optimizer step on this process's share of the batch, in so many micro-batches: loss and norm."""
    inputs, targets = batch_for(config, step)
    own = slice(built.mesh.data_rank, None, built.mesh.data_ranks)
    inputs, targets = rows_of(inputs, own), targets[own]
    micro_batches = [(rows_of(inputs, slice(n, None, parts)), targets[n::parts], None) for n in range(parts)]
    return train_step(built, micro_batches, step=step, learning_rate=RATE, guard=guard, clock=clock)


def train_ours(
    name: str, case: str, recipe: Recipe, world: World, *, steps: int = STEPS, dropout: bool = False
) -> dict[str, Any]:
    config = family_config(name, dropout=dropout)
    built = built_for(config, case, recipe, world)
    gradients: dict[str, Any] = {}

    def keep(*_: Any) -> None:
        if not gradients:  # clipped, as the optimizer's kernel does
            divisor = built.optimizer.grad_scale
            found = {plain_name(name): one.grad.full_tensor() / divisor for name, one in built.model.named_parameters()}
            gradients.update({name: gradient.numpy().copy() for name, gradient in found.items()})

    built.optimizer.register_step_pre_hook(keep)
    guard = StepGuard(built.mesh, device=world.device, max_skipped_steps=3, loss_spike_z=50.0)
    clock = RunClock(world.device)
    parts = 4 // built.mesh.data_ranks if "accumulate" in options_of(case) else 1
    losses, norms = [], []
    for step in range(1, steps + 1):
        loss, norm, *_ = step_of(built, config, step, guard, clock, parts=parts)
        losses.append(sum_over_group(loss.clone(), built.mesh.loss_group).item())
        norms.append(norm.item())
    return {"losses": losses, "norms": norms, "gradients": gradients if world.rank == 0 else {}, "report": built.report}


def train_all(
    cases: list[tuple[str, str]], recipe: Recipe, steps: int = STEPS, dropout: bool = False
) -> list[dict[str, Any]]:
    world, found = start("cpu", seed=0), []
    for name, case in cases:
        torch._dynamo.reset()
        with compiling_in_turn() if steps == SLOW_STEPS or (name, case) == GENERATED else graphs_only():
            found.append(train_ours(name, case, recipe, world, steps=steps, dropout=dropout))
    stop()
    return found


def on_their_meshes(cases: list[tuple[str, str]], steps: int = STEPS) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Case -> what each of its processes found."""
    by_processes: dict[int, list[tuple[str, str]]] = {}
    for name, case in cases:
        by_processes.setdefault(math.prod(degrees_of(case)), []).append((name, case))
    found = {}
    for processes, todo in by_processes.items():
        answers = run_processes(processes, train_all, todo, load(DEBUG), steps)
        found |= dict(zip(todo, map(list, zip(*answers, strict=True)), strict=True))
    return found


@pytest.fixture(scope="module")
def quick() -> dict[tuple[str, str], list[dict[str, Any]]]:
    return on_their_meshes(QUICK)


@cache
def slow(mesh: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return on_their_meshes([(name, case) for name, case in cases_of(SLOW) if case.startswith(mesh)], SLOW_STEPS)


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    return {name: train_plainly(family_config(name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def plain_for_longer() -> dict[str, dict[str, Any]]:
    return {name: train_plainly(family_config(name), steps=SLOW_STEPS) for name in FAMILIES}


def relative_error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def require_same_training(case: str, found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    limits = limits_of(case)
    np.testing.assert_allclose(found[0]["losses"], expected["losses"], rtol=0, atol=limits.loss)
    assert all((one["losses"], one["norms"]) == (found[0]["losses"], found[0]["norms"]) for one in found)
    assert found[0]["gradients"].keys() == expected["gradients"].keys()
    errors = {name: relative_error(found[0]["gradients"][name], one) for name, one in expected["gradients"].items()}
    assert max(errors.values()) < limits.gradient, errors


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), QUICK)
def test_a_family_trains_as_in_plain_transformers(name: str, case: str, quick: Any, plain: Any) -> None:
    require_same_training(case, quick[name, case], plain[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "case"), cases_of(SLOW))
def test_every_mesh_trains_as_in_plain_transformers(name: str, case: str, plain_for_longer: Any) -> None:
    require_same_training(case, slow(case.partition(":")[0])[name, case], plain_for_longer[name])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("name", ["t5", "qwen3"])
def test_float8_is_torchaos_on_the_plain_model(name: str, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = family_config(name)
    model, settings = plain_transformers(config), Float8LinearConfig.from_recipe_name(recipe)
    settings = replace(settings, emulate=True)
    convert_to_float8_training(model, config=settings, module_filter_fn=lambda _, full: full != "lm_head")
    expected = train_plainly(config, model, steps=2)
    [[found]] = run_processes(1, train_all, [(name, f"1.1.1.1:{recipe}")], load(DEBUG), 2)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-4)
    errors = [relative_error(found["gradients"][full], one) for full, one in expected["gradients"].items()]
    assert np.median(errors) < 1e-3 and max(errors) < 5e-2, errors


def test_float8_counts_the_linears_whose_widths_it_cannot_take() -> None:
    with torch.device("meta"):
        model = TransformersModel(family_config("qwen3", intermediate_size=100))
    said = convert_linears(model, Float8Config(recipe="rowwise", emulate=True), device_type="cpu")
    assert "8 of 15 linears converted, 6 not because of widths that are no multiples of 16" in said


def test_float8_that_would_convert_nothing_is_refused() -> None:
    with torch.device("meta"):
        model = TransformersModel(family_config("gpt2", n_embd=72))
    with pytest.raises(UserError, match=r"none of the 8 linears.* leaves nothing whose widths are multiples of 16"):
        convert_linears(model, Float8Config(recipe="rowwise", emulate=True), device_type="cpu")


def test_a_tied_head_is_never_float8() -> None:
    with torch.device("meta"):
        model = TransformersModel(family_config("gpt2"))
    said = convert_linears(model, Float8Config(recipe="rowwise", emulate=True, exclude=()), device_type="cpu")
    assert "8 of 8 linears converted" in said and type(model.model.lm_head) is nn.Linear


@pytest.mark.slow
def test_checkpointed_blocks_drop_the_same_again() -> None:
    modes = ("accumulate", "accumulate,selective", "accumulate,full")
    cases = [(name, f"1.1.1.1:{mode}") for name in ("gpt2", "t5") for mode in modes]
    [found] = run_processes(1, train_all, cases, load(DEBUG), 2, True)
    for first in (0, len(modes)):
        kept, *recomputed = found[first : first + len(modes)]
        for other in recomputed:
            assert other["losses"] == kept["losses"]
            for full, gradient in kept["gradients"].items():
                np.testing.assert_allclose(other["gradients"][full], gradient, rtol=1e-5, atol=1e-7)


def random_numbers_of(steps: tuple[int, ...]) -> list[list[float]]:
    """What this process's two micro-batches draw in these steps with dropout, each in a run that takes no other."""
    world = start("cpu", seed=0)
    drawn = [random_numbers_of_run(step, world, state=number) for number, step in enumerate(steps)]
    stop()
    return drawn


def random_numbers_of_run(step: int, world: World, *, state: int) -> list[float]:
    config = family_config("gpt2", dropout=True)
    built = built_for(config, "1.2.1.1:", load(DEBUG), world)
    torch.manual_seed(state)  # another one in each run
    guard = StepGuard(built.mesh, device=world.device, max_skipped_steps=3, loss_spike_z=50.0)
    drawn: list[float] = []
    built.model.register_forward_pre_hook(lambda *_: drawn.append(torch.get_rng_state().sum().item()))
    step_of(built, config, step, guard, RunClock(world.device), parts=2)
    return drawn


@pytest.mark.slow
def test_dropout_draws_by_step_process_and_micro_batch_alone() -> None:
    found = run_processes(2, random_numbers_of, (5, 5, 6))
    assert all(first == again for first, again, _ in found)
    assert len({number for first, _, other in found for number in (*first, *other)}) == 8


def break_a_step() -> dict[str, Any]:
    """Parameters before and after a step with a NaN, and what the tripwire says of replicas that differ by one bit."""
    world, config = start("cpu", seed=0), family_config("gpt2")
    built = built_for(config, "2.1.1.1:", load(DEBUG), world)
    guard, clock = StepGuard(built.mesh, device=world.device, max_skipped_steps=3), RunClock(world.device)
    step_of(built, config, 1, guard, clock)
    before = [parameter.to_local().clone() for parameter in built.parameters]
    require_sound_state(built, world)
    handle = built.model.register_forward_hook(lambda *given: given[-1] * (math.nan if world.rank else 1))
    step_of(built, config, 2, guard, clock)
    handle.remove()
    unchanged = all(torch.equal(old, new.to_local()) for old, new in zip(before, built.parameters, strict=True))
    skipped = guard.skipped()
    weight = built.model.get_parameter("model.transformer.h.1.mlp.c_fc.weight").to_local()
    if world.rank:
        weight.view(torch.int32)[0, 0] ^= 1
    try:
        require_sound_state(built, world)
        said = ""
    except CorruptState as error:
        said = str(error)
    stop()
    return {"unchanged": unchanged, "skipped": [step for step, _ in skipped], "said": said}


@pytest.mark.slow
def test_a_step_with_nan_changes_nothing_and_the_tripwire_names_a_flipped_bit() -> None:
    for one in run_processes(2, break_a_step):
        assert one["unchanged"] and one["skipped"] == [2]
        assert "model.model.transformer.h.1.mlp.c_fc.weight differs between rank 0" in one["said"]
