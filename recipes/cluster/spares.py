"""Spare nodes: which of the nodes that have come train, and which wait to take the place of a lost one."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from torch.distributed import TCPStore

from parallel.dist import PREFIX
from recipes.cluster.neighbours import below

ACTIVE = PREFIX + "active"
"""The numbers of the nodes that train, by place, as JSON."""
SETTLE_SECONDS = 5.0
"""How long node 0 waits for more nodes after the last one has come, once there are enough."""
LOOK_SECONDS = 0.5


def chosen(came: Collection[int], needed: int) -> list[int]:
    """Place -> node. A node that has come keeps the place of its number; spare ones, lowest first, take the others."""
    spare = iter(sorted(node for node in came if node >= needed))
    return [place if place in came else next(spare) for place in range(needed)]


def nodes_below(node: int, active: Sequence[int], *, nodes: int) -> list[int]:
    """Those below a node in the tree of neighbours.py, in which spare nodes follow the others: nobody needs them."""
    order = [*active, *(other for other in range(nodes) if other not in active)]
    return [order[place] for place in below(order.index(node), nodes)]


def known(store: TCPStore) -> list[int]:
    """Place -> node; empty if node 0 has not decided yet."""
    return list(json.loads(store.get(ACTIVE))) if store.check([ACTIVE]) else []


def agreed(
    connected: Callable[[], TCPStore | None],
    came: Callable[[TCPStore], set[int]],
    *,
    node: int,
    nodes: int,
    spares: int,
) -> list[int]:
    """Place -> node, which node 0 decides when all nodes have come, or enough have and then no other for some seconds.

    connected: the store, once it is up. came: the nodes that have. node: this one.
    """
    latest, since = set[int](), time.monotonic()
    while True:
        with suppress(RuntimeError):  # of a store that goes, which the thread of Launchers.watch() notices
            if (store := connected()) is not None:
                if found := known(store):
                    return found
                if (now := came(store)) != latest:
                    latest, since = now, time.monotonic()
                settled = len(latest) >= nodes - spares and time.monotonic() - since > SETTLE_SECONDS
                if node == 0 and (settled or len(latest) == nodes):
                    store.set(ACTIVE, json.dumps(chosen(latest, nodes - spares)))
        time.sleep(LOOK_SECONDS)
