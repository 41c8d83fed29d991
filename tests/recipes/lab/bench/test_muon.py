"""The muon suite: what it tunes, what it concludes from curves that are known, and one real run."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.lab.bench.muon import MATRIX_RATES, OTHER_RATES, RATES, SEEDS, Record, Trial, experiment, main, run
from recipes.lab.bench.muon_page import draw, page, share_of_steps, tokens_on_the_way

FACTS = {"git_commit": "0" * 40, "python": "3", "packages": {"torch": "2"}, "device": "cpu", "runs_at_a_time": 1}


def known(trials: Sequence[Trial], *, muon: float = 0.2) -> list[Record]:
    """Losses that are lowest at rates of 0.008 and 0.016, fall with the logarithm of steps, and that Muon lowers."""
    found = []
    for trial in trials:
        wrong = abs(math.log2(trial.lr / 8e-3)) + abs(math.log2((trial.matrix_lr or 1.6e-2) / 1.6e-2))
        last = 4 + 0.1 * wrong - 0.5 * math.log2(trial.steps / 400) - muon * (trial.optimizer == "muon")
        curve = [(1024 * trial.steps * part // 4, last + 4 - part) for part in (1, 2, 3, 4)]
        found.append(asdict(trial) | {"curve": curve, "loss": last, "step_seconds": 0.1})
    return found


@pytest.fixture
def records() -> Record:
    return {"environment": FACTS, **experiment(known)}


def test_both_optimizers_are_tuned_by_as_many_runs(records: Record) -> None:
    assert len(records["adamw"]) == len(records["muon"]) == len(RATES) == len(MATRIX_RATES) + len(OTHER_RATES)
    finals = {(one["optimizer"], one["lr"], one["matrix_lr"]) for one in records["finals"]}
    assert finals == {("adamw", 8e-3, 0.0), ("muon", 8e-3, 1.6e-2)}
    whole = [one["seed"] for one in records["finals"] if one["steps"] == 400]
    assert sorted(whole) == sorted(SEEDS * 2) and 0 not in whole  # not the seed that they were tuned with


def test_the_share_of_steps_is_where_a_shorter_run_ends_at_adamws_loss(records: Record) -> None:
    for seed in SEEDS:  # 0.2 lower is 2 to the power of 0.4 fewer steps
        assert share_of_steps(records, seed) == pytest.approx(2**-0.4)
        assert tokens_on_the_way(records, seed) == pytest.approx(1024 * 400 * (3 + 0.8) / 4)


def test_a_goal_outside_of_what_was_trained_is_said(records: Record) -> None:
    slow = {"environment": FACTS, **experiment(lambda trials: known(trials, muon=-0.1))}
    assert share_of_steps(slow, 1) is None and tokens_on_the_way(slow, 1) is None
    assert "did not reach AdamW's final loss with 3 of 3 seeds" in "\n".join(page(slow))
    fast = {"environment": FACTS, **experiment(lambda trials: known(trials, muon=2.0))}
    assert share_of_steps(fast, 1) == 0.5  # the shortest run, an upper limit


def test_the_page_has_every_run_and_says_whether_a_rate_is_at_the_edge(records: Record) -> None:
    text = "\n".join(page(records))
    assert text.count("| AdamW |") == text.count("| Muon |") == len(RATES)
    assert "No best rate is at the edge" in text and "after 76% of AdamW's tokens" in text
    for one in records["adamw"]:
        one["loss"] += 1000 * one["lr"]
    assert "AdamW's best lr is at the edge of what was tried" in "\n".join(page(records))


def test_the_picture_is_drawn(records: Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture")
    draw(records, tmp_path / "muon.png")
    assert (tmp_path / "muon.png").stat().st_size > 10_000


def test_the_documents_are_those_of_the_whole_experiment(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave --steps out"):
        main(["--write-docs", "--steps=20", f"--folder={tmp_path}"])


@pytest.mark.slow
def test_a_run_that_fails_ends_the_suite_and_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ended with exit code 2; see .*adamw-0\.001-seed0-0\.txt"):
        run(Trial("adamw", 1e-3, steps=0), tmp_path)


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial("muon", 8e-3, 1.6e-2, steps=4)
    rows = [{"step": 1, "step_seconds": 9.0}, {"step": 4, "step_seconds": 0.5}]
    rows += [{"step": 4, "tokens": 4096, "validation_loss": 3.0}]
    (tmp_path / trial.name).mkdir()
    (tmp_path / trial.name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: sys.exit("trained"))
    found = run(trial, tmp_path)
    assert (found["curve"], found["loss"], found["step_seconds"]) == ([(4096, 3.0)], 3.0, 0.5)
