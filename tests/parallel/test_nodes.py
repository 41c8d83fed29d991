"""Which processes share a node, and what is said of it."""

import pytest

from parallel.config import MeshDegrees
from parallel.errors import UserError
from parallel.nodes import Node, arrange, listed, placement, require_like_nodes


def nodes(*sizes: int) -> tuple[Node, ...]:
    """gpu-0, gpu-1 ... with so many processes each."""
    return arrange([(f"gpu-{number}", number) for number, size in enumerate(sizes) for _ in range(size)])


def test_a_node_is_a_launcher_on_a_host() -> None:
    assert nodes(2, 1) == (Node("gpu-0", (0, 1)), Node("gpu-1", (2,)))
    assert arrange([("host", 0), ("host", 0), ("host", 1)]) == (Node("host#0", (0, 1)), Node("host#1", (2,)))
    # Processes of a starter that numbers no launchers.
    assert arrange([("b", 0), ("a", 0), ("b", 0)]) == (Node("b", (0, 2)), Node("a", (1,)))


def test_like_nodes_are_required() -> None:
    require_like_nodes(nodes(8))
    require_like_nodes(nodes(8, 8, 8))
    with pytest.raises(
        UserError, match=r"but there are 7 on gpu-2 and 8 on gpu-0, gpu-1; start as many on each \(NPROC\)"
    ):
        require_like_nodes(nodes(8, 8, 7))
    with pytest.raises(UserError, match=r"consecutive ranks on each node, but those of a, b are scattered"):
        require_like_nodes(arrange([("a", 0), ("b", 1)] * 2))


@pytest.mark.parametrize(
    ("degrees", "sizes", "line"),
    [
        ((1, 8), (8,), None),
        ((2, 4), (4, 4), "nodes: 2 of 4 processes (gpu-0, gpu-1); each shard group is inside one node"),
        ((4, 2), (4, 4), "nodes: 2 of 4 processes (gpu-0, gpu-1); each shard group is inside one node"),
        ((1, 8), (4, 4), "nodes: 2 of 4 processes (gpu-0, gpu-1); each shard group spans 2 nodes"),
        ((2, 6), (4, 4, 4), "nodes: 3 of 4 processes (gpu-0, gpu-1, gpu-2); each shard group spans 2 nodes"),
        ((4, 1), (1, 1, 1, 1), "nodes: 4 of 1 process (gpu-0, gpu-1, gpu-2, gpu-3); nothing is sharded"),
        ((3, 2), (3, 3), "nodes: 2 of 3 processes (gpu-0, gpu-1); 1 of 3 shard groups crosses nodes"),
        ((4, 2), (3, 2, 3), "nodes: 3 of 2 or 3 processes (gpu-0, gpu-1, gpu-2); 2 of 4 shard groups cross nodes"),
    ],
)
def test_where_the_shard_groups_are(degrees: tuple[int, int], sizes: tuple[int, ...], line: str | None) -> None:
    assert placement(MeshDegrees(*degrees), nodes(*sizes)) == ([] if line is None else [line])


def test_many_names_are_cut_short() -> None:
    assert listed([f"gpu-{n}" for n in range(1, 101)]) == "gpu-1, gpu-2, gpu-3, ... gpu-100: 100 in all"
    assert listed(["a", "b"]) == "a, b"
