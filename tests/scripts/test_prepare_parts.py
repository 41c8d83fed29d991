"""scripts/prepare_data.py --part, as several machines call it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.recipes.data.texts import contents, write_rows
from tests.recipes.data.tokens.test_parts import everything
from tests.scripts.nodes import arguments as training
from tests.scripts.test_prepare_data import SCRIPT, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_rows(folder / "rows.jsonl", 300)
    run(folder / "rows.jsonl", folder / "out", "--tokenizer", "train:300", "--cache", folder / "cache")
    return folder / "out" / "tokenizer.json"


def losses(folder: Path, name: str, tokenizer: Path) -> list[float]:
    """The losses of a short run on a prepared folder."""
    short = ("--run.steps", "5", "--validation.every", "2", "--data.validation_fraction", "0.01")
    recipe = training(folder, folder / name, f"on_{name}", "--data.tokenizer", str(tokenizer), *short)
    code, out, err = run_command("train.py", *recipe)
    assert code == 0, out + err
    rows = [json.loads(line) for line in (folder / "runs" / f"on_{name}" / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows for key in ("loss", "validation_loss") if key in row]


def test_parts_that_are_killed_repeated_and_doubled_train_as_one_machine(tmp_path: Path, tokenizer: Path) -> None:
    common = ("--tokenizer", tokenizer, "--cores", 1)

    def start(part: str) -> subprocess.Popen[bytes]:
        arguments = ["python-stdlib", str(tmp_path / "out"), *map(str, common), "--part", part]
        return subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stdout=subprocess.DEVNULL)

    killed = start("2/3")
    while not list((tmp_path / "out").glob(".part-*/train")):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    said = run("python-stdlib", tmp_path / "out", *common, "--status").splitlines()
    assert [line.split(" shards")[0] for line in said] == [f"part {number}/3: 0%, 0" for number in (1, 2, 3)]
    twins = [start(part) for part in ("1/3", "3/3", "1/3")]
    assert [twin.wait() for twin in twins] == [0, 0, 0]
    recipe = ("configs/smollm3_debug.toml", "--data.source", tmp_path / "out", "--data.tokenizer", tokenizer, "--check")
    code, _, err = run_command("train.py", *recipe)
    assert code == 2 and f"the preparation of '{tmp_path / 'out'}' lacks part 2/3;" in " ".join(err.split())
    assert "in a recipe: source" in run("python-stdlib", tmp_path / "out", *common, "--part", "2/3")
    assert not list((tmp_path / "out").glob(".part-*"))
    before = contents(tmp_path / "out")
    assert "nothing was left to do" in run("python-stdlib", tmp_path / "out", *common, "--part", "1/3")
    assert contents(tmp_path / "out") == before
    run("python-stdlib", tmp_path / "whole", *common)
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")
    assert losses(tmp_path, "out", tokenizer) == losses(tmp_path, "whole", tokenizer)


def test_part_with_other_options_or_files_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    write_rows(rows, 50)
    common = ("--tokenizer", tokenizer)
    run(rows, out, *common, "--part", "1/2")
    others = "holds tokens of another source, tokenizer or held-out share; give another folder"
    for other, message in (
        (("--validation-fraction", "0.02"), others),
        (("--text-field", "body"), others),
        (("--tokenizer", "train:301", "--cache", tmp_path / "cache"), others),
        (("--part", "2/3"), "was begun as 2 parts; go on with --part I/2"),
    ):
        assert message in run(rows, out, *common, "--part", "2/2", *other, code=2)
    with rows.open("a") as file:
        file.write('{"text": "new"}\n')
    assert others in run(rows, out, *common, "--part", "2/2", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--part", "0/3"), "'0/3' is not a part: write I/N with I from 1 to N, such as 3/8"),
        (("--part", "4/3"), "'4/3' is not a part"),
        (("--part", "one"), "'one' is not a part"),
        (("--part", "2/3", "--text-field", "body"), "name a text field"),
        (("--status",), "holds no part yet"),
    ],
)
def test_part_that_cannot_be_is_refused(
    tmp_path: Path, tokenizer: Path, arguments: tuple[str, ...], message: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", 5)
    assert message in run(tmp_path / "rows.jsonl", tmp_path / "out", "--tokenizer", tokenizer, *arguments, code=2)
    assert not (tmp_path / "out").exists()


def test_hub_is_refused_for_parts(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.jsonl", 5)
    said = run(f"hf:{tmp_path / 'data'}", tmp_path / "out", "--tokenizer", tokenizer, "--part", "1/2", code=2)
    assert "--part needs files: download the dataset" in said
