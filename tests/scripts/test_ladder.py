"""scripts/ladder.py: a real ladder of tiny models, its answer, interruptions, failures, and tasks of an array."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.lab.sweep import runner
from recipes.lab.sweep.runner import Ended
from recipes.metrics.ladder import read_ladder
from recipes.recipe.load import load
from tests.commands import run_command
from tests.processes import wait_for
from tests.recipes.lab.sweep.forked import run_forked
from tests.recipes.lab.sweep.test_loop import HOLD
from tests.scripts.called import call
from tests.scripts.cluster import Cluster, missing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/ladder.py"
RECIPE = """\
base = "{base}"
run = {{ name = "large", steps = 200 }}
data.source = "{corpus}"
data.tokenizer = "train:300"
batch = {{ sequence_length = 64, global_batch_size = 4, micro_batch_size = 2 }}
optimizer.lr = 1.5e-3
validation = {{ every = 50, batches = 2, sample_tokens = 0 }}
metrics.picture = false

[model]
vocabulary = 512
layers = 4
width = 128
feed_forward_width = 256
heads = 4
key_value_heads = 2
head_width = 32
"""
SIZES = ("--parameters", "4K,30K,200K", "--tokens", "32K,128K", "--seeds", "2", "--rates", "")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The folder of all ladders of this file, with the large recipe."""
    folder = tmp_path_factory.mktemp("ladder")
    text = RECIPE.format(base=ROOT / "configs/smollm3_debug.toml", corpus=corpus)
    (folder / "large.toml").write_text(text)
    return folder


def climb(home: Path, *arguments: str, train: Callable[..., Ended] = run_forked, **more: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command, called in this process. train: what runs a recipe."""
    environment = {"HOME": str(home), "OMP_NUM_THREADS": "1", "NPROC": "1"} | more
    arguments = ("large.toml", *SIZES, *arguments)
    return call("ladder", arguments, folder=home, environment=environment, train=train)


@pytest.fixture(scope="module")
def finished(home: Path) -> tuple[Path, str]:
    """The folder of a whole ladder, and what the command printed."""
    code, out, err = climb(home)
    assert (code, err) == (0, "")
    return home / "runs/ladders/large", out


def test_a_ladder_answers_with_a_page_and_a_file(finished: tuple[Path, str]) -> None:
    folder, out = finished
    assert "this recipe" in out and "95% interval" in out
    assert (folder / "ladder.md").read_text().count("\n| ") > 6
    ladder = read_ladder(folder / "ladder.json")
    assert ladder.parameters == pytest.approx(200_000, rel=0.25) and ladder.fits[-1][0] == 1.0
    model = load(folder.parents[2] / "large.toml").model
    predicted = ladder.predict(model.non_embedding_params(), 200 * 4 * 64)
    assert predicted is not None and predicted.low <= predicted.loss <= predicted.high


def test_a_run_joins_the_losses_of_its_trunk_and_its_fork(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    trunk = load(next(folder.glob("recipes/*seed0.toml")))
    forks = [load(path) for path in folder.glob(f"recipes/{trunk.run.name}-*steps.toml")]
    for fork in forks:
        origin = json.loads((folder.parents[2] / fork.run.folder / "origin.json").read_text())
        assert origin["step"] == int(fork.run.continue_from.rpartition("@")[2])
        rows = [json.loads(line) for line in (folder.parents[2] / fork.run.folder / "metrics.jsonl").open()]
        assert min(row["step"] for row in rows) > origin["step"]
        assert [row["step"] for row in rows if "validation_loss" in row][-1] == fork.run.steps


def never(*_: object, **__: object) -> Ended:
    raise AssertionError("a run was trained again")


def test_the_same_command_again_trains_nothing_and_answers_the_same(finished: tuple[Path, str], home: Path) -> None:
    code, out, err = climb(home, train=never)
    assert (code, err) == (0, "")
    assert out.partition("losses on")[2] == finished[1].partition("losses on")[2]


def test_a_run_that_fails_is_named_and_the_others_go_on(finished: tuple[Path, str], home: Path) -> None:
    folder = home / "broken/large"
    shutil.copytree(finished[0], folder)
    trunk = load(sorted(folder.glob("recipes/*seed0.toml"))[0]).run.name
    for place in folder.glob(f"runs/{trunk}*"):
        shutil.rmtree(place)
    (folder / "runs" / trunk).write_text("not a folder")
    code, out, err = climb(home, "--output", "broken", train=runner.run)
    assert (code, err) == (1, "")
    assert f"{trunk}: FAILED, refused: " in out and f"FAILED, {trunk} failed, which it continues from" in out
    assert "10 losses on 3 rungs" in out and f"failed          {trunk}: " in out


@pytest.mark.parametrize(
    ("key", "value"),
    [("data.validation_fraction", "0.1"), ("validation.source", "{corpus}"), ("data.text_documents", "line")],
)
def test_runs_that_another_text_judged_are_not_reused(
    finished: tuple[Path, str], home: Path, corpus: Path, key: str, value: str
) -> None:
    code, _, err = climb(home, f"--{key}", value.format(corpus=corpus))
    assert code == 2
    assert f"was trained with other values, so its loss does not belong to this ladder: {key}: " in err
    assert "give the options, the recipe and the NPROC of before, or write another --output" in err


def copied(finished: tuple[Path, str], folder: Path, name: str, loss: Callable[[int], float | None]) -> Path:
    """A copy of a ladder, with other validation losses in runs of this name. loss: from the run's parameters."""
    shutil.copytree(finished[0], folder)
    for metrics in sorted(folder.glob(f"runs/{name}/metrics.jsonl")):
        size = load(folder / f"recipes/{metrics.parent.name}.toml").model.non_embedding_params()
        rows = [json.loads(line) for line in metrics.open()]
        rows = [row | ({"validation_loss": loss(size)} if "validation_loss" in row else {}) for row in rows]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_refused_answer_names_the_one_that_is_left(finished: tuple[Path, str], home: Path) -> None:
    copied(finished, home / "rising/large", "*", lambda size: size / 1e5)
    code, _, err = climb(home, "--output", "rising")
    assert code == 2 and "the loss does not fall from rung" in err
    assert f"{Path('rising/large/ladder.json')} is still the answer of before" in err
    page = (home / "rising/large/ladder.md").read_text()
    assert "no prediction   the loss does not fall from rung" in page and page.count("\n| ") == 7


def test_a_full_disk_ends_the_ladder_with_its_reason(home: Path) -> None:
    def full(command: list[str], **options: Any) -> Ended:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        return Ended("crashed", "exit code 74", 1.0)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        code, out, err = climb(home, "--output", "full", train=full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and out.count("steps of") == 1
    assert "failed (crashed: exit code 74), and full/large has no room for the " in err and "make room" in err


def test_a_loss_that_is_nan_is_named_and_left_out(finished: tuple[Path, str], home: Path) -> None:
    name = min(finished[0].glob("runs/*seed1-*steps")).name
    copied(finished, home / "nan/large", name, lambda size: None)
    code, out, err = climb(home, "--output", "nan")
    assert (code, err) == (1, "")
    assert f"{name}: FAILED, its loss is nan; remove " in out and "11 losses on 3 rungs" in out


def test_runs_of_texts_that_changed_under_the_same_name_are_not_fitted_together(
    finished: tuple[Path, str], home: Path
) -> None:
    folder = home / "texts/large"
    shutil.copytree(finished[0], folder)
    before = (folder / "ladder.json").read_bytes()
    fork = sorted(folder.glob("runs/*seed1-*steps"))[0]
    [file] = fork.glob("checkpoints/*/data.json")
    file.write_text(json.dumps({"sources": {"text": {"tokens": "others"}}}))
    code, _, err = climb(home, "--output", "texts")
    assert code == 2 and f"and {fork.name} read different texts under the same name" in err
    assert (folder / "ladder.json").read_bytes() == before


def test_a_dry_run_in_a_folder_in_use_changes_nothing(finished: tuple[Path, str], home: Path) -> None:
    before = {path: path.read_text() for path in finished[0].glob("recipes/*")}
    with subprocess.Popen([sys.executable, "-c", HOLD, finished[0]], cwd=ROOT, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"held\n"
            code, _, err = climb(home, "--tokens", "32K,50K", "--dry-run")
        finally:
            other.kill()
    assert code == 2 and "is in use" in err
    assert {path: path.read_text() for path in finished[0].glob("recipes/*")} == before


def test_a_task_of_an_array_trains_one_rung_and_seed(home: Path) -> None:
    code, out, err = climb(home, "--output", "array", SLURM_ARRAY_TASK_ID="1")
    assert (code, err) == (0, "")
    trained = {path.parent.name for path in home.glob("array/large/runs/*/metrics.jsonl")}
    assert len(trained) == 3 and len({name.partition("-")[0] for name in trained}) == 1
    assert "[3/3]" in out and "this recipe" not in out
    code, _, err = climb(home, "--output", "array", SLURM_ARRAY_TASK_ID="9")
    assert code == 2 and "SLURM_ARRAY_TASK_ID=9: this ladder has the tasks 0 to 5" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rungs", "2"), "--rungs 2: must be 3 or more"),
        (("--seeds", "0"), "--seeds 0: must be 1 or more"),
        (("--seeds", "1"), "fewer than 5 rungs and seeds give no interval; write --seeds 2, or more rungs"),
        (("--tokens", "32K,32K"), "come out as [500, 500] steps; write lengths that differ more"),
        (("--output", "large.toml"), "cannot be made: "),
        (("--tokens", "32K"), "one length of runs says nothing of others; write two or more, such as --tokens"),
        (("--tokens", "many"), "--tokens many: must be a number from"),
        (("--rates", "0.5,-1"), "--rates -1: must be a number from"),
        (("--parameters", "10K"), "--parameters: a ladder of 1 sizes has no law; write 3 or more"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(home: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = climb(home, "--output", "none", *arguments)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not list(home.glob("none/large/runs/*"))


def test_a_name_that_leads_out_of_the_output_is_refused_before_anything_is_written(home: Path) -> None:
    code, _, err = climb(home, "--output", "none/deep", "--run.name", "../../x", "--dry-run")
    assert code == 2 and 'is the name of the run folder inside run.output; write a name without "/"' in err
    assert not (home / "x").exists() and not (home / "none/deep").exists()


def test_the_command_starts_without_torch_and_lists_its_runs(home: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "NPROC": "2"}
    arguments = [SCRIPT, "large.toml", *SIZES, "--dry-run", "--output", "dry", "--gpu", "h100", "--price", "1e6"]
    code, out, err = run_command(*arguments, cwd=home, env=environment)
    assert (code, err) == (0, "")
    said = re.search(r"\n  at least ([\d.]+) hours on 2 H100, .*, ([\d,.]+) in all\n$", out)
    assert said and 0 < float(said[2].replace(",", "")) / 2e6 < float(said[1]) + 0.05
    assert "3 rungs, 18 runs in 6 groups, NPROC=2, " in out and "  task 5: 2 sequences, learning rate " in out
    assert sorted(path.name for path in (home / "dry/large").iterdir()) == [".lock", "logs", "recipes"]


@pytest.mark.exhaustive  # 18 runs; test_a_task_of_an_array_trains_one_rung_and_seed has their parts
@pytest.mark.slurm
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_an_array_of_slurm_trains_a_ladder_that_the_command_then_answers(home: Path, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    options = [*SIZES[:-1], "''", "--output", "slurm"]
    command = " ".join(map(str, [sys.executable, SCRIPT, "large.toml", *options]))
    variables = {"PATH": os.environ["PATH"], "HOME": str(home), "NPROC": "1", "OMP_NUM_THREADS": "1"}
    try:
        cluster.start()
        flags = ["--array=0-5", "--nodes=1", "--output=slurm-%a.out", "--wrap"]
        cluster.submit(Path(command), [], folder=home, flags=flags, variables=variables)
        wait_for("the end of the array", lambda: not cluster.do("squeue", "-h"))
    finally:
        cluster.stop()
    logs = [(home / f"slurm-{task}.out").read_text() for task in range(6)]
    assert all("[3/3]" in log and "FAILED" not in log for log in logs), logs
    code, out, err = climb(home, "--output", "slurm", train=never)
    assert (code, err) == (0, "") and "this recipe" in out
