"""Datasets laid out as on the Hugging Face hub: their rows from every cursor, and the messages for bad ones."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from parallel.errors import UserError
from recipes.data.text import hub, sources
from recipes.data.text.row import Row
from recipes.data.text.rows import open_rows, readable_documents
from tests.recipes.data.text.hub_server import COMMIT, serve

ROOT = Path(sources.__file__).parents[3]

C4_README = """---
language: [en]
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
  - split: validation
    path: en/c4-validation.*.json.gz
- config_name: realnewslike
  data_files: realnewslike/*.json.gz
DECLARED---
# C4
"""
DECLARED = """dataset_info:
- config_name: en
  features:
  - {name: text, dtype: string}
  - {name: timestamp, dtype: string}
  - {name: url, dtype: string}
"""


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect the cache of datasets, which it creates even if it stores nothing there."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def write_shard(path: Path, lines: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()))


def c4_row(number: int, **other: Any) -> dict[str, Any]:
    text = f"Page {number}.\n" + "words " * (number % 50)
    return {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": f"https://{number}.org"} | other


def c4(folder: Path, *, declared: bool = False) -> Path:
    """Like allenai/c4: a README with configurations, and gzipped JSON lines. 300 rows in three shards, one empty."""
    for shard, rows in enumerate((range(140), range(0), range(140, 300))):
        write_shard(folder / "en" / f"c4-train.{shard:05}-of-00003.json.gz", [c4_row(number) for number in rows])
    write_shard(folder / "en" / "c4-validation.00000-of-00001.json.gz", [c4_row(1000)])
    write_shard(folder / "realnewslike" / "c4-train.00000-of-00001.json.gz", [c4_row(2000)])
    (folder / "README.md").write_text(C4_README.replace("DECLARED", DECLARED if declared else ""))
    return folder


def tiny_stories(folder: Path) -> Path:
    """Like roneneldan/TinyStories: parquet in data/, and a README that does not mention it. 300 rows in two shards."""
    (folder / "data").mkdir(parents=True)
    for shard in range(2):
        texts = [f"Once upon a time there were {number} bears." for number in range(shard * 150, shard * 150 + 150)]
        table = pyarrow.table({"id": list(range(150)), "text": texts})
        path = folder / "data" / f"train-{shard:05}-of-00002-2d5a1467fff1081b.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=40)
    valid = folder / "data" / "validation-00000-of-00001-869c898b519ad725.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "text": ["The end."]}), valid)
    (folder / "README.md").write_text("---\nlicense: cdla-sharing-1.0\n---\n")
    return folder


def rows_of(source: str, cursor: dict[str, Any] | None = None) -> list[Row]:
    return list(open_rows(source, text_field="text", cursor=cursor))


def test_row_of_a_dataset_is_located_by_shard_and_row(tmp_path: Path) -> None:
    stream = open_rows(f"hf:{tiny_stories(tmp_path)}", text_field="text")
    assert stream.where(next(stream)) == f"'hf:{tmp_path}, shard 1 of 2', row 1"


def check_every_cursor(source: str, every: int = 7) -> list[Row]:
    """The rows of a source, checked to be the same from every cursor, including those of a resumed stream."""
    stream = open_rows(source, text_field="text")
    rows, cursors = [], [stream.cursor]
    for row in stream:
        rows.append(row)
        cursors.append(stream.cursor)
    assert len({(row.file, row.number) for row in rows}) == len(rows)
    stream = open_rows(source, text_field="text")
    for index, cursor in enumerate(cursors):
        assert stream.cursor == cursor
        if index % every == 0 or index > len(rows) - 3:
            stream = open_rows(source, text_field="text", cursor=json.loads(json.dumps(cursor)))
            assert stream.cursor == cursor
        if index % (7 * every) == 0:
            assert rows_of(source, cursor) == rows[index:]
        assert next(stream, None) == (rows[index] if index < len(rows) else None)
    return rows


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.slow
@pytest.mark.parametrize("declared", [False, True])
def test_c4_in_a_folder_gives_the_same_rows_from_every_cursor(tmp_path: Path, declared: bool) -> None:
    folder = c4(tmp_path / "allenai" / "c4", declared=declared)
    rows = check_every_cursor(f"hf:{folder}:en")
    assert [row.text for row in rows] == [c4_row(number)["text"] for number in range(300)]
    assert (rows[140].file, rows[140].number) == (2, 1)  # after the empty shard
    assert rows_of(f"hf:{folder}:en:validation") == [Row(c4_row(1000)["text"], 0, 1)]
    assert rows_of(f"hf:{folder}:realnewslike") == [Row(c4_row(2000)["text"], 0, 1)]


def test_tiny_stories_in_a_folder_gives_the_same_rows_from_every_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_stories(tmp_path / "roneneldan" / "TinyStories")
    monkeypatch.chdir(tmp_path)
    rows = check_every_cursor("hf:roneneldan/TinyStories")
    texts = [f"Once upon a time there were {number} bears." for number in range(300)]
    assert [row.text for row in rows] == texts
    assert rows_of("hf:roneneldan/TinyStories::validation") == [Row("The end.", 0, 1)]
    assert list(readable_documents("hf:roneneldan/TinyStories", text_field="text")) == texts
    assert list(readable_documents("hf:roneneldan/TinyStories", text_field="text", characters=1)) == texts[:1]


def test_nulls_in_parquet_of_a_dataset_are_bad_rows(tmp_path: Path) -> None:
    texts = ["x", None, "", "y"]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "train.parquet")
    rows = check_every_cursor(f"hf:{tmp_path}")
    assert rows == [Row("x", 0, 1), Row("", 0, 2, "null"), Row("", 0, 3), Row("y", 0, 4)]


# More than the ten megabytes that datasets reads at once, of which the first 128 rows are one batch.
LONG = [c4_row(number, text=f"{number} " + "x" * 50_000) for number in range(240)]
ODD = [{"text": 5}, {"text": ["z"]}, {"text": None}, {"url": "no text"}, {"text": 'last, "quoted" and ü'}]


@pytest.mark.slow
@pytest.mark.parametrize("before", [[], LONG], ids=["from the first block", "in a later block"])
def test_values_that_are_not_text_in_json_of_a_dataset_are_bad_rows(tmp_path: Path, before: list[Any]) -> None:
    write_shard(tmp_path / "train.json.gz", [*before, *ODD])
    write_shard(tmp_path / "train2.json.gz", [{"text": "more", "url": ""}])
    rows = check_every_cursor(f"hf:{tmp_path}", every=len(before) // 4 or 1)
    assert [row.text for row in rows[:-6]] == [row["text"] for row in before]
    first = len(before) + 1
    assert rows[-6:] == [
        Row("", 0, first, "not text: field 'text' holds int"),
        Row("", 0, first + 1, "not text: field 'text' holds list"),
        Row("", 0, first + 2, "null"),
        Row("", 0, first + 3, "null"),  # a row of typed columns cannot lack one
        Row('last, "quoted" and ü', 0, first + 4),
        Row("more", 1, 1),
    ]


BROKEN = [
    '{"text": "cut\n',
    "\n",
    '{"text": "and on"}\n',
    '{"text": "\\ud800"}\n',
    '{"url": "no text"}\n',
    '{"text": 5}\n',
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "shard"), [([], 1), (LONG, 2)], ids=["in the first block", "in a later block of the second file"]
)
def test_broken_rows_of_json_in_a_folder_are_bad_rows(tmp_path: Path, before: list[Any], shard: int) -> None:
    for number in (1, 2):
        rows = [*before, "\n", *BROKEN, *ODD] if number == shard else [c4_row(0), *ODD]
        write_shard(tmp_path / f"train-{number}.json.gz", rows)
    rows = check_every_cursor(f"hf:{tmp_path}", every=len(before) // 4 or 1)
    found = [row for row in rows if row.file == shard - 1]
    assert [row.text for row in found[: len(before)]] == [row["text"] for row in before]
    first = len(before) + 1
    assert [row.number for row in found[-10:]] == list(range(first, first + 10))
    kinds = ["not JSON", "", "invalid Unicode", "no field 'text'", *["not text"] * 3, "null", "no field 'text'", ""]
    assert [row.kind for row in found[-10:]] == kinds
    assert [row.text for row in found if not row.problem][-2:] == ["and on", ODD[-1]["text"]]
    (text, *_), last = ([row.text for row in rows if row.file == 2 - shard] for _ in range(2))
    assert (text, last[-1]) == (c4_row(0)["text"], ODD[-1]["text"])  # never quoted, though its types are mixed


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2])
def test_rest_of_a_broken_json_file_in_a_folder_is_one_bad_row(tmp_path: Path, shard: int) -> None:
    write_shard(tmp_path / "train-1.json.gz", LONG)
    write_shard(tmp_path / "train-2.json.gz", LONG)
    file = tmp_path / f"train-{shard}.json.gz"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    rows = check_every_cursor(f"hf:{tmp_path}", every=80)
    (bad,) = [row for row in rows if row.problem]
    assert (bad.file, bad.kind) == (shard - 1, "broken file")
    assert 80 < bad.number < 160


@pytest.mark.parametrize("shard", [1, 2])
def test_broken_parquet_file_in_a_folder_is_one_bad_row(tmp_path: Path, shard: int) -> None:
    file = sorted((tiny_stories(tmp_path) / "data").iterdir())[shard - 1]
    file.write_bytes(file.read_bytes()[:2000])
    (bad,) = [row for row in check_every_cursor(f"hf:{tmp_path}") if row.problem]
    assert (bad.file, bad.number, bad.kind) == (shard - 1, 1, "broken file")


def test_file_that_disappears_from_a_folder_counts_as_all_its_rows(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in (1, 2):
        write_shard(tmp_path / "a" / f"train-{number}.json.gz", LONG)
    broken = tmp_path / "a" / "train-1.json.gz"
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    stream = open_rows(f"hf:{tmp_path / 'a'}", text_field="text")
    (tmp_path / "a" / "train-2.json.gz").rename(tmp_path / "away")
    assert [row.lost for row in stream if row.file == 1] == [max(1, 3 * (tmp_path / "away").stat().st_size // 4096)]


ARRAY = json.dumps(LONG)[:-1] + ', {"text'
TWO_ON_A_LINE = json.dumps(LONG[0]) + "".join(json.dumps(row) + "\n" for row in LONG[1:]) + '{"text'


@pytest.mark.parametrize(
    ("content", "why"), [(ARRAY, "one JSON array"), (TWO_ON_A_LINE, "the part before that is not one")]
)
def test_broken_json_file_without_one_row_per_line_is_refused(tmp_path: Path, content: str, why: str) -> None:
    write_shard(tmp_path / "train.json.gz", [content])
    where = r"data\.source: .*, shard 1 of 1, .* \('.*/train\.json\.gz'\)"
    with pytest.raises(UserError, match=rf"{where}: it is broken, and .*{why}.*; repair the file or leave it out"):
        rows_of(f"hf:{tmp_path}")


# ------------------------------------------------------------------------------------------------------------ problems


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("hf:", "write a name or folder after 'hf:'"),
        ("hf:a:b:c:d", "write a name or folder after 'hf:'"),
        ("hf:@main", "write a name or folder after 'hf:'"),
        ("hf:./nowhere:en", "there is no folder 'nowhere', and hub names look different"),
        ("hf:a/b/c", "there is no folder 'a/b/c'"),
        ("hf:some thing", "there is no folder 'some thing'"),
        ("hf:FOLDER@main", "a folder has no revisions; remove '@main'"),
        ("hf:FOLDER/empty", "the folder is empty"),
    ],
)
def test_malformed_hub_source_is_refused(tmp_path: Path, source: str, problem: str) -> None:
    tiny_stories(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden").touch()
    source = source.replace("FOLDER", str(tmp_path))
    assert problem in str(sources.source_problem(source))
    with pytest.raises(UserError, match=r"data\.source: "):
        open_rows(source, text_field="text")


@pytest.mark.parametrize(
    "source",
    [
        "hf:allenai/c4:en",
        "hf:allenai/c4@1588ec4:en:validation",
        "hf:roneneldan/TinyStories",
        "hf:squad::validation",
        "hf:a-b.c/d_e.f@refs/convert/parquet",
    ],
)
def test_hub_name_is_parsed_and_written_back_unchanged(source: str) -> None:
    assert sources.source_problem(source) is None
    assert hub.parse(source).source == source
    assert hub.parse(source).folder is None


def test_unknown_configuration_or_split_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    folder = c4(tmp_path)
    assert "'en', 'realnewslike'" in failure(f"hf:{folder}", "text")
    assert "'enn' not found" in failure(f"hf:{folder}:enn", "text")
    assert "Bad split: test. Available splits: ['train', 'validation']" in failure(f"hf:{folder}:en:test", "text")


def test_wrong_text_field_of_a_dataset_is_refused(tmp_path: Path) -> None:
    folder = c4(tmp_path / "c4")
    assert failure(f"hf:{folder}:en", "body").startswith(
        f"data.text_field: 'hf:{folder}:en': no field 'body'; it has 'text', 'timestamp', 'url'"
    )
    folder = tiny_stories(tmp_path / "stories")
    assert "not text: field 'id' holds Value('int64')" in failure(f"hf:{folder}", "id")
    assert "no field 'body'; it has 'id', 'text'" in failure(f"hf:{folder}", "body")


def python(code: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run this in a process of its own, for which the hub may be elsewhere."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )


def failure(source: str, text_field: str) -> str:
    with pytest.raises(UserError) as caught:
        open_rows(source, text_field=text_field)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("offline", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_unreachable_hub_gives_one_clear_message(tmp_path: Path, offline: dict[str, str]) -> None:
    code = (
        "import sys; from parallel.errors import UserError; from recipes.data.text import rows, sources\n"
        "assert sources.source_problem('hf:allenai/c4:en') is None\n"
        "loaded = {'torch', 'datasets', 'pyarrow', 'huggingface_hub'} & set(sys.modules); assert not loaded, loaded\n"
        "def show_error(function, *given):\n"
        "    try: function(*given, text_field='text')\n"
        "    except UserError as error: print(error)\n"
        "show_error(rows.open_rows, 'hf:allenai/c4:en')\n"
        "show_error(rows.open_rows, 'hf:allenai/c4@' + 40 * 'a')\n"
        "show_error(sources.fingerprint, 'hf:allenai/c4:en')\n"
        "print(sources.fingerprint('hf:allenai/c4@' + 40 * 'a', text_field='text'))"
    )
    found = python(code, HOME=str(tmp_path), **offline)
    *messages, identity = found.stdout.splitlines()
    assert len(messages) == 3
    for message in messages:
        assert message.startswith("data.source: 'hf:allenai/c4")
        assert "the Hugging Face hub does not answer (" in message
        assert "run 'hf download allenai/c4 --repo-type dataset --local-dir FOLDER'" in message
    assert len(identity) == 32  # a commit needs no asking
    assert found.stderr == ""


@pytest.mark.slow
def test_dataset_on_a_hub_is_streamed_pinned_and_resumed(tmp_path: Path) -> None:
    code = (
        "import json, sys; from parallel.errors import UserError; from recipes.data.text import rows, sources\n"
        "source = sys.argv[1]; stream = rows.open_rows(source, text_field='text')\n"
        "texts = [next(stream).text for _ in range(200)]\n"
        "again = rows.open_rows(sources.pinned(source), text_field='text', cursor=stream.cursor)\n"
        "print(json.dumps([texts + [row.text for row in again], stream.files, sources.pinned(source)]))\n"
        "print(sources.fingerprint(source, text_field='text') == sources.fingerprint(sources.pinned(source), "
        "text_field='text'))\n"
        "for wrong in ('hf:no/where', 'hf:allenai/c4@nowhere'):\n"
        "    try: rows.open_rows(wrong, text_field='text')\n"
        "    except UserError as error: print(error)"
    )
    with serve(c4(tmp_path / "hub"), "allenai/c4") as (address, asked):
        found = python(code, "hf:allenai/c4:en", HOME=str(tmp_path), HF_ENDPOINT=address)
    result, same, *messages = found.stdout.splitlines()
    texts, files, pinned = json.loads(result)
    assert texts == [c4_row(number)["text"] for number in range(300)]
    assert files[1] == "hf:allenai/c4:en, shard 2 of 3"
    assert pinned == f"hf:allenai/c4@{COMMIT}:en"
    assert same == "True"
    assert messages == [
        "data.source: 'hf:no/where': the hub has no such dataset; correct it, or if private: 'hf auth login'",
        "data.source: 'hf:allenai/c4@nowhere': it has no revision 'nowhere'; see its page on the hub, "
        "datasets/allenai/c4",
    ]
    assert found.stderr == ""
    assert not any("realnewslike/" in path or "validation" in path for path in asked)  # only what is read is fetched


@pytest.mark.slow
def test_broken_file_on_a_hub_stops_reading_and_offers_two_remedies(tmp_path: Path) -> None:
    file = c4(tmp_path / "hub") / "en" / "c4-train.00002-of-00003.json.gz"
    write_shard(file, [c4_row(140), '{"text": "cut\n'])
    code = (
        "from parallel.errors import UserError; from recipes.data.text import rows\n"
        "try: print(len(list(rows.open_rows('hf:allenai/c4:en', text_field='text'))))\n"
        "except UserError as error: print(error)"
    )
    with serve(tmp_path / "hub", "allenai/c4") as (address, _):
        found = python(code, HOME=str(tmp_path), HF_ENDPOINT=address)
    message = found.stdout
    assert message.startswith("data.source: hf:allenai/c4:en, shard 3 of 3, cannot be read past row 0: ")
    assert "if it is the network, run the same command again later; if the file is broken, run 'hf" in message


# --------------------------------------------------------------------------------------------------------- fingerprint


def test_fingerprint_of_a_dataset_folder_depends_on_files_config_split_and_field(tmp_path: Path) -> None:
    first, second = c4(tmp_path / "first"), c4(tmp_path / "second")
    identity = sources.fingerprint(f"hf:{first}:en", text_field="text")
    for name in ("en/c4-train.00000-of-00003.json.gz", "en/c4-train.00002-of-00003.json.gz"):
        (second / name).write_bytes((first / name).read_bytes())  # gzip notes the time
    for file in first.rglob("*.gz"):
        (second / file.relative_to(first)).write_bytes(file.read_bytes())
    (second / ".git").mkdir()
    (second / ".git" / "HEAD").touch()
    assert sources.fingerprint(f"hf:{second}:en", text_field="text") == identity
    others = [
        sources.fingerprint(f"hf:{second}:realnewslike", text_field="text"),
        sources.fingerprint(f"hf:{second}:en:validation", text_field="text"),
        sources.fingerprint(f"hf:{second}:en", text_field="url"),
    ]
    (second / "README.md").write_text(C4_README.replace("c4-train.*", "c4-train.00000*"))
    others.append(sources.fingerprint(f"hf:{second}:en", text_field="text"))
    assert len({identity, *others}) == 5


def test_fingerprint_of_a_commit_needs_no_network() -> None:
    commit = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"
    source = f"hf:allenai/c4@{commit}:en"
    assert sources.pinned(source) == source
    assert sources.pinned("python-stdlib") == "python-stdlib"
    first = sources.fingerprint(source, text_field="text")
    assert first != sources.fingerprint(source.replace("158", "258"), text_field="text")
    assert first != sources.fingerprint(source.replace(":en", ":de"), text_field="text")
