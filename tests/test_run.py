"""Runs as a user starts, watches, interrupts and repeats them: scripts/run.sh with two real processes."""

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from recipes.weights.convert import export_checkpoint
from tests.commands import Command
from tests.processes import untimed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
STEPS = 30


def command(corpus: Path, *overrides: str) -> list[str]:
    """The debug recipe made small, with every step logged. The run goes to runs/whole."""
    values = {
        "run.name": "whole",
        "run.steps": str(STEPS),
        "run.device": "cpu",
        "model.vocabulary": "512",
        "data.source": str(corpus),
        "data.tokenizer": "train:512",
        "data.validation_fraction": "0.05",
        "batch.sequence_length": "32",
        "batch.global_batch_size": "4",
        "schedule.warmup_steps": "3",
        "schedule.decay_steps": "5",
        "checkpoint.every": "20",
        "metrics.every": "1",
        "validation.every": "15",
        "validation.batches": "2",
        "validation.sample_tokens": "8",
    }
    if dict(pairwise(overrides)).get("--validation.every") == "0":
        del values["validation.batches"]  # which nothing would read
    options = [part for key, value in values.items() for part in (f"--{key}", value)]
    return [str(ROOT / "scripts/run.sh"), "configs/smollm3_debug.toml", *options, *overrides]


def environment(home: Path) -> dict[str, str]:
    """Variables of a run: of this machine only the PATH. The default cache is in the home folder."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHON": sys.executable, "NPROC": "2"}


def run(folder: Path, arguments: list[str], **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr. It returns when no process holds them any more."""
    every = environment(folder) | variables
    done = subprocess.run(["bash", *arguments], cwd=folder, env=every, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def start_here(folder: Path, arguments: list[str]) -> Command:
    """Start what scripts/run.sh starts once it has checked the recipe, in forks."""
    variables = environment(folder) | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    train = [ROOT / "train.py", ROOT / arguments[1], *arguments[2:]]
    return Command("scripts/launch.py", "--standalone", "--nproc-per-node=2", *train, cwd=folder, env=variables)


def run_here(folder: Path, arguments: list[str]) -> tuple[int, str, str]:
    """As run(), in forks and without the check of the recipe."""
    out, err = (process := start_here(folder, arguments)).communicate()
    return process.wait(), out, err


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """Loss by step; fails if a step is logged twice."""
    logged = [(row["step"], row["loss"]) for row in rows(folder) if "loss" in row]
    assert [step for step, _ in logged] == list(range(1, STEPS + 1))
    return dict(logged)


def contents(folder: Path) -> dict[str, str]:
    """Path -> checksum of every file below, except the lock, which names the last process that held it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to run in, which is also the home folder."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def whole(folder: Path, corpus: Path) -> str:
    """The screen output of a complete run."""
    code, out, err = run(folder, command(corpus))
    assert (code, err) == (0, "")  # no warnings
    return out


def test_a_run_prints_every_logged_step_and_validation(whole: str) -> None:
    assert re.match(r"pre-flight: 2 processes on 1 node agree; all-reduce .*\nwhole: smollm3_debug with ", whole)
    assert len(re.findall(r"^step +\d+/30  loss \d+\.\d{4}  .* [\d,]+ tokens/s  ", whole, flags=re.MULTILINE)) == STEPS
    assert len(re.findall(r"^step .*  [\d,]+ tokens  eta 0:00:\d\d$", whole, flags=re.MULTILINE)) == STEPS - 1
    assert len(re.findall(r"^step +\d+  validation loss \d\.\d{4}$", whole, flags=re.MULTILINE)) == 2


def test_a_run_ends_with_a_sample_a_summary_and_its_files(whole: str) -> None:
    end = whole[whole.rindex("a held-out text, and how the model goes on:") :]
    assert re.search(r"^done: 30 steps, 3,840 tokens in [\d.]+ s, [\d,]+ tokens/s.* validation loss \d", end, re.M)
    files = "checkpoints environment.json log.txt metrics.jsonl recipe.toml report.html report.md"
    assert f"\nwritten to runs/whole: {files}\nnext:\n" in end


def test_commands_that_a_run_ends_with_can_be_typed(whole: str, folder: Path) -> None:
    commands = whole[whole.index("\nnext:\n") :].splitlines()[2:]
    python = f"alias python={shlex.quote(sys.executable)}; shopt -s expand_aliases"
    for command in commands:
        done = subprocess.run(["bash", "-c", f"{python}\n{command}"], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert len(commands) == 3 and (folder / "runs/whole-hf/model.safetensors").is_file()


def test_export_has_a_model_card_with_the_data_the_steps_the_losses_and_the_recipe(whole: str, folder: Path) -> None:
    [checkpoint, *_] = sorted((folder / "runs/whole/checkpoints").iterdir(), reverse=True)
    export_checkpoint(checkpoint, folder / "card")
    card = ModelCard.load(folder / "card/README.md")
    about = card.data.to_dict()
    assert (about["library_name"], about["pipeline_tag"]) == ("transformers", "text-generation")
    assert about["license"] == "unknown" and "## Usage\n" in card.text
    assert "# whole\n" in card.text and "for 30 steps on 3,840 tokens." in card.text and "3,840 |" in card.text
    [loss] = re.findall(r"\| validation_loss \| ([\d.]+) \|", card.text)
    assert f"validation loss {loss}\n" in whole
    assert (folder / "runs/whole/recipe.toml").read_text().rstrip() in card.text


def test_the_log_holds_what_was_on_the_screen(whole: str, folder: Path) -> None:
    assert untimed((folder / "runs/whole/log.txt").read_text()).expandtabs() == whole.expandtabs()


def test_the_recipe_of_a_pipeline_follows_the_same_curve(whole: str, folder: Path, corpus: Path) -> None:
    script, _, *options = command(corpus, "--run.name", "stages")
    code, out, err = run(folder, [script, "configs/smollm3_debug_pipeline.toml", *options])
    assert (code, err) == (0, "")  # no warnings
    assert "pipeline parallelism: interleaved, blocks 0+2 | 1+3" in out
    assert losses(folder / "runs/stages") == pytest.approx(losses(folder / "runs/whole"), abs=1e-5)


def test_the_recipe_with_experts_follows_one_curve_however_they_are_divided(folder: Path, corpus: Path) -> None:
    script, _, *options = command(corpus, "--validation.batches", "1")
    for processes, *more in (("1",), ("2", "--mesh.expert", "2")):
        name = f"experts{processes}"
        arguments = [script, "configs/moe_debug.toml", *options, "--run.name", name, *more]
        code, out, err = run(folder, arguments, NPROC=processes, OMP_NUM_THREADS="1")
        assert (code, err) == (0, "")  # no warnings
    assert "experts divided over 2 processes" in out
    divided, whole = losses(folder / "runs/experts2"), losses(folder / "runs/experts1")
    assert {step: divided[step] for step in range(1, 6)} == pytest.approx(
        {step: whole[step] for step in range(1, 6)}, abs=1e-5
    )
    # Later, a rounding can send a token whose two best routers are level to the other expert: seen from step 15 on.
    assert divided == pytest.approx(whole, abs=0.05)
    for row in rows(folder / "runs/experts2"):
        assert row.get("expert_load/dead", 0) == 0


def test_a_run_saves_checkpoints_when_due_and_after_the_last_step(whole: str, folder: Path) -> None:
    names = sorted(path.name for path in (folder / "runs/whole/checkpoints").iterdir())
    assert names == ["step-00000020", "step-00000030"]


def test_repeating_a_finished_run_changes_no_result(whole: str, folder: Path, corpus: Path) -> None:
    before = contents(folder / "runs/whole")
    code, out, err = run_here(folder, command(corpus))
    assert (code, err) == (0, "")
    assert "this run has its 30 steps already" in out
    assert "written to runs/whole: " in out
    assert not re.search(r"^step +\d+/|^done:", out, flags=re.MULTILINE)
    losses(folder / "runs/whole")
    after = contents(folder / "runs/whole")
    assert after.keys() == before.keys()
    changed = {name for name in after if after[name] != before[name]}
    assert changed <= {"log.txt", "environment.json", "report.html", "report.md"}


@pytest.mark.parametrize("module", ["torch", "pydantic"], ids=["of the trainer", "of the recipe"])
def test_ctrl_c_during_an_import_prints_nothing(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("import time; print('importing', flush=True); time.sleep(600)")
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", ROOT / "configs/smollm3_debug.toml"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "")
    assert process.returncode == -signal.SIGINT  # 130 in a shell


def refused(folder: Path, arguments: list[str]) -> str:
    """The message of a command that must be refused and write nothing."""
    before = contents(folder / "runs") if (folder / "runs").exists() else None
    code, out, err = run(folder, arguments)
    # Pre-flight comes before the model is built, so some refusals come after its line.
    assert code == 2 and re.fullmatch(r"(pre-flight: 2 processes on 1 node agree; .*\n)?", out)
    assert "Traceback" not in err and len(err.splitlines()) < 20
    assert (contents(folder / "runs") if (folder / "runs").exists() else None) == before
    return err


def test_a_refusal_by_the_processes_always_has_exit_code_2(tmp_path: Path) -> None:
    """Blank text is noticed only by reading it. Normal interpreter shutdown beside gloo's threads may abort instead."""
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n" * 10_000)
    for _ in range(2):
        code, _, err = run_here(tmp_path, command(blank))
        assert code == 2
        assert err.startswith("data.source") and len(err.splitlines()) == 1
        assert not (tmp_path / "runs").exists()


def test_a_folder_of_another_recipe_is_refused_with_the_fields_that_differ(
    whole: str, folder: Path, corpus: Path
) -> None:
    message = refused(folder, command(corpus, "--optimizer.lr", "1e-4"))
    assert "runs/whole belongs to a different recipe:\n" in message
    assert "  optimizer.lr: 0.003 in the folder's recipe.toml, 0.0001 now\n" in message
    offer = message.partition("give this run another name: ")[2].partition(", or put these keys back")[0]
    assert "--optimizer.lr" in offer and shlex.split(offer)[-2:] == ["--run.name", "whole-2"]
    assert offer.count("--run.name") == 1 and Path(folder, shlex.split(offer)[0]).samefile(ROOT / "scripts/run.sh")
