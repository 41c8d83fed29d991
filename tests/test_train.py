"""The command line of train.py: exit codes, output, and what is imported."""

import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tomli

from parallel.errors import TemporaryError, UserError
from recipes.recipe.fields import sections
from recipes.recipe.load import load, to_toml
from tests.commands import run_command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
DEBUG = str(ROOT / "configs" / "smollm3_debug.toml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder to run in. Importing torch fails there, and a foreign package `recipes` is installed."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "site" / "recipes").mkdir()
    (tmp_path / "site" / "recipes" / "__init__.py").write_text("raise SystemExit('a foreign recipes was imported')")
    return tmp_path


def train(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of train.py, in a fork."""
    code, out, err = run_command("train.py", *arguments, cwd=folder, env={"COLUMNS": "80"})
    assert "Traceback" not in err
    return code, out, err


def train_anew(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """The same in a new interpreter, where importing torch fails and a foreign package comes first."""
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(folder / "site"), "COLUMNS": "80"},
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_check_prints_the_resolved_recipe_without_torch(folder: Path) -> None:
    code, out, err = train_anew(folder, DEBUG, "--run.steps", "300", "--check", "--processes", "2")
    assert (code, err) == (0, "")
    summary, _, recipe = out.partition("\n\n")
    resolved, _, verdict = recipe.removesuffix("\n").rpartition("\n")
    assert resolved + "\n" == to_toml(load(DEBUG, ["--run.steps", "300"]))
    unseen = "later rows, held-out texts, tasks, GPUs and room on the disk"
    assert verdict == f"# ok: sources whose first row was read: 1; not looked at: {unseen}"
    steps = "300 of 16 x 256 = 4,096 tokens, 1,228,800 in all; learning rate 0.003, wsd, warm-up 30, final decay 60"
    assert f"# steps: {steps}\n# on 2 processes: replicate 1 x shard 2; " in summary
    assert "# export: can be exported as smollm3\n" in summary
    assert "# validation: every 50 steps, on 0.02 of the documents\n# checkpoints: every 50 steps" in summary
    assert all(line.startswith("# ") for line in summary.splitlines())
    assert list(tomli.loads(out)) == [name for name in sections() if name != "plugins"]  # it loads none
    assert sorted(path.name for path in folder.iterdir()) == ["site"]  # nothing was written


def test_check_warns_of_a_model_that_no_device_holds(folder: Path) -> None:
    code, out, err = train(folder, DEBUG, "--check", "--model.name", "llama3_405b", "--data.tokenizer", "train:512")
    assert code == 0 and "TB per process" in out and len(err.splitlines()) == 1
    assert "per process on 1 process, more than any device has; shard over more of them" in err


def test_check_says_for_how_many_processes_it_counts_and_that_nothing_is_saved(folder: Path) -> None:
    code, out, err = train(folder, DEBUG, "--check", "--checkpoint.every", "0")
    assert (code, err) == (0, "") and "# on 1 process: " in out
    assert "for other numbers: --check --processes N --nodes M" in out
    assert "# checkpoints: none; nothing is saved" in out


def test_no_arguments_print_the_usage(folder: Path) -> None:
    code, out, err = train(folder)
    assert (code, out) == (2, "")
    assert err.startswith("no recipe given, as in ") and "\nusage: train.py RECIPE" in err
    assert all(len(line) <= 80 for line in err.splitlines())


def test_help_is_printed_without_torch(folder: Path) -> None:
    code, out, err = train_anew(folder, "--help")
    assert (code, err) == (0, "")
    assert "--optimizer.lr FLOAT" in out and "train.py RECIPE --check" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_help_shows_the_values_of_a_recipe(folder: Path) -> None:
    code, out, err = train(folder, DEBUG, "-h")
    assert (code, err) == (0, "")
    assert "Peak learning rate. (default: 0.003)" in out


def test_a_closed_pipe_is_not_an_error(folder: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "--help"]
    done = subprocess.run(["bash", "-c", '"$0" "$@" | head -1', *command], cwd=folder, capture_output=True, text=True)
    assert done.stdout.startswith("usage") and done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            [DEBUG, "--check", "--run.stepz", "1"],
            "run.stepz = 1   (command line)\n    unknown key; did you mean run.steps?\n",
        ),
        ([DEBUG, "--run.steps", "x"], "must be an integer >= 1"),
        ([DEBUG, "--check", "--processes", "3"], "micro_batch_size 2 x 3 data-parallel processes = 6; write 12 or 18"),
        ([DEBUG, "--check", "--processes", "0"], "--nodes M, at least 1, need --check"),
        ([DEBUG, "--check", "--processes", "two"], "invalid int value: 'two'"),
        ([DEBUG, "--processes", "2"], "need --check; to train on N"),
        ([DEBUG, "--check", "--data.source", "nowhere"], "data.source"),
        (["--run.steps", "3", DEBUG], "the recipe must come first"),
        (["--check"], "no recipe given"),
        (["nowhere.toml", "--check"], "nowhere.toml does not exist; "),
        (["nowhere.toml", "--help"], "nowhere.toml does not exist; "),
    ],
)
def test_a_mistake_ends_with_a_message_and_exit_code_2(folder: Path, arguments: list[str], expected: str) -> None:
    code, out, err = train(folder, *arguments)
    assert (code, out) == (2, "")
    assert expected in err


def test_training_imports_our_recipes_and_torch(folder: Path) -> None:
    """It gets past the foreign `recipes`, to the `torch` that fails in this folder."""
    code, _, err = train_anew(folder, DEBUG)
    assert code == 1 and "torch was imported" in err


@pytest.mark.parametrize("steps", ["40", "1"])
def test_a_shorter_trial_of_the_debug_recipe_is_accepted(folder: Path, steps: str) -> None:
    assert train(folder, DEBUG, "--check", "--run.steps", steps)[0] == 0


@pytest.mark.parametrize("script", ["train.py", "scripts/launch.py", "scripts/sweep.py"])
def test_a_python_without_packages_gets_one_line_that_names_the_right_one(script: str, folder: Path) -> None:
    command = [sys.executable, "-S", "-E", ROOT / script, DEBUG]  # -S: without site-packages
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert " lacks the package " in done.stderr and f"use {ROOT}/.venv/bin/python" in done.stderr


def test_every_script_explains_a_wrong_interpreter_before_it_imports_ours() -> None:
    for script in [ROOT / "train.py", *ROOT.glob("scripts/*.py")]:
        ours = [line for line in script.read_text().splitlines() if line.startswith(("from recipes", "explain_wrong"))]
        assert ours[1] == "explain_wrong_interpreter()", script


@pytest.mark.parametrize(("error", "code"), [(TemporaryError("EIO"), 71), (UserError("wrong"), 2)])
def test_a_fault_that_may_pass_and_a_refusal_have_their_exit_codes(
    error: UserError, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load_run(*_: object, **__: object) -> None:
        raise error

    for name in ("signal", "pthread_sigmask"):  # what train.py sets at its start is for a process of its own
        monkeypatch.setattr(signal, name, lambda *_: None)
    monkeypatch.setattr("recipes.recipe.load.load_run", load_run)
    assert runpy.run_path(str(ROOT / "train.py"))["main"](["recipe.toml"]) == code
    assert str(error) in capfd.readouterr().err


def test_check_ends_with_the_count_of_problems(folder: Path) -> None:
    code, out, err = train(folder, DEBUG, "--run.stepz", "3", "--batch.seq_len", "3", "--check")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"refused: 2 problems in {DEBUG}"
    code, out, err = train(folder, "nosuch.toml", "--check")
    assert (code, out, err.splitlines()[-1]) == (2, "", "refused: 1 problem")


def test_check_opens_the_first_row_of_every_source_and_names_those_it_cannot(folder: Path) -> None:
    good, wrong = folder / "good.jsonl", folder / "wrong.parquet"
    good.write_text('{"text": "one"}\n' * 1000)
    pyarrow.parquet.write_table(pyarrow.table({"content": ["one"]}), wrong)
    mixed = ["--data.mixture", str(good), "1", str(wrong), "1"]
    code, out, err = train(folder, DEBUG, *mixed, "--check")
    assert (code, out) == (2, "")
    assert "no field 'text'; it has 'content'" in " ".join(err.split())
    assert err.splitlines()[-1] == "refused: 1 problem in the first rows"
    held_out = ["--data.source", "hf:someone/something", "--validation.source", str(wrong)]
    assert "validation.source" in train(folder, DEBUG, *held_out, "--check")[2]
    wrong.write_bytes(b"")
    good.write_text('nonsense\n{"text": "one"}\n')
    code, out, err = train(folder, DEBUG, "--data.source", str(good), "--check")
    assert (code, err) == (
        0,
        f"warning: the first row is bad: '{good}', line 1: not JSON: Expecting value (character 1)\n",
    )
    code, out, err = train(folder, DEBUG, "--data.source", "hf:someone/something", "--check")
    assert "read: 0; not looked at: hf:someone/something, later rows" in out.splitlines()[-1]


def test_help_of_a_section_lists_only_its_fields(folder: Path) -> None:
    code, out, err = train(folder, "--help", "optimizer")
    assert (code, err) == (0, "")
    assert "--optimizer.lr" in out and "--run.steps" not in out
    code, out, _ = train(folder, DEBUG, "--optimizer.lr", "0.125", "--help", "[optimizer]")
    assert "(default: 0.125)" in " ".join(out.split()) and "--run.steps" not in out
    code, out, err = train(folder, "--help", "training")
    assert (code, err) == (2, "--help training: unknown section; did you mean [run]?\n")
    assert "did you mean" in train(folder, "smollm3_debug", "--help")[2]
