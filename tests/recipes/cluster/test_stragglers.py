"""Stragglers found from every process's seconds, and real runs with one."""

import json
import random
import re
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.config import MeshDegrees
from parallel.dist import World, start, stop
from parallel.mesh import build_mesh
from recipes.cluster.stragglers import (
    COMPUTE,
    DATA,
    IN_A_ROW,
    MOST_NAMED,
    SLOWER,
    SLOWER_ON_CPUS,
    WINDOW,
    Comparison,
    Straggler,
    Stragglers,
    around,
    typical,
)
from recipes.metrics.clock import RunClock
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.training.trainer import Trainer
from tests.meshes import mesh_degrees
from tests.processes import run_processes, untimed
from tests.test_hangs import ill_run
from tests.training import change, rows, training

HOSTS = ["a", "a", "b", "b"]


class Processes:
    """Several processes' windows, and what a host reads of their comparison."""

    def __init__(self, hosts: Sequence[str], *, slower: float = SLOWER, stages: int = 1) -> None:
        self.windows = [deque[tuple[float, float, float]](maxlen=WINDOW) for _ in hosts]
        self.comparison = Comparison(hosts.__getitem__, slower=slower, stages=stages)

    def add(self, step: float, data: Sequence[float], compute: Sequence[float]) -> list[Straggler]:
        """Take in a logged step: its seconds, and those by rank. Returns the present stragglers."""
        for window, waited, worked in zip(self.windows, data, compute, strict=True):
            window.append((step, waited, worked))
        if len(self.windows[0]) < WINDOW:
            return []
        rows = torch.tensor([typical(window) for window in self.windows], dtype=torch.float64)
        return self.comparison.read(self.comparison.summary(rows).tolist())[0]


def names(processes: Processes, data: list[float], compute: list[float], steps: int) -> list[list[tuple[int, str]]]:
    """(rank, phase) named at each of `steps` logged steps, which take a second each."""
    found = [processes.add(1.0, data, compute) for _ in range(steps)]
    return [[(one.rank, one.phase) for one in at_step] for at_step in found]


def test_a_process_that_computes_a_third_slower_is_named_within_twenty_logged_steps() -> None:
    first = WINDOW + IN_A_ROW - 1
    assert first <= 20
    found = names(Processes(HOSTS), [0.0] * 4, [0.5, 0.5, 0.66, 0.5], 20)
    assert found == [[]] * (first - 1) + [[(2, COMPUTE)]] * (20 - first + 1)


def test_a_process_that_waits_longer_for_data_is_named() -> None:
    assert names(Processes(HOSTS), [0.2, 0.2, 0.2, 0.3], [0.5] * 4, 20)[-1] == [(3, DATA)]


def test_a_process_that_becomes_slow_later_is_named_until_it_recovers() -> None:
    processes = Processes(HOSTS)
    names(processes, [0.0] * 4, [0.5] * 4, 100)
    assert names(processes, [0.0] * 4, [0.5, 0.7, 0.5, 0.5], 20)[-1] == [(1, COMPUTE)]
    assert names(processes, [0.0] * 4, [0.5] * 4, 5)[-1] == []


def test_a_process_on_cpus_is_named_only_when_it_takes_twice_as_long() -> None:
    """One that shares its core takes a third longer."""
    assert names(Processes(HOSTS, slower=SLOWER_ON_CPUS), [0.0] * 4, [0.3, 0.3, 0.55, 0.3], 20)[-1] == []
    found = names(Processes(HOSTS, slower=SLOWER_ON_CPUS), [0.0] * 4, [0.3, 0.3, 0.65, 0.3], 20)
    assert found[-1] == [(2, COMPUTE)]


def test_of_two_processes_the_slower_is_named() -> None:
    assert names(Processes(["a", "b"]), [0.0] * 2, [0.5, 0.7], 20)[-1] == [(1, COMPUTE)]


def test_a_slow_process_is_not_named_while_the_time_is_a_small_part_of_the_step() -> None:
    assert not any(names(Processes(HOSTS), [0.001, 0.04, 0.001, 0.001], [0.5, 0.5, 0.6, 0.5], 50))


def test_in_a_pipeline_only_processes_of_one_stage_are_compared_for_compute() -> None:
    work = [0.2, 0.2, 0.2, 0.2, 0.9, 0.9, 0.9, 0.9]
    assert not any(names(Processes(HOSTS * 2, stages=2), [0.0] * 8, work, 50))
    work[2] = 0.3
    processes = Processes(HOSTS * 2, stages=2)
    assert names(processes, [0.0] * 8, work, 20)[-1] == [(2, COMPUTE)]
    assert [(one.value, one.median) for one in processes.add(1.0, [0.0] * 8, work)] == [(0.3, 0.2)]


def test_a_stage_of_one_process_is_compared_for_data_alone() -> None:
    work = [0.2, 0.9, 0.5, 0.5]
    assert names(Processes(HOSTS, stages=4), [0.0, 0.0, 0.3, 0.0], work, 20)[-1] == [(2, DATA)]


def test_noise_names_no_process() -> None:
    """A quarter of all readings are one and a half to four times too long, on any process."""
    draw = random.Random(0)
    processes = Processes(HOSTS)
    for _ in range(2000):
        noisy = [0.3 * (draw.uniform(1.5, 4.0) if draw.random() < 0.25 else draw.uniform(0.95, 1.05)) for _ in HOSTS]
        assert not processes.add(1.0, noisy, noisy[::-1])


def test_of_thousands_of_processes_a_host_reads_as_many_numbers_as_of_a_few_and_names_the_same_one() -> None:
    read = []
    for size in (64, 16_384):
        rows = torch.full((size, 3), 0.5, dtype=torch.float64)
        rows[size - 3, 1] = 0.66
        comparison = Comparison(lambda rank: f"node-{rank // 8}")
        for _ in range(IN_A_ROW):
            numbers = comparison.summary(rows).tolist()
        read.append(len(numbers))
        [found], counts = comparison.read(numbers)
        assert (found.rank, found.node, found.phase) == (size - 3, f"node-{(size - 3) // 8}", COMPUTE)
        assert (found.value, found.median, counts) == (0.66, 0.5, {DATA: 0, COMPUTE: 1})
    assert read[0] == read[1] < 100


def test_the_longest_wait_for_data_counts(alone: World) -> None:
    everyone = [Stragglers(alone, RunClock(alone.device)) for _ in range(3)]
    times = [(1.0, 0.1, 0.5), (1.1, 0.0, 0.9), (1.0, 0.3, 0.1)]  # of a step, its data and its compute
    rows = [stragglers.counts(*own) for stragglers, own in zip(everyone, times, strict=True)]
    assert everyone[0].summary(torch.tensor(rows, dtype=torch.float64)).tolist() == [0.3]


def test_of_many_slow_processes_the_slowest_are_named_and_the_others_counted() -> None:
    rows = torch.full((1000, 3), 0.5, dtype=torch.float64)
    rows[:400, 0] = 1.0 + torch.arange(400, dtype=torch.float64)
    comparison = Comparison(str)
    for _ in range(IN_A_ROW):
        found, counts = comparison.read(comparison.summary(rows).tolist())
    assert [one.rank for one in found] == [*range(400 - MOST_NAMED, 400)] and counts == {DATA: 400, COMPUTE: 0}


class Operators(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called = set[Any]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(operator)
        return operator(*args, **(kwargs or {}))


def test_no_operator_of_the_comparison_is_one_that_gpus_refuse_for_equal_bits() -> None:
    with Operators() as operators:
        for stages in (1, 2):
            Comparison(str, stages=stages).summary(torch.zeros(4, 3, dtype=torch.float64))
    assert operators.called.isdisjoint({torch.ops.aten.median.dim, torch.ops.aten.kthvalue.default})


def rows_of_slow_run(fault: str, phase: str, folder: Path, corpus: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run whose rank 1 is slow from step 6 on, after checking that it is named for this phase."""
    code, err = ill_run(folder, corpus, fault, "--run.steps", "60", "--checkpoint.every", "0")
    assert (code, err) == (0, "")
    log = untimed((folder / "runs/ill/log.txt").read_text())
    # The model is so small that the fault takes longer than a step.
    [(step, rank, found)] = re.findall(
        r"^step +(\d+)  STRAGGLER: rank (\d) on \S+ takes [\d.]+ s for (\w+),", log, re.M
    )
    assert (rank, found) == ("1", phase) and int(step) <= 5 + 20
    rows = [json.loads(line) for line in (folder / "runs/ill/metrics.jsonl").read_text().splitlines()]
    [last] = rows[-1]["stragglers"]
    assert (last["rank"], last["phase"]) == (1, phase) and last["seconds"] > SLOWER_ON_CPUS * last["median"]
    return rows


@pytest.mark.slow
def test_a_run_names_a_process_that_is_slow_to_read_data(tmp_path: Path, corpus: Path) -> None:
    rows = rows_of_slow_run("slow_in_data", "data", tmp_path, corpus)
    # Rank 0, which keeps the clock, waits for rank 1 in a collective; that time counts as data.
    assert rows[-1]["wall_seconds"]["data"] > 50 * 0.1


# Meshes on which processes wait for each other inside the model

WELL, ILL = 20, 18
"""Steps before a process becomes slow, and after."""
FAULTS = {"2.1.1.2": 1, "1.1.2.2": 2, "2.2.1.1.1": 1}
"""Mesh -> the rank that becomes slow."""


def slow_runs(recipe: Recipe) -> None:
    """A run on each mesh, of which one process works at least three times as long from a step on."""
    world, step = start("cpu", seed=0), Trainer.take_step
    for mesh, ill in FAULTS.items():
        degrees = vars(mesh_degrees(mesh))
        usual: list[float] = []

        def work(self: Trainer, usual: list[float] = usual) -> Any:
            begin = time.thread_time()
            if self.step >= WELL:
                while time.thread_time() < begin + max(0.15, 2 * median(usual)):
                    pass
                return step(self)
            found = step(self)
            usual.append(time.thread_time() - begin)
            return found

        with training(change(recipe, mesh=degrees, run={"name": mesh}), world) as trainer:
            if world.rank == ill:
                Trainer.take_step = work  # type: ignore[method-assign]
            assert trainer.run() == 0
        Trainer.take_step = step  # type: ignore[method-assign]
    stop()


@pytest.fixture(scope="module")
def slow_rows(small: Recipe) -> dict[str, list[dict[str, Any]]]:
    """Mesh -> its rows of logged steps."""
    recipe = change(small, run={"steps": WELL + ILL}, batch={"global_batch_size": 4}, checkpoint={"every": 0})
    run_processes(4, slow_runs, recipe)
    return {mesh: rows(change(recipe, run={"name": mesh})) for mesh in FAULTS}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", FAULTS)
def test_a_slow_process_is_named_and_those_that_wait_for_it_in_its_group_are_not(
    mesh: str, slow_rows: dict[str, list[dict[str, Any]]]
) -> None:
    named = [(one["rank"], one["phase"]) for row in slow_rows[mesh] for one in row.get("stragglers", [])]
    assert len(named) >= 4 and set(named) == {(FAULTS[mesh], COMPUTE)}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", FAULTS)
def test_a_mesh_without_a_slow_process_names_nobody(mesh: str, slow_rows: dict[str, list[dict[str, Any]]]) -> None:
    assert not any("stragglers" in row for row in slow_rows[mesh][:WELL])


def collectives_around_heads(recipe: Recipe) -> list[tuple[int, int]]:
    """On each mesh, tied and untied: how many collectives a micro-batch has, and how many of them inside the head."""
    world, found = start("cpu", seed=0), []
    for degrees in (
        MeshDegrees(replicate=1, shard=2),
        MeshDegrees(replicate=1, shard=1, context=2),
        MeshDegrees(replicate=1, shard=1, tensor=2),
    ):
        for tied in (True, False):
            mesh = build_mesh(degrees, device_type="cpu")
            built = build(change(recipe, model={"tied_embeddings": tied}), world, mesh=mesh)
            inside = torch.profiler.record_function("inside")
            interface = built.model.interface
            head = built.model.get_submodule(interface.head or interface.tied_head or "")
            around(head, inside.__enter__, lambda inside=inside: inside.__exit__(None, None, None))
            tokens = torch.zeros(2, 32, dtype=torch.long)
            with torch.profiler.profile() as traced:
                built.model(tokens, tokens).backward()
            [span] = [event.time_range for event in traced.events() if event.name == "inside"]
            times = [event.time_range.start for event in traced.events() if re.match("_?c10d", event.name)]
            products = [event for event in traced.events() if event.name == "aten::mm"]
            assert any(span.start < product.time_range.start < span.end for product in products)
            found.append((len(times), sum(span.start <= time < span.end for time in times)))
    stop()
    return found


@pytest.mark.slow
def test_no_collective_interrupts_what_stands_for_computing_on_a_gpu(small: Recipe) -> None:
    for found in run_processes(2, collectives_around_heads, small):
        assert all(collectives > 0 and inside == 0 for collectives, inside in found), found
