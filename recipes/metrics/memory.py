"""What GPUs report: memory, as torch's allocator counts it, load and power. Loaded on GPUs only."""

from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor

from parallel.dist import World
from parallel.nodes import FEW, abbreviated
from recipes.metrics.throughput import extreme_columns, extremes

PEAK, RESERVED, RETRIES, FAILURES = (
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "num_alloc_retries",
    "num_ooms",
)
"""Statistics, as torch.cuda.memory_stats() calls them."""
GIB = 2**30
Gauges = Mapping[str, Callable[[], float]]
"""Column -> what reads it of this process's GPU. It raises where the GPU does not say."""


class GpuMemory:
    """The memory, the load and the power of every process's GPU, at logged steps."""

    def __init__(
        self, world: World, statistics: Callable[[], Mapping[str, int]] | None = None, gauges: Gauges | None = None
    ) -> None:
        """statistics: what to read; None = torch.cuda.memory_stats(), which does not wait for the device. gauges: the
        same; None = those of NVIDIA's management library."""
        self._world = world
        self._statistics = statistics or (lambda: torch.cuda.memory_stats(world.device))
        self._gauges = nvml(world.device) if gauges is None else gauges
        self._silent: dict[str, str] = {}  # gauge -> why this process's GPU does not say
        self._told = False
        self._retries = 0

    def counts(self) -> list[float]:
        """What this process tells the others: how often its GPU was full until its cache was freed, since the last call
        and in all, and even then; the most GiB allocated and reserved; its gauges, NaN where it does not say."""
        now = self._statistics()
        before, self._retries = self._retries, now[RETRIES]
        memory = now[PEAK] / GIB, now[RESERVED] / GIB
        return [self._retries - before, self._retries, now[FAILURES], *memory, *map(self._read, self._gauges)]

    def _read(self, gauge: str) -> float:
        if gauge in self._silent:
            return nan
        try:
            return self._gauges[gauge]()
        except Exception as error:  # the library has many: no permission, not on a part of a GPU, not installed
            self._silent[gauge] = (str(error).strip() or type(error).__name__).splitlines()[0]
            return nan

    def summary(self, rows: Tensor) -> Tensor:
        """What the host needs of the counts of all processes, (processes, counts), however many they are. On the device
        that the counts are on, which is not waited for."""
        size = len(rows)
        retries, totals, used, gauges = rows.split([1, 2, 2, len(self._gauges)], dim=1)
        full = retries[:, 0] > 0
        ranks = torch.arange(size, device=rows.device)
        first = torch.where(full, ranks, size).topk(min(FEW, size), largest=False).values
        named = torch.cat([first, torch.where(full, ranks, 0).amax().view(1)]).clamp(max=size - 1)
        known = ~gauges.isnan()
        return torch.cat(
            [
                *(totals.sum(0), full.sum().view(1), named, retries[named, 0]),
                *(used[self._world.rank], extremes(used).t().flatten()),
                *(known.sum(0), gauges.nan_to_num().sum(0)),
            ]
        )

    def compare(self, numbers: Sequence[float]) -> tuple[dict[str, Any], list[str]]:
        """The columns for metrics.jsonl, and lines for people, from the summary.

        Bytes are those of this process, and the most and least of all; counts are the sums over all, gauges the means.
        A line names the processes whose GPU was full since the last call.
        """
        values, size = iter(numbers), self._world.size
        retries, failures, full = (int(next(values)) for _ in range(3))
        ranks, times = ([int(next(values)) for _ in range(min(FEW, size) + 1)] for _ in range(2))
        own = [next(values), next(values)]
        ends = [[next(values) for _ in range(4 if size > 1 else 0)] for _ in own]
        known, sums = ([next(values) for _ in self._gauges] for _ in range(2))
        row: dict[str, Any] = {}
        for column, used, of_all in zip(("peak_memory_gib", "reserved_memory_gib"), own, ends, strict=True):
            row |= {column: used, **extreme_columns(column, of_all)}
        row |= {"allocation_retries": retries, "allocation_failures": failures}
        row |= {name: total / count for name, count, total in zip(self._gauges, known, sums, strict=True) if count}
        return row, self._full(full, ranks, times) + self._note(known)

    def _full(self, count: int, ranks: Sequence[int], times: Sequence[int]) -> list[str]:
        """A line about the GPUs that were full. ranks: the first of them and the last; spare ones mean nothing."""
        if not count:
            return []
        named = [f"rank {rank} on {self._world.node_of(rank)} ({n} x)" for rank, n in zip(ranks, times, strict=True)]
        named = named if count > FEW else named[:count]
        cost = "each time, torch freed its cache and all processes waited; use less memory"
        return [f"FULL: GPU memory ran out on {abbreviated(named, count=count)}; {cost}"]

    def _note(self, known: Sequence[float]) -> list[str]:
        """A line about the gauges that are missing, once."""
        size = self._world.size
        missing = {name: size - int(count) for name, count in zip(self._gauges, known, strict=True) if count < size}
        if self._told or not missing:
            return []
        self._told = True
        reasons = "; ".join(dict.fromkeys(self._silent.values())) or "not on rank 0"
        counts = ", ".join(f"{name} for {count} of {size}" for name, count in missing.items())
        return [f"not known of GPUs: {counts} ({reasons})"]


def nvml(device: torch.device) -> Gauges:
    """Share of the last moments in which something ran, from 0 to 1, and watts. They need nvidia-ml-py."""
    return {
        "gpu_utilization": lambda: torch.cuda.utilization(device) / 100,
        "gpu_power_watts": lambda: torch.cuda.power_draw(device) / 1000,
    }
