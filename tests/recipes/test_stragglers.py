"""Who is slow, from every process's seconds; and real runs with one that is."""

import json
import random
import re
from pathlib import Path

import pytest

from recipes.stragglers import COMPUTE, DATA, IN_A_ROW, WINDOW, Comparison
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
    assert (last["rank"], last["phase"]) == (1, phase) and last["seconds"] > 1.3 * last["median"]
    if phase == "data":  # rank 0, whose clock counts, waits for rank 1 in a collective
        assert rows[-1]["wall_seconds"]["data"] > 50 * 0.03


def test_a_clean_run_names_nobody(tmp_path: Path, corpus: Path) -> None:
    code, err = ill_run(tmp_path, corpus, "well", "--run.steps", "150", "--checkpoint.every", "0")
    assert (code, err) == (0, "")
    assert "STRAGGLER" not in (tmp_path / "runs/ill/log.txt").read_text()
    assert "stragglers" not in (tmp_path / "runs/ill/metrics.jsonl").read_text()
