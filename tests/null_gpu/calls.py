"""What NCCL was asked for on the null GPU, read from the logs that its stub writes. Imports no torch."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

WIDTHS = {"i8": 1, "u8": 1, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "f16": 2, "f32": 4, "f64": 8, "bf16": 2}
WIDTHS |= {"f8e4": 1, "f8e5": 1}
"""Bytes of an element."""
BETWEEN_TWO = ("send", "recv")
SMALL = 1e6
"""Bytes below which a message is one of numbers, not of weights, gradients or tokens."""


class Call(NamedTuple):
    """One call of NCCL by one rank."""

    group: str
    """The communicator, under a name that all its ranks share."""
    kind: str
    elements: int
    type: str

    def sent(self, size: int) -> float:
        """Bytes that each of `size` ranks sends: those that cross its link in a ring."""
        whole = self.elements * WIDTHS[self.type]
        if self.kind == "all_reduce":
            return 2 * whole * (size - 1) / size
        if self.kind in ("all_gather", "reduce_scatter", "all_to_all"):  # elements are of one rank's part
            return float(whole * (size - 1))
        return 0.0 if self.kind == "recv" else float(whole)


@dataclass(frozen=True)
class Log:
    """What one rank wrote."""

    sizes: Mapping[str, int]
    """Communicator -> its ranks, where they are known."""
    phases: Mapping[str, Sequence[Call]]
    """Note -> the calls after it; "" = before the first one."""

    @property
    def calls(self) -> list[Call]:
        """All calls."""
        return [call for phase in self.phases.values() for call in phase]


def read_log(lines: Iterable[str]) -> Log:
    """The log in these lines."""
    sizes: dict[str, int] = {}
    phases: dict[str, list[Call]] = defaultdict(list)
    phase = ""
    for line in lines:
        kind, _, rest = line.rstrip("\n").partition(" ")
        words = rest.split()
        if kind == "note":
            phase = rest
            phases[phase] = []
        elif kind == "init":
            sizes[words[0]] = int(words[-1])
        elif kind == "call":
            phases[phase].append(Call(words[0], words[1], int(words[2]), words[3]))
    return Log(sizes, phases)


def read_logs(prefix: Path) -> dict[int, Log]:
    """Rank -> its log, of the ranks that wrote to this name + "." + rank."""
    files = {int(file.suffix[1:]): file for file in prefix.parent.glob(f"{prefix.name}.*")}
    return {rank: read_log(files[rank].read_text(encoding="utf-8").splitlines()) for rank in sorted(files)}


def disorders(logs: Mapping[int, Log]) -> list[str]:
    """One line for each communicator whose ranks call it in another order, with other sizes or another number of times.

    Messages between two ranks are left out: each has its own.
    """
    lines = []
    groups: dict[str, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, log in logs.items():
        for call in log.calls:
            if call.kind not in BETWEEN_TWO:
                groups[call.group][rank].append(call)
    for calls in groups.values():
        first, *others = calls
        for rank in others:
            mine, theirs = calls[first], calls[rank]
            if mine != theirs:
                equal = (call == other for call, other in zip(mine, theirs, strict=False))
                number = next((number for number, same in enumerate(equal) if not same), min(len(mine), len(theirs)))
                mine_there, theirs_there = _name(mine, number), _name(theirs, number)
                lines.append(f"call {number + 1}: rank {first} {mine_there}, rank {rank} {theirs_there}")
                break
    return lines


def _name(calls: Sequence[Call], number: int) -> str:
    if number >= len(calls):
        return "none"
    call = calls[number]
    return f"{call.kind} of {call.elements} {call.type}"


class Sent(NamedTuple):
    """Messages of one step of one rank along one axis of the mesh."""

    messages: float
    """Those of SMALL bytes or more."""
    small: int
    sent: float
    """Bytes."""


def along_axes(calls: Sequence[Call], axes: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, Sent]:
    """Axis -> what was sent along it. axes: communicator -> axis; sizes: communicator -> ranks."""
    by_axis: dict[str, Sent] = {}
    for call in calls:
        size, axis = sizes[call.group], axes.get(call.group, "other")
        messages, small, sent = by_axis.get(axis, Sent(0, 0, 0.0))
        bytes_ = call.sent(size)
        share = 1 / size if call.kind == "send" else 0 if call.kind == "recv" else 1  # an exchange sends to each
        is_small = bytes_ < SMALL and call.kind not in BETWEEN_TWO
        by_axis[axis] = Sent(messages + (0 if is_small else share), small + is_small, sent + bytes_)
    return by_axis
