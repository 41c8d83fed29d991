"""The border to code and text that is not ours: panics, sys.exit(), control characters."""

import json
import re
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import train
from parallel.errors import TemporaryError, UserError
from recipes.data.text.pair_format import PairEncoder, PairFormat
from recipes.data.text.row import Row
from recipes.data.text.tokenizer import Tokenizer, build_tokenizer
from recipes.evaluation.evaluate import _encoded
from recipes.files.border import ForeignError, foreign
from recipes.files.reading import json_object
from recipes.files.screen import ACTIVE, LONGEST_LINE, safe, say, tell
from tests.recipes.data.texts import shards_in, tokenizer_for, work_on, write_rows

PANIC = "x" * 60 + "z"
"""A text on which the pattern below would search for hours: the library panics."""


@pytest.fixture(scope="module")
def panics(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose pattern backtracks."""
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(rows, 50)
    content = json.loads(tokenizer_for(rows).json)
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"(?:x+x+)+y|\s+|\S"}
    return build_tokenizer(json.dumps(content), where=Path("tokenizer.json"))


def test_a_text_on_which_the_tokenizer_panics_is_a_bad_row(panics: Tokenizer, tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "rows.jsonl", 60)
    lines = [json.dumps({"text": text}) for text in [*texts[:7], PANIC, *texts[7:]]]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    shards = shards_in(tmp_path / "out", work_on(tmp_path / "rows.jsonl", tokenizer=panics))
    assert (sum(shard.bad for shard in shards), sum(shard.rows for shard in shards)) == (1, 61)
    (bad,) = ("".join(file.read_text() for file in (tmp_path / "out").glob("*-bad.jsonl"))).splitlines()
    assert (row := json.loads(bad))["row"] == 8 and row["reason"].startswith("cannot be encoded: PanicException: Onig")


def test_a_pair_is_bad_and_a_prompt_or_a_document_refused_where_it_panics(panics: Tokenizer) -> None:
    rows = [Row(json.dumps([text, "answer"]), 0, number) for number, text in enumerate(["one", PANIC, "two"], 1)]
    read, pairs = PairEncoder(PairFormat("prompt", "answer"), panics).encode(rows)
    assert [row.problem.partition(": Onig")[0] for row in read] == ["", "cannot be encoded: PanicException", ""]
    assert len(pairs) == 2
    with pytest.raises(UserError, match=r"cannot encode a text: PanicException.*; give a tokenizer that encodes any"):
        panics.ids(PANIC)
    with pytest.raises(UserError, match=r"^document 12, 'xxx.*PanicException"):
        _encoded(["one", PANIC], panics, first=11)


def test_a_file_that_makes_the_library_panic_is_refused_by_its_name(panics: Tokenizer) -> None:
    content = json.loads(panics.json)
    content["added_tokens"][0]["id"] = 2**32 - 1
    content["model"]["vocab"] = {"a": 0}
    with pytest.raises(UserError, match=r"data\.tokenizer: the tokenizers library rejects 'here'"):
        build_tokenizer(json.dumps(content | {"pre_tokenizer": {"type": "none"}}), where=Path("here"))


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (SystemExit(0), ForeignError, "a task: it calls sys.exit(0); repair it"),
        (Exception(), ForeignError, "a task: Exception; repair it"),
        (KeyError("x"), ForeignError, "a task: KeyError: 'x'; repair it"),
        (RecursionError(), ForeignError, "a task: RecursionError; repair it"),
        (OSError(5, "Input/output error"), TemporaryError, "a task: OSError: [Errno 5] Input/output error; repair it"),
        (ValueError("y" * 10**6), ForeignError, f"a task: ValueError: {'y' * 488}; repair it"),
    ],
)
def test_whatever_foreign_code_raises_is_one_sentence(error: BaseException, kind: type[UserError], text: str) -> None:
    with pytest.raises(kind) as raised, foreign("a task", "repair it"):
        raise error
    assert str(raised.value) == text


def test_ctrl_c_and_errors_of_ours_that_foreign_code_calls_pass_the_border() -> None:
    for error in (KeyboardInterrupt(), MemoryError(), UserError("ours")):
        with pytest.raises(type(error)) as raised, foreign("a task"):
            raise error
        assert raised.value is error
    with pytest.raises(ValueError, match="it must contain one JSON object"), foreign("a task"):
        re.sub("x", lambda match: str(json_object("[]")), "x")


# Text

ATTACK = "\x1b]0;title\x07\x9b31m\u202egnp\u2066\r\x00\ud800"
ESCAPED = r"\u001b]0;title\u0007\u009b31m\u202egnp\u2066\u000d\u0000\ud800"


def test_what_acts_on_a_terminal_is_escaped_and_a_long_line_keeps_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    say(f"a\tb\n{ATTACK}", end="")
    say(ATTACK, to=2)
    tell(ATTACK)
    assert capfd.readouterr() == (f"a\tb\n{ESCAPED}", f"{ESCAPED}\n{ESCAPED}\n")
    short, line = safe(f"one\n{'x' * 10**6}; write 3").split("\n")
    assert short == "one" and len(line) < LONGEST_LINE + 50 and line.endswith("xxx; write 3")
    assert len(safe("x" * 10**6, whole=True)) == 10**6
    assert json.loads(safe(json.dumps(ATTACK, ensure_ascii=False))) == json.loads(json.dumps(ATTACK))


@pytest.mark.parametrize(
    "text",
    [
        f"[model]\nname = '{ATTACK[:-3]}'".replace("\x1b", "").replace("\x07", "").replace("\r", ""),
        f"[model]\nname = \x9b31m{'x' * 10**5}\n",
        f'["{"x" * 10**5}\u202e"]\na = 1\n',
        f'[model]\nname = "smollm3_debug"\nweights = "{"w/" * 10**5}\\u009b"\n',
        f'[model]\nname = "smollm3_debug"\n[data]\ntokenizer = "{"t" * 10**5}\\u202e"\n',
        f'[model]\nname = "smollm3_debug"\n[data]\nsource = "hf:{"s" * 10**5}\\u202e"\n',
    ],
)
def test_a_recipe_cannot_act_on_the_terminal_that_refuses_it(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(text)
    assert train.main([str(tmp_path / "r.toml"), "--check"]) == 2
    out, error = capfd.readouterr()
    assert "r.toml" in error and not ACTIVE.search(out + error) and len(out + error) < 12_000


def test_a_traceback_is_escaped_too(capfd: pytest.CaptureFixture[str]) -> None:
    from recipes.files.interpreter import _on_error

    def fail() -> NoReturn:
        raise RuntimeError(ATTACK)

    try:
        fail()
    except RuntimeError:
        _on_error(*sys.exc_info())
    assert f"RuntimeError: {ESCAPED}" in (error := capfd.readouterr().err) and not ACTIVE.search(error)
