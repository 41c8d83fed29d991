"""Which processes share a node, and the line about shard groups."""

import pytest

from parallel.config import MeshConfig
from parallel.errors import UserError
from parallel.nodes import Node, abbreviated, arrange, placement, require_like_nodes, require_neighbours
from recipes.data.config import BatchConfig
from recipes.recipe.rules_mesh import require_fits_world
from tests.meshes import mesh_degrees


def nodes(*sizes: int) -> tuple[Node, ...]:
    """Nodes gpu-0, gpu-1 ... with these numbers of processes."""
    return arrange([(f"gpu-{number}", number) for number, size in enumerate(sizes) for _ in range(size)])


def test_hosts_with_one_launcher_are_nodes_with_the_hosts_names() -> None:
    assert nodes(2, 1) == (Node("gpu-0", (0, 1)), Node("gpu-1", (2,)))


def test_launchers_of_one_host_are_numbered_nodes() -> None:
    assert arrange([("host", 0), ("host", 0), ("host", 1)]) == (Node("host#0", (0, 1)), Node("host#1", (2,)))


def test_nodes_may_have_scattered_ranks() -> None:
    """As when another starter assigns them, which does not number launchers."""
    assert arrange([("b", 0), ("a", 0), ("b", 0)]) == (Node("b", (0, 2)), Node("a", (1,)))


@pytest.mark.parametrize("sizes", [(8,), (8, 8, 8)])
def test_nodes_of_equal_size_are_accepted(sizes: tuple[int, ...]) -> None:
    require_like_nodes(nodes(*sizes))


def test_nodes_of_different_size_are_refused_by_name() -> None:
    message = r"but there are 7 on gpu-2 and 8 on gpu-0, gpu-1; start as many on each \(NPROC\)"
    with pytest.raises(UserError, match=message):
        require_like_nodes(nodes(8, 8, 7))


def test_nodes_with_scattered_ranks_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"consecutive ranks on each node, but those of a, b are scattered"):
        require_like_nodes(arrange([("a", 0), ("b", 1)] * 2))


TWO = "nodes: 2 of 4 processes (gpu-0, gpu-1); "


@pytest.mark.parametrize(
    ("degrees", "sizes", "line"),
    [
        ((1, 8), (8,), None),
        ((2, 4), (4, 4), f"{TWO}each shard group is inside one node"),
        ((4, 2), (4, 4), f"{TWO}each shard group is inside one node"),
        ((1, 8), (4, 4), f"{TWO}each shard group spans 2 nodes"),
        ((2, 6), (4, 4, 4), "nodes: 3 of 4 processes (gpu-0, gpu-1, gpu-2); each shard group spans 2 nodes"),
        ((4, 1), (1, 1, 1, 1), "nodes: 4 of 1 process (gpu-0, gpu-1, gpu-2, gpu-3); nothing is sharded"),
        ((3, 2), (3, 3), "nodes: 2 of 3 processes (gpu-0, gpu-1); 1 of 3 shard groups crosses nodes"),
        ((1, 2, 2, 2), (4, 4), f"{TWO}each shard group spans 2 nodes, each context group is inside one node"),
        ((2, 2, 1, 2), (4, 4), f"{TWO}each shard group is inside one node"),
        ((4, 1, 1, 2), (4, 4), f"{TWO}each copy of the model is inside one node"),
        ((1, 1, 4, 2), (4, 4), f"{TWO}each shard group spans 2 nodes, each context group spans 2 nodes"),
        ((4, 2), (3, 2, 3), "nodes: 3 of 2 or 3 processes (gpu-0, gpu-1, gpu-2); 2 of 4 shard groups cross nodes"),
    ],
)
def test_placement_says_which_nodes_groups_span(
    degrees: tuple[int, ...], sizes: tuple[int, ...], line: str | None
) -> None:
    assert placement(mesh_degrees(degrees), nodes(*sizes)) == ([] if line is None else [line])


def test_a_long_list_of_names_is_shortened() -> None:
    assert abbreviated([f"gpu-{n}" for n in range(1, 101)]) == "gpu-1, gpu-2, gpu-3, ... gpu-100: 100 in all"


def test_a_short_list_of_names_is_complete() -> None:
    assert abbreviated(["a", "b"]) == "a, b"


def test_tensor_groups_need_neighbouring_ranks_on_each_node() -> None:
    alternating = arrange([("a", 0), ("b", 1)] * 4)
    with pytest.raises(UserError, match=r"mesh\.tensor = 2: ranks 0 and 1 of a tensor group are on a and b, because"):
        require_fits_world(MeshConfig(tensor=2), BatchConfig(), nodes=alternating)  # as every run does
    require_neighbours(alternating, tensor=1)
    require_neighbours(arrange([("a", 0)] * 4 + [("b", 1)] * 4), tensor=4)
    require_neighbours(arrange([("a", 0), ("a", 0), ("b", 1), ("b", 1)] * 2), tensor=2)  # two by two is enough
    require_neighbours(arrange([("a", 0)] * 8 + [("b", 1)] * 4), tensor=4)
