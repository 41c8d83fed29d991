"""Work that one process of each node does for all of its node, such as reading a file on a shared file system."""

from collections.abc import Callable
from typing import TypeVar, cast

from parallel.dist import World, on_all

Result = TypeVar("Result")


def on_node(world: World, work: Callable[[], Result]) -> Result:
    """Run `work`, which must not communicate, on the first process of each node and send its (small) result to the
    others of the node. A UserError on any node is raised on all processes."""
    own = on_all(world, work if world.leads_node else lambda: None)
    neighbours = next(node.ranks for node in world.nodes if world.rank in node.ranks)
    return cast(Result, world.messages.from_first(own, neighbours))
