"""Writing token shards: their contents, that they are always the same, and what happens if writing is disturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel.errors import UserError
from recipes.data.text.tokenizer import load_tokenizer
from recipes.data.tokens import prepare, workspace
from recipes.data.tokens.prepare import write_shards
from recipes.data.tokens.shards import (
    TRAIN,
    VALIDATION,
    Shards,
    array_path,
    bad_rows,
    read_index,
    read_shard,
)
from recipes.data.tokens.workspace import Pieces
from tests.recipes.data.texts import contents, shards_in, texts_of, tokenizer_for, work_on, write_rows

ROOT = Path(__file__).resolve().parents[4]


def test_every_document_is_in_the_shards_exactly_once(tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "rows.jsonl", 400)
    work = work_on(tmp_path / "rows.jsonl")
    shards = shards_in(tmp_path / "out", work)
    assert len(shards) > 3
    train, held_out = (texts_of(tmp_path / "out", work, kind, len(shards)) for kind in (TRAIN, VALIDATION))
    assert sorted(train + held_out) == sorted(texts)
    assert [text for text in texts if text in set(train)] == train  # in the order of the source
    assert 40 < len(held_out) < 120
    assert [shard.last for shard in shards] == [False] * (len(shards) - 1) + [True]
    assert all(1000 <= shard.train + shard.validation < 6000 for shard in shards[:-1])
    assert sum(shard.documents for shard in shards) == len(train)
    assert sum(shard.rows for shard in shards) == 400
    index = read_index(tmp_path / "out")
    assert index is not None
    assert list(index.shards) == shards
    assert index.files == (str(tmp_path / "rows.jsonl"),)


def test_tokens_lead_back_to_the_rows_of_their_documents(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    lines = {name: write_rows(tmp_path / "in" / f"{name}.jsonl", 120, name=name) for name in ("a", "b")}
    work = work_on(tmp_path / "in")
    shards = shards_in(tmp_path / "out", work)
    tokens = Shards(tmp_path / "out", TRAIN)
    everything = np.empty(tokens.tokens, dtype=np.int64)
    tokens.read(0, everything)
    for start, count in ((0, tokens.tokens), (3, 50), (1500, 700), (tokens.tokens - 20, 60), (17, 1)):
        wrapped = np.empty(count, dtype=np.int64)
        tokens.read(start, wrapped)
        places = list(tokens.documents(start, count))
        pieces = work.tokenizer.decode(wrapped.tolist()).split("<|endoftext|>")
        pieces = pieces[:-1] if pieces[-1] == "" and count > 1 else pieces
        assert len(places) == len(pieces)
        for (file, row, begin, end), piece in zip(places, pieces, strict=True):
            document = work.tokenizer.ids([lines["a"], lines["b"]][file][row - 1])
            assert work.tokenizer.decode(document[begin:end]) == piece
        assert sum(end - begin for _, _, begin, end in places) == count
    assert len(list(tokens.documents(0, tokens.tokens))) == sum(shard.documents for shard in shards)


def test_held_out_documents_depend_only_on_their_text(tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "rows.jsonl", 200)
    more = write_rows(tmp_path / "more.jsonl", 300, start=-100)  # the same 200 and a hundred before them
    tokenizer = tokenizer_for(tmp_path / "rows.jsonl")
    held_out = []
    for name, fraction in (("rows", 0.2), ("more", 0.2), ("more", 0.4)):
        work = work_on(tmp_path / f"{name}.jsonl", fraction=fraction, tokenizer=tokenizer)
        folder = tmp_path / f"{name}-{fraction}"
        held_out.append(set(texts_of(folder, work, VALIDATION, len(shards_in(folder, work)))))
    assert held_out[1] & set(texts) == held_out[0]
    assert held_out[1] < held_out[2] < set(more)


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 5])
def test_shards_do_not_depend_on_the_number_of_cores(tmp_path: Path, cores: int) -> None:
    write_rows(tmp_path / "rows.jsonl", 300)
    work = work_on(tmp_path / "rows.jsonl")
    shards_in(tmp_path / "here", work)
    code = (
        "import sys; sys.path.insert(0, '.'); from pathlib import Path; from recipes.data.tokens import prepare\n"
        "from tests.recipes.data.texts import *\n"
        "shards_in(Path(sys.argv[2]), work_on(Path(sys.argv[1])))"
    )
    there = tmp_path / "there"
    environment = os.environ | {"RAYON_NUM_THREADS": str(cores)}
    subprocess.run([sys.executable, "-c", code, tmp_path / "rows.jsonl", there], check=True, env=environment, cwd=ROOT)
    assert contents(there) == contents(tmp_path / "here")


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_interrupted_preparation_continues_after_the_last_whole_shard(tmp_path: Path, after: int) -> None:
    write_rows(tmp_path / "rows.jsonl", 400)
    work = work_on(tmp_path / "rows.jsonl")
    shards_in(tmp_path / "whole", work)
    broken = write_shards(tmp_path / "broken", work)
    for _ in range(after):
        next(broken)
    broken.close()
    rest = shards_in(tmp_path / "broken", work)
    assert len(rest) == len(shards_in(tmp_path / "again", work)) - after
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    assert shards_in(tmp_path / "broken", work) == []


@pytest.mark.slow
def test_killed_preparation_leaves_no_shard_that_looks_whole(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 3000)
    work = work_on(tmp_path / "rows.jsonl")
    code = (
        "import sys, time; sys.path.insert(0, '.'); from pathlib import Path; from recipes.data.tokens import prepare\n"
        "from tests.recipes.data.texts import *\n"
        "add = prepare.ShardWriter.add\n"
        "prepare.ShardWriter.add = lambda *a: (time.sleep(0.02), add(*a))\n"
        "shards_in(Path(sys.argv[2]), work_on(Path(sys.argv[1])))"
    )
    folder = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "rows.jsonl", folder], cwd=ROOT)

    def amid_a_shard() -> bool:
        return any(folder.glob(".part-*/train"))

    while True:  # until two shards are whole and the third is not
        assert process.poll() is None
        if read_shard(folder, 1) is not None and amid_a_shard():
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.1)
            if amid_a_shard():
                break
            process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert amid_a_shard()
    shards_in(folder, work)
    shards_in(tmp_path / "whole", work)
    assert contents(folder) == contents(tmp_path / "whole")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("00001-train.npy", cut),
        ("00001-train.npy", flip),
        ("00000-validation.npy", Path.unlink),
        ("00002-documents.npy", flip),
        ("00001.json", cut),
        ("00001.json", Path.unlink),
        ("00001.json", lambda path: path.write_text("[]")),
        ("00001.json", lambda path: path.write_text("{}")),
        ("index.json", cut),
        ("index.json", lambda path: path.write_text("{}")),
        ("tokenizer.json", Path.unlink),
    ],
)
def test_damaged_shard_is_made_again(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    write_rows(tmp_path / "rows.jsonl", 400)
    work = work_on(tmp_path / "rows.jsonl")
    shards_in(tmp_path / "out", work)
    before = contents(tmp_path / "out")
    damage(tmp_path / "out" / name)
    shards_in(tmp_path / "out", work)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        cut,
        lambda path: path.write_text(""),
        lambda path: path.write_text("5\n"),
        lambda path: path.write_text('{"file": "f"}\n'),
    ],
)
def test_damaged_list_of_bad_rows_is_made_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    write_rows(tmp_path / "rows.jsonl", 400)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:200], '{"text": "cut', *lines[200:]]) + "\n")
    work = work_on(tmp_path / "rows.jsonl")
    shards = shards_in(tmp_path / "out", work)
    before = contents(tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*-bad.jsonl")
    damage(file)
    with pytest.raises(UserError, match=r"list of bad rows '.*-bad.jsonl' cannot be read .*; remove '.*\d.json'"):
        list(bad_rows(tmp_path / "out", shards))
    shards_in(tmp_path / "out", work)
    assert contents(tmp_path / "out") == before


def test_text_that_cannot_be_encoded_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 50)
    model = {"type": "WordLevel", "vocab": {"Document": 0, "</s>": 1}, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model})
    )
    tokenizer = load_tokenizer(str(tmp_path), sources=[], text_field="text", cache=tmp_path, log=lambda line: None)
    with pytest.raises(UserError, match=r"data.tokenizer: '.*rows.jsonl', line 1 cannot be encoded: .*UNK.*; give a"):
        shards_in(tmp_path / "out", work_on(tmp_path / "rows.jsonl", tokenizer=tokenizer))


# ---------------------------------------------------------------------------------------- changes while writing shards


def test_no_shard_is_made_of_a_file_that_changed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abc":
        write_rows(tmp_path / "in" / f"{name}.jsonl", 200, name=name)
    work = work_on(tmp_path / "in", tokenizer=tokenizer_for(tmp_path / "in" / "a.jsonl"))
    shards = write_shards(tmp_path / "out", work)
    next(shards)
    (tmp_path / "in" / "c.jsonl").write_text("")  # without rows, so that no cursor points there
    made = 1
    with pytest.raises(UserError, match=r"data.source: '.*c.jsonl' changed while it was read; start again"):
        for _ in shards:
            made += 1
    assert made > 1  # of the files before it
    assert read_shard(tmp_path / "out", made) is None
    assert work_on(tmp_path / "in", tokenizer=work.tokenizer).fingerprint != work.fingerprint


def test_change_while_the_fingerprint_is_taken_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", 50)
    tokenizer = tokenizer_for(tmp_path / "rows.jsonl")
    fingerprint = workspace.fingerprint

    def slow(source: str, **options: str) -> str:
        found = fingerprint(source, **options)
        write_rows(tmp_path / "rows.jsonl", 60)
        return found

    monkeypatch.setattr(workspace, "fingerprint", slow)
    work = work_on(tmp_path / "rows.jsonl", tokenizer=tokenizer)
    with pytest.raises(UserError, match="changed while it was read"):
        shards_in(tmp_path / "out", work)


def test_missing_file_marks_its_shard_unread_and_a_broken_file_does_not(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "ab":
        write_rows(tmp_path / "in" / f"{name}.jsonl", 100, name=name)
    tokenizer = tokenizer_for(tmp_path / "in" / "a.jsonl")
    (tmp_path / "in" / "c.parquet").write_bytes(b"PAR1 and nothing that makes sense PAR1")
    work = work_on(tmp_path / "in", tokenizer=tokenizer)
    broken = shards_in(tmp_path / "broken", work)
    assert broken[-1].bad and not any(shard.unread for shard in broken)
    shards = write_shards(tmp_path / "gone", work)
    next(shards)
    (tmp_path / "in" / "c.parquet").unlink()
    assert list(shards)[-1].unread


def test_shard_of_another_process_is_never_replaced_by_different_tokens(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abc":
        write_rows(tmp_path / "in" / f"{name}.jsonl", 200, name=name)
    work = work_on(tmp_path / "in", tokenizer=tokenizer_for(tmp_path / "in" / "a.jsonl"))
    slow, same = write_shards(tmp_path / "out", work), write_shards(tmp_path / "out", work)
    next(slow)
    next(same)
    (tmp_path / "in" / "c.jsonl").rename(tmp_path / "c.jsonl")
    assert list(same)[-1].unread
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("0*")}
    again = write_shards(tmp_path / "elsewhere", work)
    with pytest.raises(UserError, match="appeared or disappeared"):
        next(again)
    (tmp_path / "c.jsonl").rename(tmp_path / "in" / "c.jsonl")
    with pytest.raises(UserError, match=r"another process made different tokens of .*; start again"):
        list(slow)
    assert {name: content for name, content in contents(tmp_path / "out").items() if name in before} == before


def test_bad_and_empty_rows_are_counted_and_listed(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "rows.jsonl", 100)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    lines[10:10] = ['{"text": "cut', '{"other": 1}', '{"text": ""}', '{"text": "   "}', '{"text": null}', '{"text": 5}']
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    work = work_on(tmp_path / "rows.jsonl")
    shards = shards_in(tmp_path / "out", work)
    assert sum(shard.rows for shard in shards) == 106
    assert sum(shard.empty for shard in shards) == 2
    assert sum(shard.bad for shard in shards) == 4
    listed = [json.loads(line) for line in (tmp_path / "out" / "00000-bad.jsonl").read_text().splitlines()]
    assert [row["row"] for row in listed] == [11, 12, 15, 16]
    assert all(row["file"] == str(tmp_path / "rows.jsonl") and row["reason"] for row in listed)
    train, held_out = (texts_of(tmp_path / "out", work, kind, len(shards)) for kind in (TRAIN, VALIDATION))
    assert sorted(train + held_out) == sorted(good)


def test_source_with_a_single_document_gives_one_shard(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n{"text": "a"}\n{"text": ""}\n')
    work = work_on(tmp_path / "rows.jsonl", fraction=1e-9)
    (shard,) = shards_in(tmp_path / "out", work)
    assert (shard.documents, shard.held_out, shard.empty, shard.validation) == (1, 0, 2, 0)
    assert Shards(tmp_path / "out", VALIDATION).tokens == 0


@pytest.mark.parametrize("rows", [30, 60])
def test_many_rows_without_text_end_a_shard(tmp_path: Path, rows: int) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' + '{"text": ""}\n' * (rows - 1))
    shards = shards_in(tmp_path / "out", work_on(tmp_path / "rows.jsonl", pieces=Pieces(shard_rows=20, batch_rows=10)))
    assert [shard.rows for shard in shards] == [20] * (rows // 20) + [10] * (rows % 20 // 10)


def test_tokens_have_the_narrowest_type_that_holds_every_id(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 50)
    vocabulary = {"<unk>": 0, "Document": 70_000, "</s>": 70_001}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model})
    )
    options = {"sources": [], "text_field": "text", "cache": tmp_path, "log": lambda line: None}
    large = load_tokenizer(str(tmp_path), **options)
    shards_in(tmp_path / "large", work_on(tmp_path / "rows.jsonl", tokenizer=large))
    tokens = np.load(array_path(tmp_path / "large", 0, TRAIN))
    assert tokens.dtype == np.uint32
    assert (tokens[0], tokens[-1]) == (70_000, 70_001)
    shards_in(tmp_path / "small", work_on(tmp_path / "rows.jsonl"))
    assert np.load(array_path(tmp_path / "small", 0, TRAIN)).dtype == np.uint16
    assert (tmp_path / "large" / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()


def test_fingerprint_depends_on_everything_that_changes_the_tokens(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, 100)
    fingerprints = {work_on(path).fingerprint, work_on(path, fraction=0.3).fingerprint}
    fingerprints.add(work_on(path, tokenizer=tokenizer_for(path, entries=301)).fingerprint)
    write_rows(path, 101)
    fingerprints.add(work_on(path, tokenizer=tokenizer_for(path)).fingerprint)
    assert len(fingerprints) == 4


def test_unwritable_folder_raises_the_error_of_the_system(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 10)
    (tmp_path / "out").write_text("a file, not a folder")
    with pytest.raises(OSError, match="out"):
        shards_in(tmp_path / "out", work_on(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(("words", "at_once"), [(2, 2), (400, 1)])
def test_large_rows_are_tokenized_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: int, at_once: int
) -> None:
    rows = [json.dumps({"text": f"{number} " + "word " * words}) + "\n" for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    work = work_on(tmp_path / "rows.jsonl", pieces=Pieces(batch_characters=10))
    original = prepare._documents
    running: list[int] = []
    most: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return original(*arguments, **options)

    monkeypatch.setattr(prepare, "_documents", counted)
    (shard,) = shards_in(tmp_path / "shards", work)
    assert (shard.documents + shard.held_out, max(most), shard.last) == (30, at_once, True)
