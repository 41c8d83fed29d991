"""Context parallelism: odd numbers of heads, odd documents, and what it sends, computes and keeps."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

import parallel.context
from models.attention import attend
from models.config import ModelConfig
from models.decoder import Decoder
from models.documents import Documents, Lengths, Mask, of_chunk
from models.loss import IGNORED
from models.sizes import SIZES
from parallel.context import cut_rows
from parallel.dist import start, stop
from tests.lengths_on_cpu import lengths_on_cpu
from tests.processes import run_processes

pytestmark = pytest.mark.slow

END, VOCABULARY, LENGTH = 96, 97, 24
# Every second layer has no rotary embeddings; the others have scaled ones.
TINY = replace(
    SIZES["smollm3_debug"],
    **{"layers": 2, "no_rope_every": 2, "width": 32, "feed_forward_width": 32, "vocabulary": VOCABULARY},
    **{"heads": 4, "key_value_heads": 2, "head_width": 8, "init_std": 0.2},
    **{"rope_scaling": "llama3", "rope_original_length": 8},
)
# heads, key/value heads, degree, by, options
CASES = (
    (4, 2, 4, "heads", ""),  # as many heads as processes, and copies of key/value heads
    (6, 3, 2, "heads", "documents"),  # key/value heads that the degree neither divides nor is divided by
    (4, 1, 2, "heads", "lengths"),
    (9, 3, 3, "heads", "documents"),
    (9, 3, 3, "gather", "masked"),
    (5, 1, 4, "gather", ""),
    (5, 5, 4, "gather", "documents,borders"),
    (3, 1, 3, "gather", "documents,lengths"),
    (4, 2, 4, "gather", "documents,lengths,borders"),
    (4, 2, 2, "gather", "lengths"),
    (4, 2, 2, "heads", "bfloat16"),
    (4, 2, 2, "gather", "bfloat16"),
)


def rows_of(options: str) -> tuple[Tensor, Tensor]:
    """Two rows of tokens (2, LENGTH) and their targets."""
    tokens = torch.randint(END, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens[0, [4, 10, 11, 19]] = END
    if "borders" in options:  # documents end where each chunk does, and nowhere else
        tokens[0] %= END
        tokens[:, 2:LENGTH:3] = END
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    if "masked" in options:  # all targets of the first process, of three
        targets[:, :4] = targets[:, -4:] = IGNORED
    return inputs, targets


def loss_and_gradients(model: Decoder, options: str) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, targets = rows_of(options)
    documents = Documents.of(tokens, end_of_document=END) if "documents" in options else None
    loss = model(tokens, targets, documents=documents)
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference_from_one_process(config: ModelConfig, axis: DeviceMesh, by: str, options: str) -> float:
    """The largest relative difference, of the loss and of each parameter's gradient."""
    torch.manual_seed(0)
    alone = Decoder(config)
    split = deepcopy(alone).to(torch.bfloat16 if "bfloat16" in options else torch.float32)
    cut_rows(split, axis, by=by)
    with (
        lengths_on_cpu() if "lengths" in options else nullcontext(),
        # Also rows without documents take that kernel.
        patch.object(parallel.context, "has_kernel_for_lengths", lambda tensor: "lengths" in options),
    ):
        found, found_gradients = loss_and_gradients(split, options)
    expected, gradients = loss_and_gradients(alone, options)
    dist.all_reduce(found, group=axis.get_group())
    errors = [((found - expected) / expected).abs().item()]
    assert gradients.keys() == found_gradients.keys() == dict(alone.named_parameters()).keys()
    for name, gradient in found_gradients.items():
        whole = gradient.float()
        dist.all_reduce(whole, group=axis.get_group())
        errors.append(((whole - gradients[name]).norm() / gradients[name].norm()).item())
    return max(errors)


class Pairs(TorchFunctionMode):
    """Counts the pairs of tokens that attend to each other."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, key = args[0], args[1]
            mask = kwargs.get("attn_mask")
            causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
            self.count += int((causal if mask is None else mask).sum())
        return function(*args, **(kwargs or {}))


def pairs_of(axis: DeviceMesh) -> int:
    """How many pairs this process computes by gathering."""
    model = Decoder(TINY)
    cut_rows(model, axis, by="gather")
    with Pairs() as pairs, torch.no_grad():
        model(*rows_of(""))
    return pairs.count


def sent_by(call: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """The call's result, and its collectives."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()
    names = (event.name for event in profile.events() or ())
    return result, Counter(name for name in names if name.startswith("c10d::"))


def collectives(axis: DeviceMesh, by: str, *, compiled: bool) -> tuple[Counter[str], Counter[str]]:
    """Of the forward and of the backward pass of one block."""
    torch._dynamo.reset()
    model = Decoder(replace(TINY, layers=1))
    cut_rows(model, axis, by=by)
    if compiled:
        model.blocks[0].compile(fullgraph=True, backend="aot_eager")
    tokens, targets = rows_of("")
    model(tokens, targets).backward()  # compiles
    loss, forward = sent_by(lambda: model(tokens, targets))
    _, backward = sent_by(loss.backward)
    return forward, backward


def kept_for_backward(axis: DeviceMesh | None, by: str) -> int:
    """Bytes that one block more keeps, besides parameters, with the kernel of GPUs."""
    found = []
    for layers in (1, 2):
        model = Decoder(replace(TINY, layers=layers, no_rope_every=0))
        if axis is not None:
            cut_rows(model, axis, by=by)
        storages = {}

        def keep(tensor: Tensor, storages: dict[int, Tensor] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        tokens, targets = (x[:1] for x in rows_of(""))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens, targets, documents=Documents.of(tokens, end_of_document=END))
        for parameter in model.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        found.append(
            sum(tensor.untyped_storage().nbytes() for tensor in storages.values() if tensor.is_floating_point())
        )
    return found[1] - found[0]


def work(cases: tuple[Any, ...]) -> dict[str, Any]:
    world = start("cpu", seed=0)
    found: dict[Any, Any] = {}
    axes = {degree: DeviceMesh("cpu", list(range(degree)), mesh_dim_names=("context",)) for degree in (2, 3, 4)}
    for case in cases:
        heads, shared, degree, by, options = case
        if world.rank < degree:
            config = replace(TINY, heads=heads, key_value_heads=shared)
            found[case] = difference_from_one_process(config, axes[degree], by, options)
    found["pairs"] = pairs_of(axes[4])
    if world.rank < 2:
        found["collectives"] = [
            collectives(axes[2], by, compiled=c) for by in ("heads", "gather") for c in (False, True)
        ]
    with lengths_on_cpu(), patch.object(parallel.context, "has_kernel_for_lengths", lambda tensor: True):
        found["kept"] = kept_for_backward(None, "")
        found["kept by heads"] = kept_for_backward(axes[4], "heads")
        found["kept by gathering"] = kept_for_backward(axes[4], "gather")
    stop()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_processes(4, work, CASES)


@pytest.mark.parametrize("case", CASES)
def test_parts_of_rows_give_the_loss_and_gradients_of_whole_rows(case: Any, found: list[dict[str, Any]]) -> None:
    assert found[0][case] < (2e-2 if "bfloat16" in case[-1] else 1e-5)


def test_processes_that_gather_compute_equally_many_pairs_of_tokens(found: list[dict[str, Any]]) -> None:
    whole = TINY.layers * LENGTH * (LENGTH + 1) // 2
    assert [one["pairs"] for one in found] == [whole // 4] * 4


def test_a_block_exchanges_twice_or_gathers_once_in_either_direction(found: list[dict[str, Any]]) -> None:
    exchange = {"c10d::alltoall_base_": 2}
    gather, scatter = {"c10d::allgather_into_tensor_coalesced_": 1}, {"c10d::reduce_scatter_tensor_coalesced_": 1}
    assert found[0]["collectives"] == [(exchange, exchange)] * 2 + [(gather, scatter)] * 2


def test_a_block_keeps_one_copy_more_than_its_share_of_what_one_process_keeps(found: list[dict[str, Any]]) -> None:
    # What attention returns, as the kernel has it and as the next linear does; one process has it once.
    share = found[0]["kept"] // 4 + LENGTH // 4 * TINY.heads * TINY.head_width * 4
    # Two key/value heads for four processes: each keeps a copy of one.
    keys = LENGTH * TINY.key_value_heads * TINY.head_width * 2 * 4
    assert found[0]["kept by heads"] == share - keys // 4 + keys // 2
    assert found[0]["kept by gathering"] == share - keys // 4 + keys


# Attention of a chunk of the queries


@pytest.fixture
def by_lengths() -> Iterator[None]:
    with lengths_on_cpu():
        yield


@pytest.mark.parametrize("by", [Mask, Lengths])
@pytest.mark.parametrize("ends", [0.0, 0.1, 0.5, 1.0])
def test_chunks_of_queries_attend_as_whole_rows_do(by: type, ends: float, by_lengths: None) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(END, (3, LENGTH), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < ends] = END
    documents = Documents.of(tokens, end_of_document=END)
    whole = Lengths(documents.cumulative_lengths)
    inputs = [torch.randn(3, heads, LENGTH, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    inside = whole if by is Lengths else mask_of(documents)
    for size in (1, 4, 12):
        chunks = [slice(first, first + size) for first in range(0, LENGTH, size)]
        pieces = [
            attend(
                inputs[0][:, :, chunk],
                *(x[:, :, : chunk.stop] for x in inputs[1:]),
                of_chunk(inside, chunk, length=LENGTH),
            )
            for chunk in chunks
        ]
        found, expected = torch.cat(pieces, dim=2), attend(*inputs, whole)
        torch.testing.assert_close(found, expected)
        upstream = torch.randn(found.shape, generator=generator)
        both = (torch.autograd.grad(out, inputs, upstream) for out in (found, expected))
        for gradient, right in zip(*both, strict=True):
            torch.testing.assert_close(gradient, right)


def mask_of(documents: Documents) -> Mask:
    index = torch.arange(LENGTH)
    first = index - documents.positions
    return Mask(((index <= index[:, None]) & (index >= first[:, :, None]))[:, None])
