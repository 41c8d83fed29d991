"""What is found out before the first step, and the nodes that are named for it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.dist import start, stop
from parallel.errors import UserError
from parallel.nodes import Node, arrange
from recipes.cluster import preflight as room
from recipes.cluster.links import Links
from recipes.cluster.preflight import (
    Facts,
    differences,
    local_facts,
    oddities,
    preflight,
    require_one_folder,
    slow_links,
    table,
    wrong_results,
)
from tests.processes import run_processes

GB = 10**9
FINE = Links(False, (), 0.1, 0.1, {})
TOGETHER = [(-0.001, 0.001)]


def nodes(count: int) -> tuple[Node, ...]:
    """gpu-0, gpu-1 ... of two processes each."""
    return arrange([(f"gpu-{number}", number) for number in range(count) for _ in range(2)])


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    """Those of this process, and of a GPU."""
    own = local_facts(tmp_path / "runs" / "not" / "there", torch.device("cpu"), recipe="")
    return replace(own, nccl="2.27.3", driver="580.65", device="NVIDIA H100", device_bytes=80 * GB, free_device=79 * GB)


def test_facts_of_this_machine(tmp_path: Path) -> None:
    found = local_facts(tmp_path / "runs" / "not" / "there", torch.device("cpu"), recipe="")
    assert found.torch == torch.__version__ and found.device == "cpu"
    assert found.torchao and found.free_disk > 0 and found.free_temporary > 0
    assert found.driver is found.nccl is found.free_device is None
    assert found == replace(
        local_facts(tmp_path, torch.device("cpu"), recipe=""),
        free_host=found.free_host,
        free_disk=found.free_disk,
        free_temporary=found.free_temporary,
    )


def test_a_change_of_the_sources_shows(facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.py", "models/a.py", "parallel/b.py", "recipes/data/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(room, "ROOT", tmp_path)
    hashes = {room._hash_of_sources()}
    for name in ("train.py", "recipes/data/c.py"):
        (tmp_path / name).write_text("2")
        hashes.add(room._hash_of_sources())
    (tmp_path / "models/a.py").rename(tmp_path / "models/d.py")
    hashes.add(room._hash_of_sources())
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "2.11.0"}, "torch: 2.11.0 on gpu-2, {torch} on the others; use one environment on all nodes"),
        ({"torchao": "0.17"}, "torchao: 0.17 on gpu-2, {torchao} on the others; use one environment"),
        ({"python": "3.12.1"}, "Python: 3.12.1 on gpu-2, {python} on the others"),
        ({"driver": "535.1"}, "the GPU driver: 535.1 on gpu-2, 580.65 on the others; ask for nodes of one kind"),
        ({"device": "NVIDIA A100"}, "the device: NVIDIA A100 on gpu-2, NVIDIA H100 on the others"),
        ({"sources": "0"}, "Shardwright's sources: 0 on gpu-2, {sources} on the others; use one checkout"),
    ],
)
def test_the_odd_node_is_named(facts: Facts, change: dict[str, str], message: str) -> None:
    everyone = [facts] * 8
    assert differences(everyone, nodes(4)) == []
    everyone[5] = replace(facts, **change)
    [found] = differences(everyone, nodes(4))
    assert found.startswith(message.format_map(vars(facts)))


def test_what_does_not_show_is_no_difference(facts: Facts) -> None:
    """A container need not show the driver's version."""
    assert differences([facts, facts, replace(facts, driver=None), facts], nodes(2)) == []


def test_everything_that_differs_is_listed(facts: Facts) -> None:
    odd = replace(facts, torch="1", python="2")
    found = differences([facts, facts, odd, facts, replace(facts, torch="3"), facts], nodes(3))
    assert [line.partition(" on ")[0] for line in found] == ["Python: 2", "torch: 1", "torch: 3"]


def test_wrong_numbers_are_traced() -> None:
    links = [FINE, FINE, replace(FINE, wrong_sum=True), replace(FINE, wrong_parts=(1, 3))]
    assert wrong_results([FINE] * 4, nodes(2)) == []
    assert wrong_results(links, nodes(2))[:-1] == [
        "all-reduce: wrong on gpu-1",
        "all-gather: what gpu-0 sends is wrong on gpu-1",
        "all-gather: what gpu-1 sends is wrong on gpu-1",
    ]


def test_what_is_odd_but_may_do_is_said(facts: Facts) -> None:
    clocks = TOGETHER * 6
    assert list(oddities([facts] * 6, clocks, nodes(3))) == []
    everyone = [facts, facts, facts, replace(facts, free_device=60 * GB), facts, replace(facts, free_temporary=10**8)]
    clocks[4:] = [(-9.0, -7.0)] * 2
    found = list(oddities(everyone, clocks, nodes(3)))
    assert [name for name, _ in found] == ["gpu-1", "gpu-2", "gpu-2"]
    assert found[0][1].startswith(
        "rank 3 has 60 GB of its GPU's memory, and 79 GB are usual; is another process there?"
    )
    assert "temporary files has 100 MB left" in found[1][1]
    assert "clock is -8.0 s ±1.0 from that of gpu-0" in found[2][1]
    # A slow network makes bounds wide: what is not certain is not said.
    assert list(oddities([facts] * 6, [(-4.0, 20.0)] * 6, nodes(3))) == []


def test_a_slow_node_is_told_from_its_neighbours() -> None:
    """gpu-2 is slow with both, who are fast with their others."""

    def speed(one: int, other: int) -> float:
        return 5e9 if 2 in (one, other) else 50e9

    def links(count: int) -> list[Links]:
        circle = {n: {(n + 1) % count, (n - 1) % count} - {n} for n in range(count)}
        partners = [
            {other * 2 + rank % 2: speed(rank // 2, other) for other in circle[rank // 2]} for rank in range(2 * count)
        ]
        return [replace(FINE, exchanges=exchanges) for exchanges in partners]

    for count in (4, 5):
        found = list(slow_links(links(count), nodes(count)))
        assert [name for name, _ in found] == ["gpu-2", "gpu-2"]
        assert found[0][1].startswith("rank 4 reaches 5 GB/s to its neighbours, and 50 GB/s are usual")
    assert list(slow_links(links(2), nodes(2))) == []


def test_the_table_has_a_row_for_each_node(facts: Facts) -> None:
    links = [replace(FINE, exchanges={0: 3e9})] * 4
    head, *rows = table([facts] * 3 + [replace(facts, free_device=GB)], TOGETHER * 4, links, nodes(2), odd=[])
    assert head.split()[:4] == ["node", "ranks", "GPU", "free"]
    assert rows[0].split()[:4] == ["gpu-0", "0-1", "79", "GB"] and rows[1].split()[:4] == ["gpu-1", "2-3", "1", "GB"]
    assert rows[0].endswith("3 GB/s")
    head, *_ = table([replace(facts, free_device=None)] * 4, TOGETHER * 4, links, nodes(2), odd=[])
    assert "GPU" not in head


def test_the_table_of_very_many_nodes_is_short(facts: Facts) -> None:
    everyone = [facts] * 200
    everyone[77] = replace(facts, free_device=GB)
    _, *rows = table(everyone, TOGETHER * 200, [FINE] * 200, nodes(100), odd=["gpu-38"])
    assert [row.split("  ")[0] for row in rows] == ["gpu-38", "least of 100"]
    assert all("1 GB" in row for row in rows)


# Real processes, each a node of its own


def look(folder: Path) -> dict[str, Any]:
    """What is said and raised: with nothing odd, another torch on rank 1, and folders that are not shared."""
    rank = int(os.environ["RANK"])
    os.environ |= {"GROUP_RANK": str(rank), "SLURMD_NODENAME": f"gpu-{rank}"}
    world = start("cpu", seed=0)
    said: list[str] = []
    preflight(folder / "shared" / "runs" / "name", world, recipe="", cache=folder / "shared" / "cache", log=said.append)
    found: dict[str, Any] = {"said": said, "left": sorted(path.name for path in (folder / "shared").iterdir())}

    own = folder / str(rank)
    own.mkdir()
    os.chdir(own)
    with pytest.raises(UserError) as caught:
        require_one_folder(Path("runs/name"), world, what="the run's folder", write="run.output", patience=0.3)
    found["unshared"] = str(caught.value)
    os.environ["HOME"] = str(own)
    with pytest.raises(UserError) as caught:
        preflight(folder / "shared" / "runs" / "name", world, recipe="", cache=Path("~"), log=said.append)
    found["cache"] = str(caught.value)
    found["left there"] = list(own.iterdir())

    with pytest.raises(UserError) as caught:
        preflight(folder / "shared" / "runs" / "name", world, recipe="other" if rank == 2 else "", log=said.append)
    found["recipe"] = str(caught.value)
    version = torch.__version__
    torch.__version__ = "2.9.1" if rank == 1 else version
    with pytest.raises(UserError) as caught:
        preflight(folder / "shared" / "runs" / "name", world, recipe="", log=said.append)
    found["versions"] = str(caught.value)
    stop()
    return found


def test_three_nodes(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    answers = run_processes(3, look, tmp_path)
    said = answers[0]["said"]
    assert said[0].startswith("pre-flight: 3 processes on 3 nodes agree: cpu, sources ")
    assert f"torch {torch.__version__}" in said[0]
    assert said[1].startswith("pre-flight: all-reduce ") and "/s, all-gather " in said[1]
    assert [line.split()[:2] for line in said[2:6]] == [["node", "ranks"], *([f"gpu-{n}", str(n)] for n in range(3))]
    for answer in answers:
        assert answer["left"] == answer["left there"] == []
        assert answer["versions"] == (
            "pre-flight: the processes are not alike; nothing was started\n"
            f"  torch: 2.9.1 on gpu-1, {torch.__version__} on the others; use one environment on all nodes:"
            " PYTHON, or .venv in a checkout that they share"
        )
        assert answer["unshared"] == answers[0]["unshared"]
    assert "  the recipe: " in answers[0]["recipe"] and " on gpu-2, " in answers[0]["recipe"]
    assert answers[0]["cache"].startswith(
        "pre-flight: the nodes do not share the cache of tokens; nothing was started\n"
    )
    assert "; write a data.cache on a file system that all nodes share" in answers[0]["cache"]
    assert f"what gpu-0 writes into {tmp_path}/0 (which is {tmp_path}/1, {tmp_path}/2 there" in answers[0]["unshared"]
    assert "does not show on gpu-1, gpu-2 within 0.3 s; write a run.output" in answers[0]["unshared"]


def look_alone(folder: Path) -> list[str]:
    world = start("cpu", seed=0)
    said: list[str] = []
    preflight(folder / "runs" / "name", world, recipe="", log=said.append)
    stop()
    return said


@pytest.mark.parametrize("count", [1, 2])
def test_one_node_has_one_line_at_most(count: int, tmp_path: Path) -> None:
    [said, *_] = run_processes(count, look_alone, tmp_path)
    assert len(said) == count - 1
    assert all(line.startswith("pre-flight: 2 processes on 1 node agree; all-reduce ") for line in said)
    assert not list(tmp_path.iterdir())
