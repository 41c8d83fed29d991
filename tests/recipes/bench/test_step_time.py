"""The predicted step: its pieces against numbers worked out by hand, what it refuses, and the page that shows it."""

from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.bench import step_model, step_time
from recipes.bench.codegen import BANDWIDTH, REACHED
from recipes.bench.step_model import Code, device_of, predict, read_blocks
from recipes.load import CONFIGS, load
from recipes.schema import Recipe
from recipes.sweep.grid import read_sweep

BEFORE = Code(read_blocks(step_time.BEFORE_PAGE))
H200 = REACHED * BANDWIDTH["H200"]


def recipe(*words: str) -> Recipe:
    fixed = ["--activation_checkpointing.mode", "none", "--fsdp.reshard_after_forward", "true"]
    fixed += ["--activation_checkpointing.blocks", "all"]
    return load(step_time.BASE, [*fixed, *words], rules=False)


def seconds(*words: str, code: Code = BEFORE, device: str = "H200", processes: int = 1) -> dict[str, float]:
    return predict(recipe(*words), code, device=device, processes=processes).seconds


def test_the_pages_tables_are_up_to_date() -> None:
    text = step_time.PAGE.read_text(encoding="utf-8")
    assert text == step_time.with_tables(text), "run python scripts/bench.py --suite step_time --write-docs"


def test_the_pages_formula_names_every_piece() -> None:
    text = step_time.PAGE.read_text(encoding="utf-8").partition(step_time.BEGIN)[0]
    for piece in step_model.PIECES:
        if piece != "output projection":  # a matrix product
            assert f"\n    {'matrix ' * (piece == 'products')}{piece} " in text


def test_the_state_before_is_what_was_predicted_when_the_goals_were_set() -> None:
    """24.4k, 30.1k, 10.9k, 14.6k, by another model with other constants for gaps and the loss."""
    found = [
        predict(goal.recipe(0), step_time.code_with(0), device="H200").tokens_per_second for goal in step_time.GOALS
    ]
    assert found == pytest.approx([24_400, 30_100, 10_900, 14_600], rel=0.03)


@pytest.mark.parametrize(
    "loss",
    [
        "; loss, eager (loss_chunks = 8): 50.0 bytes a logit; compiled, without chunks: 6.0.",
        "; loss (loss_chunks = 8): 6.00 bytes a logit in 2 kernels a chunk, ptxas 2 of 2; eager 50.0.",
    ],
)
def test_the_bytes_of_the_loss_are_read_by_their_names(loss: str) -> None:
    _, _, rows = step_time.BEFORE_PAGE.partition("6.0.\n")
    [block, *_] = read_blocks(f"## llama3_8b, 1 x 8192 tokens, attention: cudnn\n`a.toml`{loss}\n{rows}")
    assert (block.loss_eager, block.loss_compiled) == (50, 6)


def test_a_page_without_the_loss_is_refused() -> None:
    page = "\n".join(line for line in step_time.BEFORE_PAGE.splitlines() if not line.startswith(";"))
    with pytest.raises(UserError, match="bytes of the loss are missing for llama3_8b"):
        read_blocks(page)


def test_moved_bytes_and_loss_take_their_time_at_the_stated_share_of_the_bandwidth() -> None:
    found = seconds("--batch.global_batch_size", "1")
    assert found["fused kernels"] == pytest.approx(36 * 2.718e9 / H200)
    assert found["loss"] == pytest.approx(6.0 * 128256 * 8192 / H200)
    assert seconds(code=Code(BEFORE.blocks, compiled_loss=False))["loss"] == pytest.approx(16 * 50 / 6 * found["loss"])


def test_products_and_attention_take_their_flops_at_the_stated_rates() -> None:
    found, model = seconds("--batch.global_batch_size", "1"), recipe().model
    flops = 6 * model.matmul_params() * 8192
    assert found["products"] + found["output projection"] == pytest.approx(flops / (0.73 * 989.4e12))
    causal = (model.flops_per_token(8192, "causal") - 6 * model.matmul_params()) * 8192 / 3
    assert found["attention"] == pytest.approx(causal / 620e12 + 2.5 * causal / 520e12)


def test_full_checkpointing_computes_products_and_attention_again() -> None:
    page = step_time.BEFORE_PAGE.replace("| none | selective |", "| none | full |")
    mode = ["--activation_checkpointing.mode", "full", "--activation_checkpointing.blocks", "all"]
    full = seconds(*mode, code=Code(read_blocks(page)))
    assert full["products"] / seconds()["products"] == pytest.approx(1 + (1 - 2048 * 11008 / 78.1e6) / 3, rel=1e-3)
    assert full["attention"] > 1.2 * seconds()["attention"]


def test_blocks_that_recompute_cost_their_share() -> None:
    third = ["--activation_checkpointing.mode", "selective", "--activation_checkpointing.blocks", "12"]
    found, micro_batches = seconds(*third), recipe().batch.global_batch_size
    assert found["fused kernels"] == pytest.approx(micro_batches * (12 * 3.127e9 + 24 * 2.718e9) / H200)
    assert found["gaps"] == pytest.approx(micro_batches * (12 * 43 + 24 * 40) * step_model.GAP)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_zero_3_gathers_twice_per_micro_batch_and_zero_2_once_per_step(micro_batch: int) -> None:
    words = ["--batch.global_batch_size", "8", "--batch.micro_batch_size", str(micro_batch)]
    others = 128256 * 2048 + 2048  # the embedding and the last norm
    blocks, micro_batches = recipe().model.num_params() - others, 8 // micro_batch
    assert seconds(*words)["weights"] == pytest.approx(micro_batches * 6 * (2 * blocks + others) / H200)
    zero2 = seconds(*words, "--fsdp.reshard_after_forward", "false")
    assert zero2["weights"] == pytest.approx(6 * (blocks + others) / H200)
    assert zero2["gradients"] == pytest.approx((10 * micro_batches + 8) * (blocks + others) / H200)
    copied = seconds(*words, "--fsdp.reshard_after_forward", "false", code=Code(BEFORE.blocks, copies=True))
    assert copied["weights"] == pytest.approx(10 / 6 * zero2["weights"])
    assert copied["gradients"] - zero2["gradients"] == pytest.approx(16 * (blocks + others) / H200)


def test_weights_cast_inside_the_block_cost_as_much_for_a_larger_micro_batch() -> None:
    words = ["--float8.recipe", "tensorwise", "--batch.global_batch_size", "2"]
    one, two = seconds(*words), seconds(*words, "--batch.micro_batch_size", "2")
    assert one["fused kernels"] - two["fused kernels"] == pytest.approx(36 * (4.850e9 - 4.382e9) / H200)


def test_weights_gathered_in_float8_are_cast_once_per_step_and_get_scales() -> None:
    others = 128256 * 2048 + 2048
    blocks = recipe().model.num_params() - others
    words = ["--float8.recipe", "tensorwise", "--float8.all_gather", "true", "--fsdp.reshard_after_forward", "false"]
    assert seconds(*words)["weights"] == pytest.approx((23 * blocks + 6 * others + 12 * blocks) / H200)
    eight = seconds(*words, processes=8)
    assert eight["weights"] == pytest.approx(((23 + 12) / 8 * blocks + 2 * blocks + (10 / 8 + 4) * others) / H200)


def test_moments_in_bfloat16_and_no_clipping_move_fewer_bytes() -> None:
    parameters = recipe().model.num_params()
    assert seconds()["optimizer"] == pytest.approx(40 * parameters / H200)
    words = ["--optimizer.state_dtype", "bfloat16", "--optimizer.grad_clip", "0"]
    assert seconds(*words)["optimizer"] == pytest.approx(24 * parameters / H200)


def test_eight_gpus_share_states_and_hide_their_messages() -> None:
    one, eight = seconds("--batch.global_batch_size", "8"), seconds("--batch.global_batch_size", "64", processes=8)
    assert eight["optimizer"] == pytest.approx(one["optimizer"] / 8)
    assert one["messages"] == 0 < eight["messages"] < 0.01 * sum(eight.values())


def test_a_network_that_is_slower_than_nvlink_shows_behind_short_sequences() -> None:
    short = ["--batch.global_batch_size", "64", "--batch.sequence_length", "1024"]
    many = seconds(*short, processes=64)
    assert many["messages"] > 0.3 * sum(many.values())
    long = seconds(*short[:2], processes=64)
    assert long["messages"] < 0.02 * sum(long.values())


def test_each_adapter_of_a_node_brings_its_share_of_what_the_whole_node_needs() -> None:
    """What 64 GPUs send with nothing to hide it behind, one group of 64 or replicas of a node or of a GPU each."""
    parameters = recipe().model.num_params()
    words = ["--batch.global_batch_size", "64", "--fsdp.reshard_after_forward", "false"]

    def sent(shard: int) -> float:
        degrees = recipe(*words, "--mesh.shard", str(shard), "--mesh.replicate", str(64 // shard))
        return step_model._messages(degrees, degrees.mesh.fit(64, nodes=8), 1, 0.0)

    network, nvlink = step_model.INFINIBAND, step_model.NVLINK
    assert sent(64) == pytest.approx(63 / 64 * 6 * parameters / (8 * network), rel=0.1)
    assert sent(8) == pytest.approx((7 / 8 * 6 / nvlink + 7 / 8 * 8 / 8 / network) * parameters, rel=0.1)
    assert sent(1) == pytest.approx(63 / 64 * 8 / (8 * network) * parameters, rel=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compile.enabled", "false"], "compile.enabled = false: only compiled code is counted"),
        (["--mesh.tensor", "2"], "only data parallelism is modelled"),
        (["--attention.backend", "math"], "only cudnn, flash, flash3 have a rate"),
        (["--float8.recipe", "rowwise_with_gw_hp"], "has no such row; choose a model, a float8 recipe"),
        (["--model.name", "llama3_1b"], "has no such row"),
        (["--batch.global_batch_size", "3", "--batch.micro_batch_size", "2"], "cannot be divided among 1 GPUs"),
    ],
)
def test_what_the_model_does_not_know_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        predict(recipe(*words), BEFORE, device="H200")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "device"), [("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100", "H100")]
)
def test_devices_are_known_by_the_name_that_torch_gives(name: str, device: str) -> None:
    assert device_of(name) == device


@pytest.mark.parametrize(
    "name", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB", "NVIDIA GH200"]
)
def test_devices_with_other_rates_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="its rates are not known"):
        device_of(name)


def test_the_goals_are_the_rows_that_the_gpu_suite_measures(tmp_path: Path) -> None:
    sweep = read_sweep(CONFIGS / "sweeps/gpu_bench.toml", output=tmp_path, processes=1)
    rows = {row.label: row.recipe for row in sweep.rows}
    sections = ("model", "batch", "attention", "float8", "activation_checkpointing", "compile", "fsdp", "mesh")
    for goal in step_time.GOALS:
        now = goal.recipe(len(step_time.CHANGES))
        for section in sections:
            assert getattr(rows[goal.row], section) == getattr(now, section), (goal.title, section)
        assert rows[goal.row].optimizer == now.optimizer


def test_the_command_prints_the_pieces_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "benchmarks/smollm3_3b_8xh100.toml")
    assert step_time.main(["--recipe", path, "--processes", "8", "--device", "H100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("on 8 x H100, predicted, not measured")
    assert [line[:20].strip() for line in lines[1:-1]] == list(step_model.PIECES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--float8.recipe", "tensorwise"], "overrides need a recipe"),
        (["--recipe", str(step_time.BASE), "--processes", "0"], "must be 1 or more"),
        (["--recipe", str(step_time.BASE), "--write-docs"], "leave out --recipe"),
        (["--recipe", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_wrong_words_get_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert step_time.main(words) == 2
    assert message in capsys.readouterr().err
