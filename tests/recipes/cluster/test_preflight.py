"""What pre-flight finds before the first step, and the nodes that it names."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from parallel.dist import start, stop
from parallel.errors import UserError
from parallel.nodes import Node, arrange
from recipes.cluster import preflight as module
from recipes.cluster.findings import Measured, Room, node_warnings, slow_links, table, wrong_results
from recipes.cluster.links import Links
from recipes.cluster.preflight import (
    Facts,
    differences,
    local_facts,
    local_room,
    preflight,
    require_one_folder,
)
from tests.processes import run_processes

GB = 10**9
FINE = Links(False, (), 0.1, 0.1, {})
TOGETHER = (-0.001, 0.001)


def nodes(count: int) -> tuple[Node, ...]:
    """Nodes gpu-0, gpu-1 ... of two processes each."""
    return arrange([(f"gpu-{number}", number) for number in range(count) for _ in range(2)])


CPU = torch.device("cpu")


@pytest.fixture
def facts() -> Facts:
    """The facts of this process, with an H100."""
    gpu = {"nccl": "2.27.3", "driver": "580.65", "device": "NVIDIA H100"}
    return local_facts(CPU, recipe="", sources="") | gpu


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """The room that this process found, with an H100."""
    return replace(local_room(tmp_path, CPU), device=80 * GB, free_device=79 * GB)


def differ(facts: Sequence[Facts], nodes: Sequence[Node]) -> list[str]:
    return differences([[*own.values()] for own in facts], nodes)


def test_facts_of_a_cpu_process_have_versions_and_free_space_but_no_gpu(tmp_path: Path) -> None:
    found, own = local_facts(CPU, recipe="", sources=""), local_room(tmp_path / "runs" / "not" / "there", CPU)
    assert found["torch"] == torch.__version__ and found["device"] == "cpu"
    assert found["torchao"] and own.free_disk > 0 and own.free_temporary > 0
    assert found["driver"] is found["nccl"] is own.free_device is None


def test_the_hash_of_the_sources_changes_with_a_files_content_and_name(tmp_path: Path) -> None:
    for name in ("train.py", "models/a.py", "parallel/b.py", "recipes/data/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    hashes = {module.hash_of_sources(tmp_path)}
    for name in ("train.py", "recipes/data/c.py"):
        (tmp_path / name).write_text("2")
        hashes.add(module.hash_of_sources(tmp_path))
    (tmp_path / "models/a.py").rename(tmp_path / "models/d.py")
    hashes.add(module.hash_of_sources(tmp_path))
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "2.11.0"}, "torch: 2.11.0 on gpu-2, {torch} on the others; use one environment on all nodes"),
        ({"torchao": "0.17"}, "torchao: 0.17 on gpu-2, {torchao} on the others; use one environment"),
        ({"python": "3.12.1"}, "Python: 3.12.1 on gpu-2, {python} on the others"),
        ({"driver": "535.1"}, "the GPU driver: 535.1 on gpu-2, 580.65 on the others; request nodes of one kind"),
        ({"device": "NVIDIA A100"}, "the device: NVIDIA A100 on gpu-2, NVIDIA H100 on the others"),
        ({"sources": "0"}, "Shardwright's sources: 0 on gpu-2, {sources} on the others; use one checkout"),
    ],
)
def test_a_node_that_differs_is_named_with_the_value_and_the_remedy(
    facts: Facts, change: dict[str, str], message: str
) -> None:
    everyone = [facts] * 8
    everyone[5] = facts | change
    [found] = differ(everyone, nodes(4))
    assert found.startswith(message.format_map(facts))


def test_an_invisible_driver_version_is_not_a_difference(facts: Facts) -> None:
    """Containers may hide it."""
    assert differ([facts] * 8, nodes(4)) == []
    assert differ([facts, facts, facts | {"driver": None}, facts], nodes(2)) == []


def test_all_fields_and_values_that_differ_are_listed(facts: Facts) -> None:
    odd = facts | {"torch": "1", "python": "2"}
    found = differ([facts, facts, odd, facts, facts | {"torch": "3"}, facts], nodes(3))
    assert [line.partition(" on ")[0] for line in found] == ["Python: 2", "torch: 1", "torch: 3"]


def test_wrong_numbers_are_attributed_to_collective_and_node() -> None:
    links = [FINE, FINE, replace(FINE, wrong_sum=True), replace(FINE, wrong_parts=(1, 3))]
    assert wrong_results(links, nodes(2))[:-1] == [
        "all-reduce: wrong on gpu-1",
        "all-gather: what gpu-0 sends is wrong on gpu-1",
        "all-gather: what gpu-1 sends is wrong on gpu-1",
    ]
    assert wrong_results([FINE] * 4, nodes(2)) == []


@pytest.mark.parametrize(
    ("rank", "odd", "ahead", "warnings"),
    [
        (0, {}, (-0.001, 0.001), []),
        (0, {}, (-4.0, 20.0), []),  # a slow network makes the bounds wide: the clock may be right
        (
            3,
            {"free_device": 60 * GB},
            (0, 0),
            [("gpu-1", "rank 3 has 60 GB of GPU memory free, the median is 79 GB; is another process using it?")],
        ),
        (5, {"free_temporary": 10**8}, (0, 0), [("gpu-2", "the folder for temporary files has 100 MB free")]),
        (4, {}, (-9.0, -7.0), [("gpu-2", "its clock is -8.0 s ±1.0 from that of gpu-0")]),
    ],
)
def test_nodes_that_are_unlike_the_others_are_warned_of(
    rank: int, odd: dict[str, int], ahead: tuple[float, float], warnings: list[tuple[str, str]], room: Room
) -> None:
    everyone = [Measured(room, TOGETHER, FINE)] * 6
    everyone[rank] = Measured(replace(room, **odd), ahead, FINE)
    given = list(node_warnings(everyone, nodes(3)))
    assert [node for node, _ in given] == [node for node, _ in warnings]
    assert all(text.startswith(start) for (_, text), (_, start) in zip(given, warnings, strict=True))


def circle(count: int) -> list[Links]:
    """Links of `count` nodes of two processes. gpu-2 is slow to both neighbours, which are fast to their others."""

    def speed(one: int, other: int) -> float:
        return 5e9 if 2 in (one, other) else 50e9

    neighbours = {n: {(n + 1) % count, (n - 1) % count} - {n} for n in range(count)}
    exchanges = [
        {other * 2 + rank % 2: speed(rank // 2, other) for other in neighbours[rank // 2]} for rank in range(2 * count)
    ]
    return [replace(FINE, exchanges=own) for own in exchanges]


@pytest.mark.parametrize("count", [4, 5])
def test_a_slow_node_is_named_and_its_neighbours_are_not(count: int) -> None:
    found = list(slow_links(circle(count), nodes(count)))
    assert [name for name, _ in found] == ["gpu-2", "gpu-2"]
    assert found[0][1].startswith("rank 4 reaches 5 GB/s to its neighbours, the median is 50 GB/s")


def test_neither_of_two_nodes_is_named_as_slow() -> None:
    assert list(slow_links(circle(2), nodes(2))) == []


def test_the_table_has_a_row_for_each_node_with_its_worst_values(room: Room) -> None:
    usual = Measured(room, TOGETHER, replace(FINE, exchanges={0: 3e9}))
    head, *rows = table([usual] * 3 + [usual._replace(room=replace(room, free_device=GB))], nodes(2), always=[])
    assert head.split()[:4] == ["node", "ranks", "GPU", "free"]
    assert rows[0].split()[:4] == ["gpu-0", "0-1", "79", "GB"] and rows[1].split()[:4] == ["gpu-1", "2-3", "1", "GB"]
    assert rows[0].endswith("3 GB/s")


def test_the_table_has_no_gpu_column_without_gpus(room: Room) -> None:
    head, *_ = table([Measured(replace(room, free_device=None), TOGETHER, FINE)] * 4, nodes(2), always=[])
    assert "GPU" not in head


def test_the_table_of_very_many_nodes_has_only_the_named_ones_and_the_minima(room: Room) -> None:
    everyone = [Measured(room, TOGETHER, FINE)] * 200
    everyone[77] = Measured(replace(room, free_device=GB), TOGETHER, FINE)
    _, *rows = table(everyone, nodes(100), always=["gpu-38"])
    assert [row.split("  ")[0] for row in rows] == ["gpu-38", "least of 100"]
    assert all("1 GB" in row for row in rows)


# Real processes, each a node of its own


def observe(folder: Path) -> dict[str, Any]:
    """What pre-flight logs and raises: when all is well, with folders not shared, other fields, and another torch."""
    rank = int(os.environ["RANK"])
    os.environ |= {"GROUP_RANK": str(rank), "SLURMD_NODENAME": f"gpu-{rank}"}
    world = start("cpu", seed=0)
    lines: list[str] = []
    run = folder / "shared" / "runs" / "name"
    preflight(run, world, recipe="", cache=folder / "shared" / "cache", log=lines.append)
    found: dict[str, Any] = {"log": lines, "left": sorted(path.name for path in (folder / "shared").iterdir())}

    own = folder / str(rank)
    own.mkdir()
    os.chdir(own)
    with pytest.raises(UserError) as caught:
        require_one_folder(Path("runs/name"), world, what="the run's folder", field="run.output", patience=0.3)
    found["unshared"] = str(caught.value)
    os.environ["HOME"] = str(own)
    with pytest.raises(UserError) as caught:
        preflight(run, world, recipe="", cache=Path("~"), log=lines.append)
    found["cache"] = str(caught.value)
    found["left there"] = list(own.iterdir())

    with pytest.raises(UserError) as caught:
        preflight(run, world, recipe="other" if rank == 2 else "", log=lines.append)
    found["recipe"] = str(caught.value)
    version = torch.__version__
    torch.__version__ = "2.9.1" if rank == 1 else version
    with pytest.raises(UserError) as caught:
        preflight(run, world, recipe="", log=lines.append)
    found["versions"] = str(caught.value)
    torch.__version__ = version
    measure_links = module.measure_links
    module.measure_links = lambda *own: replace(measure_links(*own), wrong_sum=rank == 1)
    with pytest.raises(UserError) as caught:
        preflight(run, world, recipe="", log=lines.append)
    found["network"] = str(caught.value)
    stop()
    return found


Three = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Three:
    """The folder, and what each of three nodes observed."""
    folder = tmp_path_factory.mktemp("three")
    (folder / "shared").mkdir()
    return folder, run_processes(3, observe, folder)


@pytest.mark.slow
def test_three_nodes_that_agree_log_versions_speeds_and_a_table(three: Three) -> None:
    lines = three[1][0]["log"]
    assert lines[0].startswith("pre-flight: 3 processes on 3 nodes agree: cpu, sources ")
    assert f"torch {torch.__version__}" in lines[0]
    assert lines[1].startswith("pre-flight: all-reduce ") and "/s, all-gather " in lines[1]
    assert [line.split()[:2] for line in lines[2:6]] == [["node", "ranks"], *([f"gpu-{n}", str(n)] for n in range(3))]


@pytest.mark.slow
def test_preflight_leaves_no_file_behind(three: Three) -> None:
    assert all(answer["left"] == answer["left there"] == [] for answer in three[1])


@pytest.mark.slow
def test_another_version_on_one_node_is_refused_on_all(three: Three) -> None:
    expected = (
        "pre-flight: the processes differ; nothing was started\n"
        f"  torch: 2.9.1 on gpu-1, {torch.__version__} on the others; use one environment on all nodes:"
        " PYTHON, or .venv in a checkout that they share"
    )
    assert [answer["versions"] for answer in three[1]] == [expected] * 3


@pytest.mark.slow
def test_wrong_numbers_on_one_node_are_refused_on_all(three: Three) -> None:
    [message] = {answer["network"] for answer in three[1]}
    assert "\n  all-reduce: wrong on gpu-1\n" in message


@pytest.mark.slow
def test_another_recipe_on_one_node_is_refused(three: Three) -> None:
    message = three[1][0]["recipe"]
    assert "  the recipe: " in message and " on gpu-2, " in message


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_refused_on_all_nodes(three: Three) -> None:
    folder, answers = three
    message = answers[0]["unshared"]
    assert all(answer["unshared"] == message for answer in answers)
    assert f"a file that gpu-0 wrote into {folder}/0 (which is {folder}/1, {folder}/2 there" in message
    assert "did not appear on gpu-1, gpu-2 within 0.3 s; write a run.output" in message


@pytest.mark.slow
def test_a_token_cache_that_is_not_shared_is_refused(three: Three) -> None:
    message = three[1][0]["cache"]
    assert message.startswith("pre-flight: the nodes do not share the token cache; nothing was started\n")
    assert "; write a data.cache on a file system that all nodes share" in message


def observe_one_node(folder: Path) -> list[str]:
    world = start("cpu", seed=0)
    lines: list[str] = []
    with mock.patch.object(module, "hash_of_sources", return_value="0") as read:
        preflight(folder / "runs" / "name", world, recipe="", log=lines.append)
    assert read.call_count == (world.size > 1 and world.leads_node)
    stop()
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_one_node_logs_one_line_at_most(count: int, tmp_path: Path) -> None:
    [lines, *_] = run_processes(count, observe_one_node, tmp_path)
    assert len(lines) == count - 1
    assert all(line.startswith("pre-flight: 2 processes on 1 node agree; all-reduce ") for line in lines)
    assert not list(tmp_path.iterdir())
