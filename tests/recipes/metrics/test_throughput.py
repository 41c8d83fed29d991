"""Throughput and memory, against values computed by hand."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from models.counts import Lengths, step_flops
from models.documents import Documents
from models.encoder_decoder import EncoderDecoderInputs
from models.loss import IGNORED
from models.sizes import SIZES
from parallel.dist import start, stop
from recipes.metrics import throughput as metrics
from recipes.metrics.pair_lengths import PairLengths
from recipes.metrics.throughput import AttentionLength, Throughput, peak_memory_gib
from tests.families import family_config
from tests.processes import run_processes

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]


# Rates

# SmolLM3 3B by hand. Weights of its matrices: q and o, k and v, three of the feed-forward; then the output projection.
# 6 FLOPs per weight, and in attention 12 per layer, element of the combined head width and position.
SMOLLM3_MATRICES = 36 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 11008) + 128256 * 2048
SMOLLM3_FULL = 6 * SMOLLM3_MATRICES + 12 * 36 * 2048 * 8192
SMOLLM3_CAUSAL = 6 * SMOLLM3_MATRICES + 6 * 36 * 2048 * 8192
H100_PEAK = 989.4e12


def throughput(monkeypatch: pytest.MonkeyPatch, device_name: str) -> Throughput:
    """For SmolLM3 3B with steps of a million tokens in sequences of 8192, on eight devices of that name."""
    monkeypatch.setattr(metrics, "device_name", lambda device: device_name)
    return Throughput(SIZES["smollm3_3b"], tokens_per_step=2**20, sequence_length=8192, devices=8, device=CPU)


def test_mfu_counts_attention_in_both_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = throughput(monkeypatch, "NVIDIA H100 80GB HBM3")
    assert (found.peak, found.flops) == (H100_PEAK, {"causal": SMOLLM3_CAUSAL, "full": SMOLLM3_FULL})
    assert found.row(16.0) == pytest.approx(
        {
            "tokens_per_second": 65536.0,
            "tokens_per_second_per_device": 8192.0,
            "tflops_per_device": 180.83,  # 8192 tokens/s x 22.0736 GFLOP
            "mfu": 0.18276,  # 180.83 / 989.4
            "mfu_full": 0.21277,  # 8192 tokens/s x 25.6975 GFLOP / 989.4 TFLOP/s
        },
        rel=1e-4,
    )


def test_mfu_is_relative_to_the_bf16_peak_and_may_exceed_1_with_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    found = throughput(monkeypatch, "NVIDIA H100 80GB HBM3")
    seconds_at_the_peak = 2**20 / 8 * SMOLLM3_CAUSAL / H100_PEAK
    assert found.row(seconds_at_the_peak)["mfu"] == pytest.approx(1.0)
    assert found.row(seconds_at_the_peak / 1.4)["mfu"] == pytest.approx(1.4)


def test_attention_inside_documents_counts_only_the_flops_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = throughput(monkeypatch, "NVIDIA H100 80GB HBM3")
    row = found.row(16.0, attention_length=512.5)
    assert row["attention_length"] == 512.5
    causal, full = (6 * SMOLLM3_MATRICES + factor * 36 * 2048 * 512.5 for factor in (6, 12))
    assert row["tflops_per_device"] == pytest.approx(8192 * causal / 1e12)
    assert (row["mfu"], row["mfu_full"]) == pytest.approx((8192 * causal / H100_PEAK, 8192 * full / H100_PEAK))
    assert row["tokens_per_second"] == found.row(16.0)["tokens_per_second"]


def attention_lengths() -> list[dict[str, float]]:
    """Values at three logged steps, with documents of rank + 1 tokens, then of rank + 3, then with none."""
    world = start("cpu", seed=0)
    found, lengths = AttentionLength(dist.group.WORLD, device=CPU), []
    for length in (world.rank + 1, world.rank + 3):
        tokens = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
        tokens[:, length - 1 :: length] = 0
        batch = tokens, tokens, Documents.of(tokens, end_of_document=0)
        found.count([batch, batch])
        found.count([batch])
        lengths.append(found.per_step(2))
    lengths.append(found.per_step(2))
    stop()
    return lengths


@pytest.mark.slow
def test_attention_length_is_the_mean_over_all_processes_since_the_last_logged_step() -> None:
    assert run_processes(2, attention_lengths) == [[{"attention_length": 1.5}, {"attention_length": 3.5}, {}]] * 2


def test_mfu_is_null_where_the_peak_is_unknown() -> None:
    found = Throughput(SIZES["smollm3_3b"], tokens_per_step=1000, sequence_length=8192, devices=2, device=CPU)
    assert (found.device_name, found.peak) == ("cpu", None)
    assert found.row(0.5) == {
        "tokens_per_second": 2000.0,
        "tokens_per_second_per_device": 1000.0,
        "tflops_per_device": None,
        "mfu": None,
        "mfu_full": None,
    }


def test_peak_memory_is_in_gib() -> None:
    block = torch.ones(2**28, dtype=torch.uint8)  # a quarter of a GiB
    del block
    assert 0.25 < peak_memory_gib() < 64


# Pairs of an encoder-decoder model


def pairs(prompts: list[int], answers: list[int]) -> tuple[EncoderDecoderInputs, torch.Tensor, None]:
    """Padded inputs and targets of prompts and answers with so many tokens."""
    mask = torch.arange(8) < torch.tensor(prompts)[:, None]  # (B, 8)
    targets = torch.where(torch.arange(6) < torch.tensor(answers)[:, None], 1, IGNORED)  # (B, 6)
    return EncoderDecoderInputs(torch.zeros(len(prompts), 8, dtype=torch.int64), mask, targets), targets, None


def count_pairs() -> list[Lengths]:
    world = start("cpu", seed=0)
    counted = PairLengths(dist.group.WORLD, device=CPU)
    found = []
    for _ in range(2):
        counted.count([pairs([2, 8], [6, 1])] if world.rank else [pairs([3], [5]), pairs([4], [2])])
        found.append(counted.per_step(1)["lengths"])
    stop()
    return found


@pytest.mark.slow
def test_the_lengths_of_pairs_are_summed_over_processes_without_padding() -> None:
    expected = Lengths(decoder=14, decoder_squared=66, encoder=17, encoder_squared=93, crossed=15 + 8 + 12 + 8)
    assert run_processes(2, count_pairs) == [[expected] * 2] * 2


@pytest.mark.slow
def test_pairs_are_measured_in_the_tokens_and_flops_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    model, lengths = family_config("t5"), Lengths(14, 66, 17, 93, 43)
    found = Throughput(model, tokens_per_step=1000, sequence_length=8, devices=2, device=CPU)
    row = found.row(0.5, lengths=lengths)
    assert row["encoder_tokens_per_second"] == 34 and row["decoder_tokens_per_second"] == 28
    assert row["tokens_per_second"] == 62 and row["tokens_per_second_per_device"] == 31
    flops = step_flops(model, lengths, "causal") / 0.5 / 2
    assert row["tflops_per_device"] == pytest.approx(flops / 1e12)
    assert row["mfu"] == pytest.approx(flops / H100_PEAK)
    assert row["mfu_full"] == pytest.approx(step_flops(model, lengths, "full") / H100_PEAK)


def test_packed_pairs_count_their_tokens_but_not_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    found = throughput(monkeypatch, "NVIDIA H100 80GB HBM3")
    whole, padded = found.row(16.0, attention_length=100.0), found.row(16.0, attention_length=100.0, tokens=2**19)
    assert {name: value / 2 for name, value in whole.items() if name != "attention_length"} == {
        name: value for name, value in padded.items() if name != "attention_length"
    }
