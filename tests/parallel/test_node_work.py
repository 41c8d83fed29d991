"""Work done once per node."""

import os
from pathlib import Path

import pytest

from parallel.dist import on_node, start, stop
from parallel.errors import UserError
from tests.processes import run_processes

pytestmark = pytest.mark.slow

PROCESSES, PER_NODE = 4, 2


def on_two_nodes(place: Path) -> tuple[str, int, str]:
    """Of each process: the result of work on its node, the length of a long one, and the error of work that fails."""
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(rank // PER_NODE)  # two launchers on one host count as two nodes
    world = start("cpu", seed=0)

    def work() -> str:
        (place / str(rank)).touch()
        return f"of {rank}"

    def fail() -> None:
        if rank == PER_NODE:
            raise UserError("the second node sees no file")

    with pytest.raises(UserError) as raised:
        on_node(world, fail)
    found = on_node(world, work), len(on_node(world, lambda: "x" * 10_000)), str(raised.value)
    stop()
    return found


def test_one_process_of_each_node_works_for_all_of_it(tmp_path: Path) -> None:
    found = run_processes(PROCESSES, on_two_nodes, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "2"]
    assert found == [(f"of {first}", 10_000, "the second node sees no file") for first in (0, 0, 2, 2)]
