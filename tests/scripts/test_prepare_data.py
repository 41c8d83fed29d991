"""scripts/prepare_data.py as users call it, and a recipe that reads what it wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.recipes.data.texts import contents, write_rows
from tests.scripts.nodes import arguments as training

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data.py"


def run(*arguments: object, code: int = 0) -> str:
    ended, out, err = run_command(SCRIPT, *arguments)
    assert ended == code, out + err
    return out if code == 0 else err


def test_prepared_folder_is_read_by_a_recipe(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 300)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"text": "cut\n{"text": ""}\n')
    arguments = (tmp_path / "rows.jsonl", tmp_path / "out", "--tokenizer", "train:300", "--cache", tmp_path / "cache")
    said = run(*arguments, "--validation-fraction", "0.1")
    assert "trained a tokenizer of 300 entries" in said
    assert "1 empty rows, 1 bad rows" in said
    assert "shard 00000" in said
    assert " tokens/s" in said
    assert "no document is held out" not in said
    (row,) = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(row)["row"] == 301
    before = contents(tmp_path / "out")
    with open("/dev/full", "w") as screen:
        again = [*map(str, arguments), "--validation-fraction", "0.1"]
        assert subprocess.run([sys.executable, str(SCRIPT), *again], stdout=screen, stderr=screen).returncode == 0
    assert "nothing was left to do" in run(*arguments, "--validation-fraction", "0.1")
    assert contents(tmp_path / "out") == before

    recipe = training(tmp_path, tmp_path / "out", "prepared", "--run.steps", "2", "--data.validation_fraction")
    code, out, err = run_command("train.py", *recipe, "0.1", "--data.tokenizer", tmp_path / "out" / "tokenizer.json")
    assert code == 0, out + err
    assert "done: 2 steps" in out
    code, _, err = run_command("train.py", *recipe, "0.2", "--check")
    assert code == 2
    said = " ".join(err.split())
    assert "is tokenized already; write tokenizer =" in said
    assert "was prepared with 0.1; write that" in said


def test_preparation_without_held_out_documents_says_what_it_is_good_for(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 4)
    common = ("--tokenizer", "train:300", "--cache", tmp_path / "cache", "--validation-fraction")
    said = run(tmp_path / "rows.jsonl", tmp_path / "none", *common, "1e-9")
    assert "no document is held out: a recipe that reads this folder needs another text to validate on" in said
    assert "validation_fraction = 1e-09" in said
    enough = said.split("; --validation-fraction ")[1].split(" or more")[0]
    assert "no document is held out" not in run(tmp_path / "rows.jsonl", tmp_path / "some", *common, enough)
    said = run(tmp_path / "rows.jsonl", tmp_path / "all", *common, "0.99999", code=2)
    assert "all documents of" in said and "and none is left for training; give another folder" in said
    few_enough = said.split("--validation-fraction ")[1].split(" or less")[0]
    run(tmp_path / "rows.jsonl", tmp_path / "few", *common, few_enough)
    assert ", 0 with 0 held out;" in run(tmp_path / "rows.jsonl", tmp_path / "zero", *common, "0")


def test_preparation_that_cannot_read_its_shards_now_is_a_fault_that_may_pass(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 100)
    arguments = (tmp_path / "rows.jsonl", tmp_path / "out", "--tokenizer", "train:300", "--cache", tmp_path / "cache")
    run(*arguments)
    (tmp_path / "out" / "00000.json").rename(tmp_path / "aside")
    (tmp_path / "out" / "00000.json").symlink_to("/proc/self/mem")  # reading it is an input/output error (EIO)
    assert "cannot be read now: Input/output error" in run(*arguments, code=71)
    (tmp_path / "aside").rename(tmp_path / "out" / "00000.json")
    assert "nothing was left to do" in run(*arguments)


def test_too_many_bad_rows_stop_the_preparation(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 30)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"text": "cut\n')
    arguments = (tmp_path / "rows.jsonl", tmp_path / "out", "--tokenizer", "train:300", "--cache", tmp_path / "cache")
    said = run(*arguments, code=2)
    assert "1 of the first 31 rows" in said
    assert "--bad-row-budget: 1 of the first 31 rows" in said
    assert f"{tmp_path / 'rows.jsonl'}, line 31: not JSON" in said
    assert f"All of them are listed in '{tmp_path / 'out' / '00000-bad.jsonl'}'." in said
    assert "1 of the first 31 rows" in run(*arguments, code=2)
    assert "1 bad rows" in run(*arguments, "--bad-row-budget", "0.1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.jsonl", "OUT", "--tokenizer", "train:300"), "data.source: 'nowhere.jsonl' does not exist"),
        (("ROWS", "OUT", "--tokenizer", "nowhere"), "data.tokenizer: 'nowhere' does not exist"),
        (("ROWS", "OUT", "--tokenizer", "train:300", "--validation-fraction", "2"), "must be at least 0 and below 1"),
        (("ROWS", "OUT", "--tokenizer", "train:300", "--bad-row-budget", "-1"), "must be a share from 0 to 1"),
        (("ROWS", "OUT", "--tokenizer", "train:300", "--cores", "0"), "must be at least 1"),
        (("ROWS", "OUT", "--tokenizer", "train:300", "--bos"), "the tokenizer has no token that begins a text"),
        (("ROWS", "FULL", "--tokenizer", "train:300"), "holds other files; give an empty folder"),
        (("ROWS", "OTHER", "--tokenizer", "train:300"), "holds tokens of another source, tokenizer or held-out share"),
        (("ROWS", "ROWS", "--tokenizer", "train:300"), "is a file; give a folder, or a name that does not exist"),
        (("GLOB", "INSIDE", "--tokenizer", "train:300"), "and would be part of it; give another folder"),
        (("ROWS", "OUT", "--tokenizer", "train:300", "--text-field", "body"), "name a text field"),
        (("ROWS", "OUT", "--tokenizer", "WORDS"), "rows.jsonl', line 1 cannot be encoded: "),
        (("HERE", "INSIDE", "--tokenizer", "train:300"), "and would be part of it; give another folder"),
    ],
)
def test_user_error_is_one_message_and_leaves_nothing_behind(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", 100)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "owner.txt").write_text("someone else")
    (tmp_path / "other" / "00000.json").write_text("{}")
    (tmp_path / "words").mkdir()
    model = {"type": "WordLevel", "vocab": {"Document": 0, "</s>": 1}, "unk_token": "[UNK]"}
    (tmp_path / "words" / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model})
    )
    places = {
        "ROWS": "rows.jsonl",
        "OUT": "out",
        "FULL": "full",
        "OTHER": "other",
        "HERE": ".",
        "INSIDE": "inside",
        "GLOB": "**",
        "WORDS": "words",
    }
    words = [str(tmp_path / places[word]) if word in places else word for word in arguments]
    said = run(*words, "--cache", tmp_path / "cache", code=2)
    assert message in said
    assert "Traceback" not in said
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    assert not any((tmp_path / name).exists() for name in ("out", "inside"))  # nothing is left of it


def test_prepared_chats_keep_their_template(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 3)
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    chats = (tmp_path / "chats.jsonl", tmp_path / "out", "--messages-field", "messages", "--validation-fraction", "0")
    options = ("--tokenizer", "train:300", "--cache", tmp_path / "cache")
    assert "write data.chat_template" in run(*chats, *options, code=2)
    said = run(*chats, *options, "--chat-template", tmp_path / "chat.jinja")
    assert "3 documents" in said and said.rstrip().endswith('messages_field = "messages"')
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == (tmp_path / "chat.jinja").read_text()
    assert "needs" in run(*chats[:2], "--prompt-field", "question", *options, code=2)
