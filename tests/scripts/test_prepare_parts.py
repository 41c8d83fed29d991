"""scripts/prepare_data.py --part and --join, as several machines call it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.recipes.data.texts import contents, write_rows
from tests.scripts.test_prepare_data import SCRIPT, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_rows(folder / "rows.jsonl", 300)
    run(folder / "rows.jsonl", folder / "out", "--tokenizer", "train:300", "--cache", folder / "cache")
    return folder / "out" / "tokenizer.json"


def test_parts_that_are_killed_repeated_and_doubled_give_the_bytes_of_one_machine(
    tmp_path: Path, tokenizer: Path
) -> None:
    common = ("--tokenizer", tokenizer, "--cores", 1)

    def start(part: str) -> subprocess.Popen[bytes]:
        arguments = ["python-stdlib", str(tmp_path / "out"), *map(str, common), "--part", part]
        return subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stdout=subprocess.DEVNULL)

    killed = start("2/2")
    while len(list((tmp_path / "out.parts").glob("*-tokens.npy"))) < 2:
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    said = run("python-stdlib", tmp_path / "out", *common, "--status").splitlines()
    assert "part 1/2: 0 of " in said[1] and "part 2/2: 0 of " not in said[2] and "100%" not in said[2]
    assert "run these first, with the same options: --part 1/2, 2/2" in run(
        "python-stdlib", tmp_path / "out", *common, "--join", code=2
    )
    twins = [start("1/2"), start("1/2")]
    assert [twin.wait() for twin in twins] == [0, 0]
    # The second machine is lost, and three others take its place.
    for part in ("3/3", "2/3", "1/3"):
        run("python-stdlib", tmp_path / "out", *common, "--part", part)
    assert "nothing was left to do" not in run("python-stdlib", tmp_path / "out", *common, "--join")
    assert not (tmp_path / "out.parts").exists()
    run("python-stdlib", tmp_path / "whole", *common)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert "nothing was left to do" in run("python-stdlib", tmp_path / "out", *common, "--part", "2/2")
    run("python-stdlib", tmp_path / "out", *common, "--join")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_part_with_other_options_or_files_is_refused_by_name(tmp_path: Path, tokenizer: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    write_rows(rows, 50)
    common = ("--tokenizer", tokenizer)
    run(rows, out, *common, "--part", "1/2")
    for other, message in (
        (("--validation-fraction", "0.02"), "were begun with --validation-fraction 0.01, not --validation-fraction"),
        (("--text-field", "body"), "name a text field"),
        (
            ("--tokenizer", "train:301", "--cache", tmp_path / "cache"),
            "begun with another --tokenizer or --bos",
        ),
    ):
        assert message in run(rows, out, *common, *other, "--part", "2/2", code=2)
    with rows.open("a") as file:
        file.write('{"text": "new"}\n')
    assert f"bytes in '{rows}', which has " in run(rows, out, *common, "--part", "2/2", code=2)
    write_rows(rows, 50, name="Dokument")
    write_rows(tmp_path / "more.jsonl", 50)
    assert "were begun with 1 files, but" in run(tmp_path / "*.jsonl", out, *common, "--part", "2/2", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--part", "0/3"), "'0/3' is not a part: write I/N with I from 1 to N, such as 3/8"),
        (("--part", "4/3"), "'4/3' is not a part"),
        (("--part", "one"), "'one' is not a part"),
        (("--join",), "holds no part of"),
        (("--status",), "holds no part of"),
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
