"""Which of the nodes that have come train: spare ones wait to take the place of a lost one, or fewer go on."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel.nodes import PREFIX
from recipes.cluster.neighbours import below

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ACTIVE = PREFIX + "active"
"""The numbers of the nodes that train, by place, as JSON."""
SETTLE_SECONDS = 2.0
"""How long node 0 waits for more nodes after the last one has come, once there are enough."""
FEWER_SECONDS = 60.0
"""The same, once there are fewer, with which the run may go on."""
LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Numbers:
    """With how many nodes a recipe trains."""

    spare: int
    """run.spare_nodes."""
    least: int
    """run.least_nodes; 0 = all that are not spare."""
    fits: Callable[[int, int], bool]
    """Whether so many processes on so many nodes can train it."""

    def most(self, came: int, *, started: int, processes: int) -> int:
        """How many train of those that have come; 0 = too few have. started: nodes. processes: of each node."""
        if came >= started - self.spare:
            return started - self.spare
        fewer = range(came, self.least - 1, -1) if self.least else ()
        return next((number for number in fewer if self.fits(number * processes, number)), 0)


def chosen(came: Collection[int], needed: int) -> list[int]:
    """Place -> node. A node that has come keeps the place of its number; spare ones, lowest first, take the others."""
    spare = iter(sorted(node for node in came if node >= needed))
    return [place if place in came else next(spare) for place in range(needed)]


def nodes_below(node: int, active: Sequence[int], *, nodes: int) -> list[int]:
    """Those below a node in the tree of neighbours.py, in which spare nodes follow the others: nobody needs them."""
    order = [*active, *(other for other in range(nodes) if other not in active)]
    return [order[place] for place in below(order.index(node), nodes)]


def known(store: "TCPStore") -> list[int]:
    """Place -> node; empty if node 0 has not decided yet."""
    return list(json.loads(store.get(ACTIVE))) if store.check([ACTIVE]) else []


def agreed(
    connected: Callable[[], "TCPStore | None"],
    came: Callable[["TCPStore"], set[int]],
    here: Callable[["TCPStore"], set[int]],
    *,
    node: int,
    nodes: int,
    most: Callable[[int], int],
) -> list[int]:
    """Place -> node, which node 0 decides when all nodes have come, or enough have and then no other for some seconds.

    connected: the store, once it is up. came: the nodes that have. here: those that still are. node: this one. most:
    how many of so many train.
    """
    latest, gone, since = set[int](), set[int](), time.monotonic()
    while True:
        with suppress(RuntimeError):  # of a store that goes, which the thread of Launchers.watch() notices
            if (store := connected()) is not None:
                if found := known(store):
                    return found
                if node == 0 and (now := came(store) - gone) != latest:
                    latest, since = now, time.monotonic()
                count = most(len(latest))
                wait = SETTLE_SECONDS if count == most(nodes) else FEWER_SECONDS
                if count and (len(latest) == nodes or time.monotonic() - since > wait):
                    gone |= latest - here(store)
                    if not gone & latest:
                        store.set(ACTIVE, json.dumps(chosen(latest, count)))
        time.sleep(LOOK_SECONDS if node == 0 else LOOK_SECONDS * max(1.0, nodes / 100))  # all ask 500 times a second
