"""The newest steps of a run in the memory of its nodes, all of which are this machine."""

import re
import shutil
from pathlib import Path

import pytest

from recipes.checkpoint.memory_folder import read_mark
from recipes.files.layout import CHECKPOINTS, MEMORY, step_folder
from tests.commands import Command
from tests.processes import descendants, wait_for
from tests.scripts.nodes import STEPS, arguments, kill, launch, losses
from tests.scripts.test_nodes import Nodes, ends, run

pytestmark = pytest.mark.slow

ON_DISK = 20
"""Steps between checkpoints on the disk."""


def words(folder: Path) -> list[str]:
    """What turns the copies on, in folder/memory."""
    (folder / "memory").mkdir(exist_ok=True)
    values = {"every": ON_DISK, "memory_every": 2, "memory_folder": folder / "memory"}
    return [word for name, value in values.items() for word in (f"--checkpoint.{name}", str(value))]


def in_memory(folder: Path) -> int:
    """The newest step that all processes of the run in folder/runs/two have kept."""
    mark = read_mark(folder / "runs" / "two")
    return mark.step if mark else 0


def what_is_kept(folder: Path) -> list[str]:
    """NODE/RANK of each folder in memory."""
    return sorted("/".join(path.parts[-2:]).partition("#")[2] for path in (folder / "memory").glob("*/*/*/*"))


def kill_all(node: Command) -> None:
    """Kill a supervisor, its launcher and the workers."""
    kill([node.pid, *descendants(node.pid)])
    node.communicate()


def last_checkpoint(folder: Path, name: str) -> list[bytes]:
    """The contents of its shards."""
    path = step_folder(folder / "runs" / name / CHECKPOINTS, STEPS)
    return [shard.read_bytes() for shard in sorted(path.glob("*.safetensors"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[list[tuple[int, float]], list[bytes]]:
    """The losses and the last checkpoint of two processes on one node that keep nothing in memory."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, _, err = run(folder, arguments(folder, corpus, "one", "--checkpoint.every", str(ON_DISK)), NPROC="2")
    assert (code, err) == (0, "")
    return losses(folder, "one"), last_checkpoint(folder, "one")


@pytest.mark.parametrize(
    ("mesh", "kept"),
    [((), ["0/rank-00000", "0/rank-00001", "1/rank-00000", "1/rank-00001"]),
     (("--mesh.replicate", "2", "--mesh.shard", "1"), ["0/rank-00000", "1/rank-00001"])],
    ids=["copies", "replicas"],
)  # fmt: skip
def test_a_node_that_has_lost_its_memory_begins_from_that_of_another(
    mesh: tuple[str, ...],
    kept: list[str],
    tmp_path: Path,
    corpus: Path,
    undisturbed: tuple[list[tuple[int, float]], list[bytes]],
) -> None:
    """Replicas need no copies. A run at its end leaves nothing."""
    job = Nodes(tmp_path, corpus, *words(tmp_path), *mesh, RESTARTS="2")
    wait_for("copies after the checkpoint", lambda: in_memory(tmp_path) > ON_DISK)
    kill_all(job.nodes[1])
    newest = in_memory(tmp_path)
    assert what_is_kept(tmp_path) == kept
    for path in (tmp_path / "memory").glob("*/*/*#1"):
        shutil.rmtree(path)
    job.nodes[1] = job.start(1)
    (out, err), (_, other_err) = ends(job.nodes)
    assert [node.returncode for node in job.nodes] == [0, 0], err + other_err
    begun = re.findall(
        r"\nbegins from the memory of the nodes: step (\d+); .*\n  the parts missing on \S+#1 came from", out
    )
    assert begun == [str(newest)] and "\nresumed from " not in out
    if mesh:  # an all-reduce may round otherwise than a reduce-scatter
        assert [loss for _, loss in job.losses] == pytest.approx([loss for _, loss in undisturbed[0]], rel=1e-4)
    else:
        assert (job.losses, last_checkpoint(tmp_path, "two")) == undisturbed
    assert [path.suffix for path in (tmp_path / "memory").glob("*/*")] == [".json"]
    assert not (job.folder / "runs" / "two" / MEMORY).exists()


def test_neither_another_recipe_nor_a_run_begun_anew_uses_old_memory(tmp_path: Path, corpus: Path) -> None:
    folder, used = tmp_path / "runs" / "two", set[str]()

    def begin(*overrides: str) -> str:
        """The screen of a start that is killed once it has kept something, which is then all that there is."""
        node = launch(tmp_path, [*arguments(tmp_path, corpus, "two", *words(tmp_path)), *overrides], NPROC="1")

        def has_kept() -> bool:
            assert node.poll() is None, node.communicate()
            mark = read_mark(folder)
            return mark is not None and mark.id not in used and mark.step > 0

        wait_for("copies", has_kept)
        kill([node.pid, *descendants(node.pid)])
        out, _ = node.communicate()
        mark = read_mark(folder)
        assert mark and {path.stem for path in (tmp_path / "memory").glob("*/*")} == {mark.id}
        used.add(mark.id)
        return out

    assert "in memory is" not in begin()
    assert " in memory is of another recipe, folder or mesh, and not used\n" in begin("--run.steps", "60")
    shutil.rmtree(folder)
    assert "memory of the nodes: step" not in begin()
