"""What the watchdog and the launchers ask of node 0's store, for any number of ranks."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from parallel.heartbeats import key_of_node, words_of_nodes
from parallel.nodes import arrange
from recipes.bench.scale_rows import Row
from recipes.cluster.others import reports_of, word_of
from recipes.cluster.rendezvous import LOOK_SECONDS
from recipes.cluster.watchdog import Report, seconds_between_reports, verdict

PER_NODE = 8
REQUESTS = Counter({"get": 2, "multi_get": 2})
"""Requests of one operation of a TCPStore, where it is not one: these wait for their keys first."""
AT_START = ("append", "add")
EACH_PERIOD = ("set", "multi_get")
EACH_LOOK = ("set", "check")
AT_THE_VERDICT = ("add", "check", "get", "check")
"""Operations of the process that speaks for its node; tests/recipes/cluster/test_watchdog.py counts the first two. At a
hang it publishes the node's answers and asks for the verdict, four times a period."""
HANG_TIMEOUT = 600.0
"""The default of run.hang_timeout."""


class CountingStore:
    """A store, and how often each of its operations was called."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.operations = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.operations.append(name)
            return operation(*arguments)

        return counted


def requests(operations: Sequence[str]) -> int:
    """Requests to the store that these operations take."""
    return sum(REQUESTS[name] or 1 for name in operations)


def watch_rows(ranks: int) -> list[Row]:
    """What the hosts of this many ranks, eight on a node, send to the store to watch each other."""
    nodes = math.ceil(ranks / PER_NODE)
    period = seconds_between_reports(HANG_TIMEOUT)
    looks = math.ceil((2 * period + 2) / (period / 4))  # until the judge waits no longer
    seconds, size = _judged(ranks)
    return [
        Row("watchdog: connections to the store", nodes, "connections", "counted"),
        Row("watchdog: store requests at start", nodes * requests(AT_START), "requests", "counted"),
        Row("watchdog: store requests each minute", nodes * requests(EACH_PERIOD) * 60 / period, "requests", "counted"),
        Row("launchers: store requests each minute", nodes * 60 / LOOK_SECONDS, "requests", "counted"),
        Row(
            "hang: store requests until the verdict",
            nodes * (requests(AT_THE_VERDICT) + looks * requests(EACH_LOOK)) + looks * requests(["check", "multi_get"]),
            "requests",
            "counted",
        ),
        Row("hang: requests for one look at all reports", requests(["check", "multi_get"]), "requests", "counted"),
        Row("hang: one look at all reports, and the verdict", seconds, "s", "simulated"),
        Row("hang: one look at all reports", size, "bytes", "simulated"),
        Row("end: watchdog's store requests", 2 * nodes, "requests", "counted"),
    ]


def _judged(ranks: int) -> tuple[float, int]:
    """Seconds and bytes to read what all nodes have published in a real store and to judge it: one rank is frozen."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    nodes = arrange([(f"node-{rank // PER_NODE}", 0) for rank in range(ranks)])
    report = Report(0, "", "step", 8101, 604.0, "parallel/reduce.py:17 sum_over_group", waits=True, answers=True)
    size = 0
    for number, node in enumerate(nodes):
        words = [word_of(replace(report, answers=rank != ranks // 2)) for rank in node.ranks]
        store.set(key_of_node(number), text := "\n".join(words))
        size += len(text)
    began = time.perf_counter()
    text = verdict(reports_of(nodes, words_of_nodes(store, len(nodes))))
    seconds = time.perf_counter() - began
    assert f"rank {ranks // 2} on " in text
    return seconds, size
