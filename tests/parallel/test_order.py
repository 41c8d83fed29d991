"""What parallelize() leaves on the modules, and what it computes, in real processes."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from models.config import ModelConfig
from models.decoder import Decoder
from models.sizes import SIZES
from parallel.config import Float8Config, FSDPConfig, MeshConfig
from parallel.dist import start, stop
from parallel.errors import UserError
from parallel.float8 import convert_linears, precompute_scales
from parallel.fsdp import plain_name
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from tests.build import build_model
from tests.compiling import graphs_only
from tests.processes import run_processes

EVERYTHING = Path(__file__).parents[2] / "configs" / "smollm3_debug_everything.toml"
DEBUG = SIZES["smollm3_debug"]
FLOAT8 = Float8Config(recipe="tensorwise", emulate=True)


def build(config=DEBUG, **parts):
    return build_model(config, **parts)


def everything_on() -> dict[str, dict]:
    """What one rank finds on the debug models with every part of the everything recipe, by model."""
    start("cpu", seed=0)
    # Also on a tied model with blocks of two kinds; it takes no step, which would compile both.
    with graphs_only():
        found = {name: facts_of(name, load(EVERYTHING)) for name in ("smollm3_debug", "llama3_debug")}
    stop()
    return found


def facts_of(name: str, recipe: Recipe) -> dict:
    model, report = build(
        SIZES[name],
        mesh=recipe.mesh,
        float8=recipe.float8,
        mode=recipe.activation_checkpointing.mode,
        compiled=recipe.compile.enabled,
        fsdp=recipe.fsdp,
    )
    with torch.device("meta"):
        plain = Decoder(SIZES[name])
    parameters = list(model.parameters())
    linears = [module for module in model.modules() if isinstance(module, Float8Linear)]
    gathered = [linear.weight._local_tensor for linear in linears]  # what FSDP asks for its float8 form
    facts = {
        "report": report,
        "root": isinstance(model, FSDPModule),
        "blocks": [isinstance(block, FSDPModule) for block in model.blocks],
        "wrapped": [isinstance(block, CheckpointWrapper) for block in model.blocks],
        "compiled": [block._compiled_call_impl is not None for block in model.blocks],
        "float8": sorted(
            plain_name(name) for name, module in model.named_modules() if isinstance(module, Float8Linear)
        ),
        "emulated": all(linear.config.emulate for linear in linears),
        "gathered": all(isinstance(weight, WeightWithDynamicFloat8CastTensor) for weight in gathered),
        "same_keys": list(model.state_dict()) == list(plain.state_dict()),
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
        "mesh_axes": {parameter.device_mesh.mesh_dim_names for parameter in parameters},
        "local_share": sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters),
        "master_dtypes": {str(parameter.dtype) for parameter in parameters},
    }
    if name == "llama3_debug":
        seen = {}
        model.blocks[1].register_forward_hook(lambda module, inputs, output, seen=seen: seen.update(it=output.dtype))
        x = torch.zeros(2, 64, dtype=torch.int64)
        model(x, x).backward()
        facts["compute_dtype"] = str(seen["it"])
        facts["gradient_dtypes"] = {str(parameter.grad.dtype) for parameter in parameters}
    before = [weight._precomputed_scale for weight in gathered]
    precompute_scales(model)
    facts["scales"] = (before, [float(weight._precomputed_scale) for weight in gathered])
    largest = [linear.weight.full_tensor().abs().max().item() for linear in linears]
    facts["expected_scales"] = [torch.finfo(torch.float8_e4m3fn).max / value for value in largest]
    return facts


@pytest.fixture(scope="module")
def everything() -> list[tuple[str, dict]]:
    """(model, what a rank found on it) for each of 2 x 2 ranks and each model."""
    return [pair for found in run_processes(4, everything_on) for pair in found.items()]


@pytest.mark.slow
def test_fsdp_shards_every_block_and_the_root_within_each_replica(everything: list[tuple[str, dict]]) -> None:
    for _, facts in everything:
        assert facts["root"] and facts["blocks"] == [True] * 4
        assert facts["sharded"]
        assert facts["mesh_axes"] == {("replicate", "shard")}
        assert facts["local_share"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
def test_every_block_is_checkpointed_and_compiled(everything: list[tuple[str, dict]]) -> None:
    for _, facts in everything:
        assert facts["wrapped"] == facts["compiled"] == [True] * 4


@pytest.mark.slow
def test_float8_converts_every_linear_of_the_blocks_and_leaves_lm_head_alone(
    everything: list[tuple[str, dict]],
) -> None:
    for _, facts in everything:
        assert len(facts["float8"]) == 4 * 7 and "lm_head" not in facts["float8"]
        assert facts["float8"][:2] == ["blocks.0.attention.k_proj", "blocks.0.attention.o_proj"]
        assert facts["emulated"] and facts["gathered"]


@pytest.mark.slow
def test_wrapping_renames_no_parameter(everything: list[tuple[str, dict]]) -> None:
    assert all(facts["same_keys"] for _, facts in everything)


@pytest.mark.slow
def test_blocks_compute_in_bfloat16_on_float32_parameters_and_gradients(everything: list[tuple[str, dict]]) -> None:
    stepped = [facts for name, facts in everything if name == "llama3_debug"]
    assert len(stepped) == 4
    for facts in stepped:
        assert facts["master_dtypes"] == {"torch.float32"} == facts["gradient_dtypes"]
        assert facts["compute_dtype"] == "torch.bfloat16"


@pytest.mark.slow
def test_scales_of_sharded_weights_come_from_the_whole_weight(everything: list[tuple[str, dict]]) -> None:
    for _, facts in everything:
        before, after = facts["scales"]
        assert set(before) == {None}
        assert after == pytest.approx(facts["expected_scales"], rel=1e-5)


@pytest.mark.slow
def test_the_report_names_every_part(everything: list[tuple[str, dict]]) -> None:
    for name, facts in everything:
        linears = 29 if name == "llama3_debug" else 28
        assert facts["report"] == [
            f"float8: tensorwise, 28 of {linears} linears converted, float8 all-gather, emulated",
            "activation checkpointing: selective, keeps matmul and attention outputs",
            "compile: 4 blocks and the loss in place, during the first step",
            "fsdp: ZeRO-3 over 2 x 2 replicas, bfloat16 compute, float32 reduction",
        ]


def test_a_recipe_without_options_gets_only_fsdp(alone) -> None:
    model, report = build()
    assert report[:3] == ["float8: off", "activation checkpointing: off", "compile: off"]
    assert type(model.blocks[0]).__name__ == "FSDPBlock"
    assert all(type(module) is nn.Linear for module in model.modules() if isinstance(module, nn.Linear))


def attention_flops(query, key, value, *args, out_shape=None, **kwargs) -> int:
    return 2 * 2 * math.prod(query) * key[-2]


# torch counts the matrix products by itself, but not the CPU's attention kernel: before 2.15, in neither pass.
CPU_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}


def flops(mode: str) -> tuple[int, int]:
    """(forward, backward) FLOPs of a step; attention counts where it is computed forward, recomputation included."""
    model, _ = build(mode=mode)
    x = torch.zeros(1, 64, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as forward:
        loss = model(x, x)
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_checkpointing_costs_the_backward_flops_that_it_says(alone) -> None:
    """Full repeats the forward pass of the blocks; selective repeats no matrix product and no attention."""
    none, selective, full = (flops(mode) for mode in ("none", "selective", "full"))
    tokens = 64
    attention = 2 * 2 * DEBUG.layers * DEBUG.heads * DEBUG.head_width * tokens * tokens
    assert none[0] == selective[0] == full[0] == 2 * tokens * DEBUG.matmul_params() + attention
    counted = 2.5 * attention if torch.__version__ >= "2.15" else 0  # five products instead of two
    assert none[1] == selective[1] == 2 * 2 * tokens * DEBUG.matmul_params() + counted
    # Recomputation stops before a block's last product, because nothing needs its output.
    lm_head = 2 * tokens * DEBUG.vocabulary * DEBUG.width
    last_products = 2 * tokens * DEBUG.layers * DEBUG.feed_forward_width * DEBUG.width
    assert full[1] == none[1] + none[0] - lm_head - last_products


def losses(mode: str) -> list[bytes]:
    model, _ = build(mode=mode)
    x = torch.randint(0, DEBUG.vocabulary, (2, 65), generator=torch.Generator().manual_seed(3))
    loss = model(x[:, :-1], x[:, 1:])
    loss.backward()
    gradients = [parameter.grad.to_local().numpy().tobytes() for parameter in model.parameters()]
    return [loss.detach().numpy().tobytes(), *gradients]


def test_checkpointing_changes_no_bit_of_loss_and_gradients(alone) -> None:
    assert losses("none") == losses("selective") == losses("full")


def initial_states(cases: list[tuple[MeshConfig, str]]) -> list[dict]:
    start("cpu", seed=0)
    models = [build(mesh=mesh, fsdp=FSDPConfig(), mode=mode, seed=5)[0] for mesh, mode in cases]
    states = [{name: value.full_tensor().numpy() for name, value in model.state_dict().items()} for model in models]
    stop()
    return states


@pytest.mark.slow
def test_initial_weights_depend_only_on_seed_and_parameter_name() -> None:
    [[reference]] = run_processes(1, initial_states, [(MeshConfig(), "none")])
    for states in run_processes(3, initial_states, [(MeshConfig(), "full"), (MeshConfig(3, 1), "none")]):
        for state in states:
            assert state.keys() == reference.keys()
            assert all((state[name] == reference[name]).all() for name in reference)
    first, second = (reference[f"blocks.{layer}.attention.q_proj.weight"] for layer in range(2))
    assert (first != second).any()


def test_another_seed_gives_other_weights(alone) -> None:
    one, two = (build(seed=seed)[0].embedding.weight.to_local() for seed in (1, 2))
    assert not torch.equal(one, two)


@pytest.mark.slow
def test_symmetric_memory_is_refused_on_a_cpu_and_by_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = FSDPConfig(symmetric_memory=True)
    start("cpu", seed=0)
    try:
        if torch.__version__ >= "2.12":
            with pytest.raises(
                UserError, match=r"needs GPUs, and the device is a cpu; write fsdp.symmetric_memory = f"
            ):
                build(fsdp=asked)
        monkeypatch.delattr(FSDPModule, "set_symm_mem_for_comm", raising=False)
        with pytest.raises(UserError, match=r"needs torch 2.12 or later"):
            build(fsdp=asked)
    finally:
        stop()


def gathered_ahead(prefetch: int) -> tuple[list[int], list[bytes]]:
    """Which blocks each block prefetches in the forward pass, and the gradients."""
    start("cpu", seed=0)
    model, _ = build(fsdp=FSDPConfig(param_dtype="float32", prefetch=prefetch))
    x = torch.randint(0, DEBUG.vocabulary, (2, 65), generator=torch.Generator().manual_seed(3))
    model(x[:, :-1], x[:, 1:]).backward()
    states = [block._get_fsdp_state() for block in model.blocks]
    asked = [[states.index(state) for state in own._states_to_forward_prefetch] for own in states]
    gradients = [parameter.grad.to_local().numpy().tobytes() for parameter in model.parameters()]
    stop()
    return asked, gradients


@pytest.mark.slow
def test_prefetching_more_blocks_changes_no_bit_of_the_gradients() -> None:
    one, three = run_processes(2, gathered_ahead, 1), run_processes(2, gathered_ahead, 3)
    for (asked_one, gradients_one), (asked_three, gradients_three) in zip(one, three, strict=True):
        assert (asked_one, asked_three) == ([[1], [2], [3], []], [[1, 2, 3], [2, 3], [3], []])
        assert gradients_one == gradients_three


def test_weights_are_not_gathered_in_float8_by_processes_that_cannot_share_their_rows_equally() -> None:
    """Also where no --check knew their number: started by torchrun, or resumed on others."""
    with pytest.raises(UserError, match=r"3 processes cannot share the \d+ rows of blocks.0.attention.q_proj equally"):
        convert_linears(Decoder(DEBUG), replace(FLOAT8, all_gather=True), device_type="cpu", shards=3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiled_blocks_cast_an_input_that_several_linears_share_once(recipe: str) -> None:
    """q, k and v read one float8 copy of their input, gate and up another, in the graph for which code is generated."""
    model = Decoder(replace(DEBUG, layers=1))
    convert_linears(model, Float8Config(recipe=recipe, emulate=True), device_type="cpu")
    model.to(torch.bfloat16)
    casts: list[tuple[int, ...]] = []

    def note_casts(graph: torch.fx.GraphModule, _: list, **options: Any) -> torch.fx.GraphModule:
        nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)
        casts.extend(tuple(node.meta["val"].shape) for node in nodes if node.args[1] == torch.float8_e4m3fn)
        return graph

    model.blocks[0].compile(fullgraph=True, backend=partial(compile_fx, inner_compile=note_casts))
    x = torch.randint(0, DEBUG.vocabulary, (2, 49), generator=torch.Generator().manual_seed(3))
    model(x[:, :-1], x[:, 1:])
    assert casts.count((2 * 48, DEBUG.width)) == 3  # inputs of q, k, v; of o; of gate, up
    assert casts.count((2 * 48, DEBUG.feed_forward_width)) == 1  # of down


# Refusals: what the recipe asks for happens, or parallelize() raises.


def test_float8_exclusions_match_whole_components_of_names(alone) -> None:
    _, report = build(float8=replace(FLOAT8, exclude=("k_proj", "v_proj")))
    assert report[0].startswith("float8: tensorwise, 20 of 28 linears")


@pytest.mark.parametrize(
    ("model", "float8", "message"),
    [
        (DEBUG, Float8Config(recipe="tensorwise"), r"no float8 matrix units.*emulate = true"),
        (DEBUG, replace(FLOAT8, exclude=("blocks",)), "would convert none of the 28 linears"),
        (
            DEBUG,
            replace(FLOAT8, exclude=("lm_head", "o_projj", "proj")),
            r"\['o_projj', 'proj'\], but no linear is called so: attention, blocks, down_proj",
        ),
        (
            SIZES["llama3_debug"],
            replace(FLOAT8, all_gather=True, exclude=()),
            "gloo cannot gather lm_head in float8",
        ),
        (replace(DEBUG, feed_forward_width=392), FLOAT8, r"gate_proj \(128 -> 392\)"),
    ],
)
def test_float8_that_cannot_be_as_asked_is_refused(
    model: ModelConfig, float8: Float8Config, message: str, alone
) -> None:
    with pytest.raises(UserError, match=message):
        build(model, float8=float8)


def test_compile_without_a_cpp_compiler_is_refused(alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"C\+\+ compiler.*no-such-compiler"):
        build(compiled=True)
