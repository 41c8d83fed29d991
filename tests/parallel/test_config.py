"""The arithmetic of mesh degrees."""

import pytest

from parallel.config import MeshConfig, MeshDegrees
from parallel.errors import UserError


@pytest.mark.parametrize(
    ("asked", "processes", "degrees"),
    [
        (MeshConfig(), 1, (1, 1)),
        (MeshConfig(), 8, (1, 8)),
        (MeshConfig(2, -1), 8, (2, 4)),
        (MeshConfig(-1, 8), 384, (48, 8)),
        (MeshConfig(4, 1), 4, (4, 1)),
        (MeshConfig(-1, 1), 3, (3, 1)),
    ],
)
def test_degrees_multiply_to_the_number_of_processes(
    asked: MeshConfig, processes: int, degrees: tuple[int, int]
) -> None:
    fitted = asked.fit(processes)
    assert (fitted.replicate, fitted.shard) == degrees
    assert fitted.data_parallel == processes


def test_context_and_tensor_degrees_are_inside_the_rest() -> None:
    assert MeshConfig(2, -1, context=2, tensor=2).fit(16) == MeshDegrees(replicate=2, shard=2, context=2, tensor=2)
    degrees = MeshConfig(shard="node", tensor=4).fit(16, nodes=2)
    assert degrees == MeshDegrees(replicate=2, shard=2, context=1, tensor=4)
    assert (degrees.data_parallel, degrees.copy, degrees.processes) == (4, 8, 16)
    assert str(degrees) == "replicate 2 x shard 2 x tensor 4"


def test_the_stages_of_a_pipeline_are_outside_the_rest() -> None:
    assert MeshConfig(2, -1, pipeline=2).fit(16) == MeshDegrees(pipeline=2, replicate=2, shard=4)
    degrees = MeshConfig(-1, 2, pipeline=4, tensor=2).fit(32)
    assert degrees == MeshDegrees(pipeline=4, replicate=2, shard=2, tensor=2)
    assert (degrees.data_parallel, degrees.per_layer, degrees.copy, degrees.processes) == (4, 4, 16, 32)
    assert str(degrees) == "pipeline 4 x replicate 2 x shard 2 x tensor 2"


@pytest.mark.parametrize("replicate", [1, -1, 2])
def test_a_pipeline_with_shard_node_has_a_replica_for_as_many_nodes_as_stages(replicate: int) -> None:
    degrees = MeshConfig(replicate, "node", pipeline=2, tensor=2).fit(32, nodes=4)
    assert degrees == MeshDegrees(pipeline=2, replicate=2, shard=4, tensor=2)


@pytest.mark.parametrize(
    ("mesh", "nodes", "message"),
    [
        (
            MeshConfig(shard="node", pipeline=2),
            3,
            'mesh.shard = "node": 3 nodes cannot be divided equally among the stages of pipeline 2; start a multiple',
        ),
        (
            MeshConfig(3, "node", pipeline=2),
            4,
            'mesh.replicate = 3: shard = "node" makes one replica per 2 nodes, and there are 4; omit replicate',
        ),
        (
            MeshConfig(2, -1, pipeline=5),
            None,
            "pipeline 5 x replicate 2 x shard -1 x context 1 x tensor 1 does not fit 12 processes: 12 / 10",
        ),
        (
            MeshConfig(1, 2, pipeline=2),
            None,
            "pipeline 2 x replicate 1 x shard 2 x context 1 x tensor 1 = 4 processes, but 12 were started",
        ),
    ],
)
def test_a_pipeline_that_does_not_fit_the_processes_is_refused(mesh: MeshConfig, nodes: int, message: str) -> None:
    with pytest.raises(UserError) as error:
        mesh.fit(12, nodes=nodes)
    assert message in str(error.value)


@pytest.mark.parametrize("replicate", [1, -1, 3])
def test_shard_node_shards_inside_each_node_and_replicates_across_nodes(replicate: int) -> None:
    """replicate may be left out, -1, or the number of nodes."""
    degrees = MeshConfig(replicate, "node").fit(12, nodes=3)
    assert (degrees.replicate, degrees.shard) == (3, 4)


@pytest.mark.parametrize(
    ("mesh", "nodes", "message"),
    [
        (MeshConfig(2, "node"), 3, 'mesh.replicate = 2: shard = "node" makes one replica per node, and there are 3'),
        (MeshConfig(1, "node"), 5, 'mesh.shard = "node": 12 processes cannot be divided equally among 5 nodes'),
        (MeshConfig(0, "node"), 3, "mesh.replicate = 0"),
        (
            MeshConfig(shard="node", tensor=3),
            3,
            "the 4 processes of a node cannot be divided by context 1 x tensor 3 = 3",
        ),
    ],
)
def test_shard_node_is_refused_where_the_nodes_do_not_fit(mesh: MeshConfig, nodes: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mesh.fit(12, nodes=nodes)


@pytest.mark.parametrize(
    ("asked", "processes", "message"),
    [
        (MeshConfig(2, 2), 8, r"replicate 2 x shard 2 .* = 4 processes, but 8 were started; start 4 \(NPROC\)"),
        (MeshConfig(3, -1), 8, r"8 / 3 is not an integer; start a multiple of 3"),
        (MeshConfig(-1, -1), 8, "replicate and shard are both -1"),
        (MeshConfig(0, 8), 8, "mesh.replicate = 0"),
        (MeshConfig(tensor=3), 8, r"8 / 3 is not an integer; start a multiple of 3"),
        (MeshConfig(shard=2, context=2, tensor=4), 8, r"context 2 x tensor 4 = 16 processes, but 8 were started"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_arithmetic(
    asked: MeshConfig, processes: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        asked.fit(processes)
