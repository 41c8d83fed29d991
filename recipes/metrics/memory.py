"""What torch's allocator of GPU memory says: how much it holds, and how often a GPU was full. Loaded on GPUs only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from parallel.dist import World
from parallel.nodes import abbreviated

PEAK, RESERVED, RETRIES, FAILURES = (
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "num_alloc_retries",
    "num_ooms",
)
"""As torch.cuda.memory_stats() calls them."""
GIB = 2**30


class GpuMemory:
    """The memory of every process's GPU, at logged steps."""

    def __init__(self, world: World, statistics: Callable[[], Mapping[str, int]] | None = None) -> None:
        """statistics: what to read; None = torch.cuda.memory_stats(), which does not wait for the device."""
        self._world = world
        self._statistics = statistics or (lambda: torch.cuda.memory_stats(world.device))
        self._retries: Sequence[float] = [0] * world.size

    def counts(self) -> list[float]:
        """How often this process's GPU was full since the start: until its cache was freed, and even then."""
        now = self._statistics()
        return [now[RETRIES], now[FAILURES]]

    def compare(self, retries: Sequence[float], failures: Sequence[float]) -> tuple[dict[str, Any], list[str]]:
        """Take in what all processes have counted, by rank: the columns for metrics.jsonl, and lines for people.

        Bytes are those of this process, counts the sums over all. A line names the processes whose GPU was full since
        the last call.
        """
        now, before, self._retries = self._statistics(), self._retries, retries
        full = [
            f"rank {rank} on {self._world.node_of(rank)} ({count - earlier:.0f} x)"
            for rank, (earlier, count) in enumerate(zip(before, retries, strict=True))
            if count > earlier
        ]
        cost = "each time, torch freed its cache and all processes waited; use less memory"
        lines = [f"FULL: GPU memory ran out on {abbreviated(full)}; {cost}"] if full else []
        row = {
            "peak_memory_gib": now[PEAK] / GIB,
            "reserved_memory_gib": now[RESERVED] / GIB,
            "allocation_retries": int(sum(retries)),
            "allocation_failures": int(sum(failures)),
        }
        return row, lines
