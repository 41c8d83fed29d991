"""Throughput and memory, against values computed by hand."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from models.documents import Documents
from models.sizes import SIZES
from parallel.dist import start, stop
from recipes.metrics import throughput as metrics
from recipes.metrics.throughput import AttentionLength, Throughput, peak_memory_gib
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
    assert (found.peak, found.flops, found.flops_full) == (H100_PEAK, SMOLLM3_CAUSAL, SMOLLM3_FULL)
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


def attention_lengths() -> list[float | None]:
    """Values at three logged steps, with documents of rank + 1 tokens, then of rank + 3, then with none."""
    world = start("cpu", seed=0)
    found, lengths = AttentionLength(dist.group.WORLD, device=CPU), []
    for length in (world.rank + 1, world.rank + 3):
        tokens = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
        tokens[:, length - 1 :: length] = 0
        documents = Documents.of(tokens, end_of_document=0)
        found.count([documents, documents])
        found.count([documents])
        lengths.append(found.take())
    lengths.append(found.take())
    stop()
    return lengths


def test_attention_length_is_the_mean_over_all_processes_since_the_last_logged_step() -> None:
    assert run_processes(2, attention_lengths) == [[1.5, 3.5, None]] * 2


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
