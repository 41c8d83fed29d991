"""Activation checkpointing of a part of the blocks: which ones, the same numbers, the memory, and the compilations."""

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.decoder import Decoder
from models.interface import blocks_of
from models.sizes import SIZES
from parallel import activation_checkpoint
from parallel.activation_checkpoint import checkpoint_blocks
from parallel.config import ActivationCheckpointingConfig
from parallel.fsdp import plain_name
from tests.build import build_model

SIX = replace(SIZES["smollm3_debug"], layers=6)


def recomputed(blocks: Any, *, layers: int) -> tuple[int, ...]:
    return ActivationCheckpointingConfig("full", blocks).recomputed(layers)


@pytest.mark.parametrize(
    ("blocks", "layers", "expected"),
    [
        ("all", 3, (0, 1, 2)),
        (1.0, 3, (0, 1, 2)),
        (1, 3, (0,)),
        (0.5, 6, (0, 2, 4)),
        (4, 10, (0, 2, 5, 7)),
        (9, 36, tuple(range(0, 36, 4))),
        (0.01, 36, (0,)),  # at least one
        (1, 1, (0,)),
    ],
)
def test_blocks_that_recompute_are_spread_evenly(blocks: Any, layers: int, expected: tuple[int, ...]) -> None:
    assert recomputed(blocks, layers=layers) == expected


def test_the_last_block_recomputes_only_if_all_do() -> None:
    for layers in range(1, 40):
        for count in range(1, layers + 1):
            found = recomputed(count, layers=layers)
            assert len(set(found)) == count and (layers - 1 in found) == (count == layers)


def test_without_a_mode_no_block_recomputes() -> None:
    assert ActivationCheckpointingConfig().recomputed(4) == ()


def first_step(mode: str, blocks: Any) -> dict[str, Tensor]:
    """The loss, and every gradient by the name of its parameter."""
    model, _ = build_model(SIX, mode=mode, blocks=blocks)
    x = torch.randint(0, SIX.vocabulary, (2, 33), generator=torch.Generator().manual_seed(3))
    loss = model(x[:, :-1], x[:, 1:])
    loss.backward()
    return {"loss": loss} | {plain_name(name): p.grad.to_local() for name, p in model.named_parameters()}


def test_any_number_of_blocks_changes_no_bit_of_loss_and_gradients(alone) -> None:
    expected = first_step("none", "all")
    for mode, blocks in (("selective", 1), ("selective", 0.5), ("full", 2), ("full", 5)):
        found = first_step(mode, blocks)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), (mode, blocks)


def test_a_part_of_the_blocks_keeps_the_names_of_the_state_and_is_reported(alone) -> None:
    model, report = build_model(SIX, mode="selective", blocks=2)
    assert list(model.state_dict()) == list(Decoder(SIX).state_dict())
    assert report[1] == "activation checkpointing: selective in 2 of 6 blocks, keeps matmul and attention outputs"


class PeakBytes(TorchDispatchMode):
    """The most bytes that are alive at a time, of what operators inside it make."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak, self.seen = 0, 0, weakref.WeakSet[Any]()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = operator(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self.seen:
                self.seen.add(storage)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return result

    def free(self, size: int) -> None:
        self.alive -= size


def peak_bytes(mode: str, blocks: Any) -> int:
    model = Decoder(SIX)
    checkpoint_blocks(model, ActivationCheckpointingConfig(mode, blocks))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as from the second micro-batch on
    x = torch.zeros(2, 128, dtype=torch.int64)
    with PeakBytes() as memory:
        model(x, x).backward()
    return memory.peak


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_each_further_block_that_recomputes_lowers_the_peak_of_memory(mode: str) -> None:
    peaks = [peak_bytes("none", "all"), *(peak_bytes(mode, count) for count in range(1, SIX.layers + 1))]
    assert peaks == sorted(set(peaks), reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_blocks_with_and_without_recomputation_compile_once_each(mode: str) -> None:
    from torch._dynamo.utils import counters

    model = Decoder(replace(SIX, no_rope_every=0))
    checkpoint_blocks(model, ActivationCheckpointingConfig(mode, 3))
    assert [isinstance(block, CheckpointWrapper) for block in blocks_of(model)] == [True, False] * 3
    torch._dynamo.reset()
    counters.clear()
    for block in blocks_of(model):
        block.compile(fullgraph=True, backend="aot_eager")  # not Inductor, which is slow
    x = torch.zeros(2, 32, dtype=torch.int64)
    model(x, x).backward()
    assert counters["stats"]["unique_graphs"] == 2


@library.custom_op("tests::attention_that_drops", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def attention_that_drops(x: Tensor) -> Tensor:
    """Draws random numbers inside, as the attention kernels of GPUs do, unlike those of CPUs."""
    return x + torch.rand_like(x)


attention_that_drops.register_autograd(lambda context, gradient: gradient)


class Dropping(nn.Module):
    """One block: attention, and a dropout after it."""

    interface = SimpleNamespace(block_at={0: "block"}, all_layers=0, routers=None, draws_random=True)

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), Attention(), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attention_that_drops(x)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_dropout_after_attention_that_drops_is_the_same_again(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch.ops.tests.attention_that_drops.default
    for operators in ("ATTENTION", "SAVED"):
        monkeypatch.setattr(activation_checkpoint, operators, [*getattr(activation_checkpoint, operators), kernel])
    gradients = []
    for one in ("none", mode):
        torch.manual_seed(0)
        model = Dropping()
        line = checkpoint_blocks(model, ActivationCheckpointingConfig(one))
        assert "and attention" not in line
        model.block(torch.randn(4, 8)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
