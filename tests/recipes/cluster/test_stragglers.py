"""Who is slow, from every process's seconds; and real runs with one that is."""

import json
import os
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel.dist import start, stop
from parallel.nodes import arrange
from parallel.reduce import reduce_loss_and_times
from recipes.cluster.stragglers import (
    COMPUTE,
    DATA,
    IN_A_ROW,
    SLOWER_ON_CPUS,
    WINDOW,
    Communication,
    Comparison,
    ComputeTime,
    StepTimes,
    Stragglers,
    no_culprit_line,
)
from recipes.metrics.clock import FIRST_STEP, RunClock
from tests.processes import run_processes
from tests.test_hangs import ill_run

HOSTS = ["a", "a", "b", "b"]


def names(comparison: Comparison, data: list[float], compute: list[float], steps: int) -> list[list[tuple[int, str]]]:
    """(rank, phase) named at each of so many logged steps of a second."""
    found = [comparison.add(1.0, {DATA: data, COMPUTE: compute}) for _ in range(steps)]
    return [[(one.rank, one.phase) for one in at_step] for at_step in found]


def test_who_is_a_third_slower_is_named_within_twenty_logged_steps() -> None:
    quick = WINDOW + IN_A_ROW - 1
    assert quick <= 20
    found = names(Comparison(HOSTS), [0.0] * 4, [0.5, 0.5, 0.66, 0.5], 20)
    assert found == [[]] * (quick - 1) + [[(2, COMPUTE)]] * (20 - quick + 1)
    found = names(Comparison(HOSTS), [0.2, 0.2, 0.2, 0.3], [0.5] * 4, 20)
    assert found[-1] == [(3, DATA)]
    comparison = Comparison(HOSTS)
    names(comparison, [0.0] * 4, [0.5] * 4, 100)
    found = names(comparison, [0.0] * 4, [0.5, 0.7, 0.5, 0.5], 20)
    assert found[-1] == [(1, COMPUTE)]
    assert names(comparison, [0.0] * 4, [0.5] * 4, 5)[-1] == []  # it has recovered


def test_who_is_a_third_slower_on_a_cpu_may_share_the_core() -> None:
    assert names(Comparison(HOSTS, slower=SLOWER_ON_CPUS), [0.0] * 4, [0.3, 0.3, 0.55, 0.3], 20)[-1] == []
    found = names(Comparison(HOSTS, slower=SLOWER_ON_CPUS), [0.0] * 4, [0.3, 0.3, 0.65, 0.3], 20)
    assert found[-1] == [(2, COMPUTE)]


def test_of_two_the_slower_one_is_named() -> None:
    assert names(Comparison(["a", "b"]), [0.0] * 2, [0.5, 0.7], 20)[-1] == [(1, COMPUTE)]


def test_little_time_is_nobodys_concern() -> None:
    assert not any(names(Comparison(HOSTS), [0.001, 0.04, 0.001, 0.001], [0.5, 0.5, 0.6, 0.5], 50))


def test_noise_names_nobody() -> None:
    """A quarter of all readings are one and a half to four times too long, on any process."""
    draw = random.Random(0)
    comparison = Comparison(HOSTS)
    for _ in range(2000):
        noisy = [0.3 * (draw.uniform(1.5, 4.0) if draw.random() < 0.25 else draw.uniform(0.95, 1.05)) for _ in HOSTS]
        found = comparison.add(1.0, {DATA: noisy, COMPUTE: noisy[::-1]})
        assert not found


def slow_steps(communication: Communication, left: Sequence[float], *, compute: float = 0.5) -> list[int]:
    """At which logged steps communication is slow. left: seconds beside data and compute; other processes wait more."""
    found = []
    for number, seconds in enumerate(left, start=1):
        step, own = seconds + compute + 0.1, [compute, compute - 0.1, compute / 2, compute]
        if communication.add([step] * 4, [0.1, 0.0, 0.0, 0.1], own) is not None:
            found.append(number)
    return found


def test_slow_communication_is_noticed_within_twenty_logged_steps_and_until_it_is_over() -> None:
    communication = Communication(is_all=True)
    assert slow_steps(communication, [0.4] * 100) == []
    first, *_, last = slow_steps(communication, [0.55] * 50 + [0.4] * 20)
    assert first == WINDOW * 4 // 5 + IN_A_ROW - 1 <= 20 and 50 <= last < 60
    assert slow_steps(communication, [0.55] * 20)[0] == first


def test_what_takes_longer_may_be_little_or_usual() -> None:
    assert slow_steps(Communication(is_all=True), [0.4] * 50 + [0.5] * 50) == []  # a quarter more
    assert slow_steps(Communication(is_all=True), [0.1] * 50 + [0.16] * 50) == []  # not much of the step
    communication = Communication(is_all=True)
    assert slow_steps(communication, [0.4] * 30 + [0.6] * 20)
    communication.accept_as_usual()
    assert slow_steps(communication, [0.6] * 50) == []
    assert slow_steps(communication, [0.9] * 20)
    assert slow_steps(communication, [0.4] * 30 + [0.6] * 20)[-1] == 50  # it took less again in between


def test_on_a_gpu_what_is_left_is_not_all_communication() -> None:
    """Most of computing is in it: only what it grows by counts."""
    for is_all in (False, True):
        found = slow_steps(Communication(is_all=is_all), [0.8] * 50 + [0.95] * 20, compute=0.05)
        assert bool(found) is not is_all


def test_noise_is_not_slow_communication() -> None:
    """A quarter of all steps are much too long; and now and then four in a row."""
    draw, communication = random.Random(0), Communication(is_all=True)
    noisy = [0.3 * (draw.uniform(1.5, 4.0) if draw.random() < 0.25 else draw.uniform(0.9, 1.1)) for _ in range(5000)]
    for begin in range(0, 5000, 250):
        noisy[begin : begin + 4] = [0.9] * 4
    assert slow_steps(communication, noisy) == []


def waits() -> list[tuple[int, dict[str, Any], list[str]]]:
    """As one of three nodes: what comes of steps that only wait, at last for longer. Rank 2 hardly notices."""
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(rank)
    world = start("cpu", seed=0)
    clock, model = RunClock(world.device), nn.Identity()
    compute = ComputeTime(clock, world.device, model=model, head=model)
    stragglers = Stragglers(world, clock)
    found = []
    with clock(FIRST_STEP):
        for step in range(WINDOW + 1 + 20):
            time.sleep(0.05 if step > WINDOW else (0.005, 0.02, 0.045)[rank])
            clock.count_step()
            own = [*clock.seconds_per_step(), compute.seconds()]
            loss, times = reduce_loss_and_times(torch.tensor(1.0), own, loss_group=dist.group.WORLD)
            assert loss == 3
            row, lines = stragglers.compare(StepTimes(*times.t().tolist()))
            found.append((stragglers._probes, row, lines))
            clock.restart()
    stop()
    return found


def test_all_processes_measure_their_links_at_the_same_step() -> None:
    """Else the run would hang."""
    answers = run_processes(3, waits)
    assert answers[0] == answers[1] == answers[2]
    assert [probes for probes, _, _ in answers[0]][WINDOW] == 0 and answers[0][-1][0] >= 1


@pytest.mark.parametrize(
    ("count", "why"),
    [
        (1, "all processes are on gpu-0"),
        (2, "gpu-0 and gpu-1 exchange 900 MB/s, and with two nodes neither can be named"),
        (3, "no link between nodes is slower than the others"),
    ],
)
def test_where_nobody_can_be_named_the_links_are_told(count: int, why: str) -> None:
    nodes = arrange([(f"gpu-{number}", number) for number in range(count)])
    best = {rank: 9e8 + rank for rank in range(count)} if count > 1 else {}
    assert no_culprit_line(0.25, best, nodes) == f"SLOWER: communication takes 0.2500 s a step more than before; {why}"


@pytest.mark.parametrize(("fault", "phase"), [("slow_in_data", "data"), ("slow_in_work", "compute")])
def test_a_slow_process_of_a_run_is_named(fault: str, phase: str, tmp_path: Path, corpus: Path) -> None:
    code, err = ill_run(tmp_path, corpus, fault, "--run.steps", "60", "--checkpoint.every", "0")
    assert (code, err) == (0, "")
    log = (tmp_path / "runs/ill/log.txt").read_text()
    # The fault begins with step 6. The model is so small that the fault takes longer than a step.
    [(step, rank, found)] = re.findall(
        r"^step +(\d+)  STRAGGLER: rank (\d) on \S+ takes [\d.]+ s for (\w+),", log, re.M
    )
    assert (rank, found) == ("1", phase) and int(step) <= 5 + 20
    rows = [json.loads(line) for line in (tmp_path / "runs/ill/metrics.jsonl").read_text().splitlines()]
    [last] = rows[-1]["stragglers"]
    assert (last["rank"], last["phase"]) == (1, phase) and last["seconds"] > SLOWER_ON_CPUS * last["median"]
    if phase == "data":  # rank 0, whose clock counts, waits for rank 1 in a collective
        assert rows[-1]["wall_seconds"]["data"] > 50 * 0.1


def test_a_clean_run_names_nobody(tmp_path: Path, corpus: Path) -> None:
    code, err = ill_run(tmp_path, corpus, "well", "--run.steps", "150", "--checkpoint.every", "0")
    assert (code, err) == (0, "")
    log = (tmp_path / "runs/ill/log.txt").read_text()
    assert "STRAGGLER" not in log and "SLOWER" not in log
    assert "stragglers" not in (tmp_path / "runs/ill/metrics.jsonl").read_text()
