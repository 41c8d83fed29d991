"""Whether the state in memory is sound: no value is NaN or infinite, and processes that must hold the same bits do.

Bits are compared by one checksum per tensor: the sum of its 32-bit words (16-bit ones of bfloat16), each multiplied by
2 i + 1 at position i, modulo 2^64. It always changes if one word changes in any way, or if any two bits flip: their
contributions are 2^a and 2^b times odd factors, which cancel only for a = b and equal positions. Three independent
flips cancel only at three special positions, with a chance below 1e-7. (All of this up to 2^31 words of a local shard.)
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel.dist import World
from parallel.errors import CorruptState, listed
from parallel.fsdp import plain_name, without_wrapper
from parallel.mesh import is_whole_along
from parallel.nodes import FEW, abbreviated

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integers that its bits are read as."""
PIECE = {"cpu": 2**16, "cuda": 2**22}
"""Words that are read at a time: on a CPU the products, 8 bytes per word, stay in a core's cache."""

Copies = tuple[ProcessGroup, Sequence[str]]
"""Processes that must hold the same bits, and the names of the tensors that this is about."""
Line = tuple[int, int, int, str]
"""1 if copies differ, the rank that tells it, its number there, the text. What is NaN in one replica also differs, so
the cause is sorted first."""
Lines = tuple[list[Line], int]
"""The first ones, and how many there are in all."""


def named_state(model: nn.Module, parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters, as sharding left them, and what the optimizer keeps of them, by the names that checkpoints use."""
    found: dict[str, Tensor] = {}
    # Not the model's own parameters: after a forward pass alone the root still holds whole weights in their place.
    for (name, _), parameter in zip(model.named_parameters(), parameters, strict=True):
        found[f"model.{plain_name(name)}"] = parameter
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer.{plain_name(name)}.{kind}"] = value
    return found


def whole_along(state: Mapping[str, Tensor], axis: DeviceMesh) -> list[str]:
    """The names of the tensors that all processes along this axis hold alike, step counters included."""
    return [name for name, tensor in state.items() if not isinstance(tensor, DTensor) or is_whole_along(tensor, axis)]


@torch.no_grad()
def require_sound(tensors: Mapping[str, Tensor], world: World, *, copies: Sequence[Copies] = ()) -> None:
    """Raise CorruptState, with the same text on all processes, unless the state is sound on all of them.

    All processes call it at the same time. The host waits for the device once. tensors: by name; of a DTensor, the
    local shard is looked at. copies: which processes hold the same bits of which tensors.
    """
    names = list(tensors)
    finite, sums = (
        found.to(world.device) for found in _inspect(list(map(_local, tensors.values())), checksums=bool(copies))
    )
    bad = ~finite.all()
    compared = [(group, shared, sums[[names.index(name) for name in shared]]) for group, shared in copies]
    for group, _, own in compared:
        most = torch.cat([own, ~own])  # ~ turns the order of all integers around, so that the least comes with the most
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        bad |= (most[: len(own)] != ~most[len(own) :]).any()
    anywhere = bad.to(torch.int32)
    dist.all_reduce(anywhere)
    if not anywhere.item():
        return
    broken = [name for name, is_finite in zip(names, finite.tolist(), strict=True) if not is_finite]
    nan = [f"{name} has NaN or infinite values on {_place(world.rank, world)}" for name in broken]
    differ = [line for each in compared for line in _differences(*each, world)]
    own_lines = [(kind, world.rank, n, line) for kind, some in enumerate((nan, differ)) for n, line in enumerate(some)]
    lines, count = world.messages.reduce(_first_lines(([], 0), (own_lines, len(own_lines))), _first_lines)
    lines, count = world.messages.from_main((lines, count))
    more = [f"and {count - FEW} more"] if count > FEW else []
    raise CorruptState("; ".join([*(line for *_, line in lines), *more]))


def _first_lines(one: Lines, other: Lines) -> Lines:
    """The first FEW lines of both, each text once, and how many there are in all."""
    (some, count), (others, more) = one, other
    by_text: dict[str, Line] = {}
    for line in sorted([*some, *others]):
        by_text.setdefault(line[-1], line)
    return list(by_text.values())[:FEW], count + more - len(some) - len(others) + len(by_text)


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors of which this process's shard has NaN or infinite values. The host waits."""
    finite, _ = _inspect([_local(tensor) for tensor in tensors.values()], checksums=False)
    return [name for name, is_finite in zip(tensors, finite.tolist(), strict=True) if not is_finite]


def _inspect(shards: Sequence[Tensor], *, checksums: bool) -> tuple[Tensor, Tensor]:
    """(whether every value is finite, checksum) of each shard, on its device, in one pass over the memory."""
    device = shards[0].device
    count = torch.zeros(2, len(shards), dtype=torch.int64, device=device)
    odd = torch.arange(1, 2 * PIECE[device.type] if checksums else 1, 2, device=device)
    # Values of all pieces, and the shard that each belongs to. (The first is there if all shards are empty.)
    extremes, sums, owners = [torch.zeros((), device=device)] * 2, [count.new_zeros(())], [0]
    for number, shard in enumerate(shards):
        flat = shard.reshape(-1)  # a copy of one that is not contiguous
        for start in range(0, len(flat), PIECE[device.type]):
            piece = flat[start : start + PIECE[device.type]]
            owners.append(number)
            extremes += [extreme.float() for extreme in torch.aminmax(piece)]  # NaN if any value is
            if checksums:
                words = piece.view(WORDS[piece.element_size()])
                factors = odd[: len(words)] + 2 * start if start else odd[: len(words)]
                sums.append((words * factors).sum())
    owner = torch.tensor(owners).to(device, non_blocking=True)
    bad = ~torch.stack(extremes).view(-1, 2).isfinite().all(dim=1)
    count[0].index_add_(0, owner, bad.to(torch.int64))
    if checksums:
        count[1].index_add_(0, owner, torch.stack(sums))
    return count[0] == 0, count[1]


def _local(tensor: Tensor) -> Tensor:
    """This process's shard, without the class that float8 all-gather wraps it in."""
    plain = without_wrapper(tensor)
    return plain.to_local() if isinstance(plain, DTensor) else plain


def _differences(group: ProcessGroup, names: Sequence[str], own: Tensor, world: World) -> list[str]:
    """A line, on the group's first rank, for each tensor whose checksums differ. own: those here. All must call it."""
    ranks = dist.get_process_group_ranks(group)
    rows = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(rows, own, group=group)
    if world.rank != ranks[0]:
        return []
    table, lines = torch.stack(rows), []
    changed = (table != table[0]).any(0).tolist()
    for name, column in zip(compress(names, changed), compress(table.t().tolist(), changed), strict=True):
        [(common, count), *_] = Counter(column).most_common()
        odd = [rank for rank, value in zip(ranks, column, strict=True) if 2 * count <= len(ranks) or value != common]
        places = [_place(rank, world) for rank in odd]
        where = listed(places) if len(odd) <= FEW else abbreviated(places)
        lines.append(f"{name} differs {'between' if len(odd) == len(ranks) else 'from the other copies on'} {where}")
    return lines


def _place(rank: int, world: World) -> str:
    return f"rank {rank} on {world.node_of(rank)}"
