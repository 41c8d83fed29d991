"""The predicted step: its pieces against numbers worked out by hand, and what a change of the recipe does to them."""

from dataclasses import replace

import pytest

from models.sizes import SIZES
from parallel.config import MeshDegrees
from parallel.errors import UserError
from recipes.plan.evidence import ROWS
from recipes.plan.hardware import GPUS, gpu_named
from recipes.plan.rates import RATES, Rates
from recipes.plan.time import StepTime, attention_seconds, product_seconds, step_time, time_of
from recipes.plan.work import work_of
from recipes.recipe.load import CONFIGS, load
from recipes.recipe.schema import Recipe

H100, H200 = GPUS["H100"], GPUS["H200"]
BASE = CONFIGS / "benchmarks/smollm3_3b_h100.toml"
PLAIN = ("--activation_checkpointing.mode", "none", "--activation_checkpointing.blocks", "all")
ZERO_2 = ("--fsdp.reshard_after_forward", "false")
ONE = MeshDegrees(replicate=1, shard=1)


def recipe(*words: str) -> Recipe:
    return load(BASE, [*PLAIN, "--fsdp.reshard_after_forward", "true", *words], rules=False)


def step(*words: str, degrees: MeshDegrees = ONE, rates: Rates = RATES) -> StepTime:
    return step_time(recipe(*words), degrees, gpu=H200, rates=rates)


def batch(sequences: int, micro_batch: int = 1) -> tuple[str, ...]:
    return ("--batch.global_batch_size", str(sequences), "--batch.micro_batch_size", str(micro_batch))


def sent(found: StepTime) -> dict[str, float]:
    """Seconds of messages, exposed and hidden."""
    names = [name for name in found.seconds if name.startswith("messages")]
    return {name: found.seconds[name] + found.hidden.get(name, 0.0) for name in {*names, *found.hidden}}


def test_pieces_add_up_to_the_step_and_tokens_per_second_are_per_device() -> None:
    found = step(*batch(16), degrees=MeshDegrees(replicate=1, shard=8))
    assert found.tokens == 2 * 8192
    assert found.step_seconds == pytest.approx(sum(found.seconds.values()))
    assert found.tokens_per_second == found.tokens / found.step_seconds


def test_a_large_product_reaches_the_share_of_the_peak_and_a_small_one_less() -> None:
    def share(rows: int, columns: int, inner: int) -> float:
        seconds = product_seconds(rows, columns, inner, gpu=H100, rates=RATES)
        return 2 * rows * columns * inner / seconds / H100.bf16_peak

    assert share(65536, 65536, 65536) == pytest.approx(RATES.products, rel=0.01)
    assert share(8192, 8192, 256) < 0.7 * RATES.products  # a short inner loop
    assert share(512, 512, 8192) < 0.2 * RATES.products  # fewer tiles than units
    assert 2 * 8 * 4096 * 4096 / share(8, 4096, 4096) / H100.bf16_peak >= 2 * 4096 * 4096 / H100.bandwidth


def test_products_in_float8_need_matrix_units_that_have_it() -> None:
    words = ("--float8.recipe", "tensorwise")
    assert step(*words).seconds["products"] < 0.65 * step().seconds["products"]
    with pytest.raises(UserError, match='A100 has no float8 matrix units; write "none"'):
        step_time(recipe(*words), ONE, gpu=gpu_named("a100"))


def test_attention_for_hopper_is_refused_on_an_older_gpu() -> None:
    with pytest.raises(UserError, match="runs on Hopper, and A100 is older"):
        step_time(recipe("--attention.backend", "flash3"), ONE, gpu=gpu_named("A100"))


def test_attention_takes_its_causal_flops_at_the_rate_of_its_kernel() -> None:
    found, model = step(*batch(1)), SIZES["smollm3_3b"]
    flops = 2 * 36 * model.heads * model.head_width * 8192 * 8192
    forward = flops * (1 + RATES.ramp / 8192) / (RATES.cudnn * H200.bf16_peak)
    assert found.seconds["attention"] == pytest.approx(forward * (1 + 2.5 / RATES.attention_backward))
    flash = step("--attention.backend", "flash", *batch(1)).seconds["attention"]
    assert flash == pytest.approx(found.seconds["attention"] * RATES.cudnn / RATES.flash)


def test_flash_attention_runs_relatively_faster_on_the_gpu_that_it_was_written_for() -> None:
    seconds = {
        name: attention_seconds(1e15, "flash", gpu=GPUS[name], rates=RATES)[0] for name in ("H100", "A100", "H100-500W")
    }
    assert seconds["H100"] < seconds["H100-500W"] < seconds["A100"]
    assert seconds["A100"] * GPUS["A100"].bf16_peak < seconds["H100"] * H100.bf16_peak


@pytest.mark.slow
def test_full_checkpointing_computes_products_and_attention_again() -> None:
    full = step("--activation_checkpointing.mode", "full")
    assert full.seconds["products"] / step().seconds["products"] == pytest.approx(1.24, abs=0.02)
    assert full.seconds["attention"] / step().seconds["attention"] == pytest.approx(1.25, abs=0.02)
    half = step("--activation_checkpointing.mode", "full", "--activation_checkpointing.blocks", "18")
    for piece in ("products", "attention", "fused kernels", "gaps"):
        assert half.seconds[piece] == pytest.approx((full.seconds[piece] + step().seconds[piece]) / 2), piece


def test_eager_code_moves_several_times_as_much() -> None:
    eager = step("--compile.enabled", "false")
    assert 3 < eager.seconds["fused kernels"] / step().seconds["fused kernels"] < 8
    assert eager.seconds["loss"] == pytest.approx(50 / 6 * step().seconds["loss"])  # as counted, in chunks


def test_a_small_eager_model_waits_for_the_host() -> None:
    words = ("--model.name", "smollm3_debug", "--compile.enabled", "false", "--batch.sequence_length", "128")
    found = step(*words)
    assert found.seconds["gaps"] > found.step_seconds / 2
    fast = time_of(work_of(recipe(*words), ONE), gpu=H200, rates=replace(RATES, launch=0.0))
    assert fast.step_seconds < found.step_seconds / 2


def test_zero_3_gathers_twice_per_micro_batch_and_zero_2_once_per_step() -> None:
    others = 128256 * 2048
    blocks = SIZES["smollm3_3b"].num_params() - others - 2048
    rate = RATES.moved * H200.bandwidth
    assert step(*batch(8)).seconds["weights"] == pytest.approx(8 * 6 * (2 * blocks + others) / rate, rel=1e-3)
    assert step(*batch(8), *ZERO_2).seconds["weights"] == pytest.approx(6 * (blocks + others) / rate, rel=1e-3)
    three, two = (step(*batch(64), *words, degrees=MeshDegrees(replicate=1, shard=8)) for words in ((), ZERO_2))
    [[all_three], [all_two]] = (list(sent(found).values()) for found in (three, two))
    assert all_three > 4 * all_two


def test_one_process_copies_gradients_into_the_message_which_is_their_sum() -> None:
    assert step(*batch(1)).seconds["gradients"] == pytest.approx(
        (2 + 4) / 8 * step(*batch(8), degrees=MeshDegrees(replicate=1, shard=8)).seconds["gradients"]
    )


def test_moments_in_bfloat16_no_clipping_and_compiled_kernels_move_fewer_bytes() -> None:
    words = ("--optimizer.state_dtype", "bfloat16", "--optimizer.grad_clip", "0")
    assert step(*words).seconds["optimizer"] == pytest.approx(24 / 32 * step().seconds["optimizer"])
    eager = step("--compile.enabled", "false")  # torch's kernel writes the gradients that it has divided
    assert eager.seconds["optimizer"] == pytest.approx((28 / RATES.updated + 8) / 32 * step().seconds["optimizer"])


def test_torchs_update_converts_moments_in_bfloat16_and_is_slower_than_a_compiled_one() -> None:
    words = ("--optimizer.state_dtype", "bfloat16", "--optimizer.grad_clip", "0")
    eager = step(*words, "--compile.enabled", "false").seconds["optimizer"]
    assert eager == pytest.approx((52 / RATES.updated + 4) / 24 * step(*words).seconds["optimizer"])


def test_casts_inside_of_compiled_blocks_are_slower_than_their_other_kernels() -> None:
    words = ("--float8.recipe", "rowwise")
    kernels = step(*words).seconds["fused kernels"]
    none = step().seconds["fused kernels"]
    as_fast = step(*words, rates=replace(RATES, cast=1.0)).seconds["fused kernels"]
    assert kernels - none == pytest.approx((as_fast - none) / RATES.cast)


def test_eight_gpus_share_the_optimizer_and_hide_their_messages() -> None:
    one, eight = step(*batch(8)), step(*batch(64), degrees=MeshDegrees(replicate=1, shard=8))
    assert eight.seconds["optimizer"] == pytest.approx(one.seconds["optimizer"] / 8)
    exposed = eight.seconds["messages: shard, inside nodes"]
    assert 0 < exposed < 0.01 * eight.step_seconds < eight.hidden["messages: shard, inside nodes"]


def test_what_hides_messages_is_slowed_by_them() -> None:
    found = step(*batch(64), degrees=MeshDegrees(replicate=1, shard=8))
    alone = step(*batch(8))
    slower = found.seconds["products"] - alone.seconds["products"]
    assert slower == pytest.approx(RATES.beside * sum(found.hidden.values()))


def test_tensor_parallelism_exposes_messages_that_overlap_tensor_hides_in_part() -> None:
    words = ("--model.name", "llama3_8b", *batch(4, 4))
    degrees = MeshDegrees(replicate=1, shard=1, context=1, tensor=4)
    name = "messages: tensor, inside nodes"
    plain = step(*words, degrees=degrees)
    overlapped = step(*words, "--mesh.overlap_tensor", "true", degrees=degrees)
    assert plain.hidden == {} and plain.seconds[name] > 0.05 * plain.step_seconds
    share = overlapped.hidden[name] / (overlapped.hidden[name] + overlapped.seconds[name])
    assert share == pytest.approx(RATES.overlapped, rel=0.02)  # the small messages of norms are not hidden


def test_context_parallelism_divides_attention_and_sends_heads_or_keys() -> None:
    words = ("--model.name", "llama3_8b", "--batch.sequence_length", "65536", *batch(1))
    name, eight = "messages: context, inside nodes", MeshDegrees(replicate=1, shard=1, context=8)
    one, heads, gathered = (
        step(*words),
        *(step(*words, "--mesh.context_by", by, degrees=eight) for by in ("heads", "gather")),
    )
    assert heads.seconds["attention"] == pytest.approx(one.seconds["attention"] / 8)
    assert gathered.seconds[name] > heads.seconds[name] > 0


def test_a_ring_of_sixteen_thousand_processes_pays_for_its_steps() -> None:
    """Shards inside nodes with replicas between them send more bytes, but in fewer steps."""
    words = ("--model.name", "llama3_70b", "--activation_checkpointing.mode", "full", *batch(16384))
    flat = step(*words, degrees=MeshDegrees(replicate=1, shard=16384))
    few = step(*words[:-4], *batch(512), degrees=MeshDegrees(replicate=1, shard=512))
    assert flat.tokens_per_second < 0.8 * few.tokens_per_second
    assert step(*words, degrees=MeshDegrees(replicate=256, shard=64)).tokens_per_second > flat.tokens_per_second


def test_offloading_is_refused() -> None:
    with pytest.raises(UserError, match="the time of transfers to the host is not modelled; write false"):
        step("--fsdp.cpu_offload", "true")


def test_every_recipe_with_a_gpu_in_its_name_has_a_time() -> None:
    from recipes.metrics.hardware import hardware_of

    checked = 0
    for path in sorted(CONFIGS.rglob("*.toml")):
        hardware = hardware_of(path.stem)
        if hardware is None or "sweeps" in path.parts or not path.stem.startswith(tuple(SIZES)):
            continue
        size = max((size for size in SIZES if path.stem.startswith(size)), key=len)
        found = load(path, [f"--model.name={size}", "--model.weights="], rules=False)  # weights of others are not here
        degrees = found.mesh.fit(hardware.processes, nodes=hardware.nodes)
        for gpu in (GPUS[hardware.gpu], GPUS["B200"]):
            time = step_time(found, degrees, gpu=gpu)
            flops = found.model.flops_per_token(found.batch.sequence_length, "causal") * time.tokens_per_second
            assert 0.15 < flops / gpu.bf16_peak < 0.9, (path.stem, gpu.name)
            assert all(seconds >= 0 for seconds in time.seconds.values())
            checked += 1
    assert checked > 10


def test_calibrated_rates_say_so_and_bring_their_own_range() -> None:
    found = step_time(recipe(), ONE, gpu=H200, rates=replace(RATES, calibrated="a run", spread=0.05))
    assert (found.evidence, found.spread) == ("calibrated", 0.05)
    assert (step().spread, step().evidence) == (ROWS["H200"][1], "10 published rows: H200")


def test_linears_that_are_excluded_from_float8_are_no_faster() -> None:
    plain, whole = step(), step("--float8.recipe", "tensorwise")
    attention, one = (
        step("--float8.recipe", "tensorwise", "--float8.exclude", "lm_head", x) for x in ("attention", "k_proj")
    )
    assert whole.seconds["products"] < one.seconds["products"] < attention.seconds["products"]
    assert attention.seconds["products"] < plain.seconds["products"]
    everything = step("--float8.recipe", "tensorwise", "--float8.exclude", "attention", "feed_forward")
    assert everything.seconds["products"] == plain.seconds["products"]


def test_an_untied_head_that_is_not_excluded_is_in_float8() -> None:
    untied = ("--model.tied_embeddings", "false", "--float8.recipe", "tensorwise", "--float8.exclude")
    assert step(*untied, "k_proj").seconds["output projection"] < step(*untied, "lm_head").seconds["output projection"]


def test_excluded_linears_are_gathered_in_bfloat16() -> None:
    gathered = ("--float8.recipe", "tensorwise", "--float8.all_gather", "true", "--float8.exclude", "lm_head")
    few, many = (
        work_of(recipe(*gathered, *names), MeshDegrees(replicate=1, shard=8))
        for names in ((), ("attention", "feed_forward"))
    )
    assert (few.gathered, many.gathered) == (1, 2)


@pytest.mark.parametrize(
    ("gpu", "words", "kernel"),
    [
        ("H100", (), "cudnn"),
        ("H200", (), "cudnn"),
        ("A100", (), "flash"),
        ("H100", ("--data.document_mask", "true"), "flash"),  # by lengths
        ("H100", ("--mesh.context", "2", "--mesh.context_by", "gather"), "flash"),
        ("H100", ("--run.deterministic", "true"), "flash"),
        ("H100", ("--run.deterministic", "true", "--fsdp.param_dtype", "float32"), "math"),
        ("H100", ("--fsdp.param_dtype", "float32"), "math"),  # of grouped heads
        ("H100", ("--fsdp.param_dtype", "float32", "--model.key_value_heads", "16"), "flash"),
    ],
)
def test_auto_is_what_torch_chooses_on_the_gpu(gpu: str, words: tuple[str, ...], kernel: str) -> None:
    attention = [
        step_time(recipe("--attention.backend", name, *words), ONE, gpu=GPUS[gpu]).seconds["attention"]
        for name in ("auto", kernel)
    ]
    assert attention[0] == attention[1]


def test_layers_with_windows_run_on_flash_kernels_and_the_others_on_those_of_cudnn() -> None:
    def attention(backend: str, *words: str) -> float:
        return step("--attention.backend", backend, *words).seconds["attention"]

    window, every = ("--model.window", "1024"), ("--model.full_attention_every", "4")
    assert attention("auto", *window) == attention("flash", *window)
    assert attention("auto", "--model.window", "8192") == attention("auto")  # sees all
    in_windows = attention("flash", *window) * 3 / 4  # 27 of 36 layers
    mixed = pytest.approx(in_windows + attention("auto") / 4)
    assert attention("auto", *window, *every) == mixed
    assert attention("flash", *window, *every) == pytest.approx(in_windows + attention("flash") / 4)


def test_attention_in_float32_is_as_much_slower_as_products_are() -> None:
    half, whole = step(), step("--fsdp.param_dtype", "float32", "--attention.backend", "auto")
    assert whole.seconds["attention"] > 5 * half.seconds["attention"]
