"""Rows of files: their contents, every kind of bad row, and the same rows from every cursor."""

import gzip
import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from parallel.errors import UserError
from recipes.data.text import plain_text, readers, sources, stdlib, tables
from recipes.data.text import row as row_module
from recipes.data.text.plain_text import CHUNK_BYTES, LONGEST_CHUNK_BYTES
from recipes.data.text.row import LATIN_1, Row
from recipes.data.text.rows import open_rows, readable_documents

ROOT = Path(sources.__file__).parents[3]


def set_limits(patch: pytest.MonkeyPatch, **limits: int) -> None:
    """Give PIECE or LONGEST_ROW another value wherever it is used."""
    for module in (row_module, readers, plain_text, tables):
        for name, value in limits.items():
            if hasattr(module, name):
                patch.setattr(module, name, value)


def read(source: Path | str, text_field: str = "text") -> list[str]:
    return list(readable_documents(str(source), text_field=text_field))


def rows_of(source: Path | str, text_field: str = "text", cursor: dict[str, Any] | None = None) -> list[Row]:
    return list(open_rows(str(source), text_field=text_field, cursor=cursor))


def compress(path: Path, data: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    elif path.suffix == ".zst":
        with pyarrow.output_stream(str(path), compression="zstd") as stream:
            stream.write(data)
    else:
        path.write_bytes(data)
    return path


def write_json_lines(path: Path, rows: list[Any]) -> Path:
    return compress(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def failure(source: Path | str, text_field: str = "text") -> str:
    with pytest.raises(UserError) as caught:
        read(source, text_field)
    return str(caught.value)


def test_standard_library_is_always_read_in_the_same_order() -> None:
    texts = read(sources.STDLIB)
    assert len(texts) > 400
    assert sum(map(len, texts)) > 5_000_000
    assert any("class Thread" in text for text in texts)
    assert not any(
        "site-packages" in str(file) or "/test/" in str(file) for file in sources.find_files("python-stdlib")
    )
    assert texts == read(sources.STDLIB)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_json_lines_give_their_texts_without_empty_rows(tmp_path: Path, name: str) -> None:
    rows = [{"text": "one", "id": 1}, {"text": ""}, {"text": None}, {"text": " \n"}, {"text": "zwei ü 😀"}]
    assert read(write_json_lines(tmp_path / name, rows)) == ["one", "zwei ü 😀"]


def test_blank_lines_between_json_lines_are_not_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n   \n')
    assert read(tmp_path / "rows.jsonl") == ["one", "two"]


def test_parquet_gives_the_texts_of_the_named_column(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(3000)]
    path = write_parquet(tmp_path / "rows.parquet", {"body": [*texts, None, ""], "id": list(range(3002))})
    assert read(path, text_field="body") == texts


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.md", "# One\n\ntwo\n", ["# One\n\ntwo\n"]),
        ("a.py", "def f():\n    return 1\n", ["def f():\n    return 1\n"]),
        ("a.tsv", "id\ttext\n1\tone, two\n2\tthree\n", ["one, two", "three"]),
        ("a.json", '[{"text": "one"}, "two", {"text": ""}]', ["one", "two"]),
        ("a.json", '{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        (
            "a.html",
            "<!doctype html><head><title>t</title></head><script>if (a<b) x()</script><h1>A &amp; B</h1>"
            "<p>one <b>two</b>\nthree<!-- no --><ul><li>if 1 < 2</ul>",
            ["A & B\none two\nthree\nif 1 < 2"],
        ),
    ],
)
def test_further_files_are_read_where_the_source_names_them(
    tmp_path: Path, name: str, content: str, texts: list[str]
) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "a.txt").write_text("plain")
    assert read(tmp_path / name) == read(tmp_path / f"*{Path(name).suffix}") == texts
    assert read(tmp_path) == ["plain"]


def test_an_array_goes_on_after_any_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": str(number)} for number in range(5)]))
    rows = open_rows(str(tmp_path / "a.json"), text_field="text")
    for number in range(5):
        assert next(rows).text == str(number)
        again = open_rows(str(tmp_path / "a.json"), text_field="text", cursor=rows.cursor)
        assert [row.text for row in again] == [str(later) for later in range(number + 1, 5)]


def test_plain_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {number}\n" + "some more words\n" * 20 + "\n" for number in range(100)]
    (tmp_path / "book.txt").write_text("".join(paragraphs), encoding="utf-8")
    chunks = read(tmp_path / "book.txt")
    assert "".join(chunks) == "".join(paragraphs)
    assert all(chunk.startswith("Paragraph") and chunk.endswith("\n\n") for chunk in chunks)
    lengths = [len(chunk) for chunk in chunks[:-1]]
    assert min(lengths) >= CHUNK_BYTES
    assert max(lengths) < CHUNK_BYTES + max(map(len, paragraphs))


def test_plain_text_without_blank_lines_is_cut_by_length(tmp_path: Path) -> None:
    (tmp_path / "line.txt").write_text("x" * 200_000, encoding="utf-8-sig")
    chunks = read(tmp_path / "line.txt")
    assert "".join(chunks) == "x" * 200_000  # without the byte order mark
    assert max(map(len, chunks)) == LONGEST_CHUNK_BYTES


def test_folder_is_read_in_the_order_of_its_paths_without_other_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write_json_lines(tmp_path / "b" / "2.jsonl", [{"text": "b2"}])
    write_json_lines(tmp_path / "b" / "1.jsonl.gz", [{"text": "b1"}])
    write_parquet(tmp_path / "c.parquet", {"text": ["c"]})
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "README.md").write_text("not a document")
    (tmp_path / ".hidden.txt").write_text("nor this")
    (tmp_path / "empty.txt").write_text("")
    assert read(tmp_path) == ["a", "b1", "b2", "c"]


def test_glob_selects_files_unless_it_names_one(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.jsonl", "[x].txt"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert len(read(tmp_path / "?.txt")) == 2
    assert read(tmp_path / "*.jsonl") == ["c.jsonl"]
    assert len(read(tmp_path / "**")) == 4
    assert read(tmp_path / "[x].txt") == ['{"text": "[x].txt"}']


def test_tilde_in_a_source_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("at home")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.source_problem("~/a.txt") is None
    assert read("~/a.txt") == ["at home"]


# ----------------------------------------------------------------------------------------------------------- bad rows


def test_rows_are_located_by_file_and_line_row_or_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n')
    write_parquet(tmp_path / "b.parquet", {"text": ["two", None]})
    (tmp_path / "c.txt").write_text("three")
    rows = open_rows(str(tmp_path), text_field="text")
    found = list(rows)
    assert found == [Row("one", 0, 1), Row("", 0, 3), Row("two", 1, 1), Row("", 1, 2, "null"), Row("three", 2, 1)]
    assert [Path(file).name for file in rows.files] == ["a.jsonl", "b.parquet", "c.txt"]
    assert [rows.where(row).split("', ")[1] for row in found] == ["line 1", "line 3", "row 1", "row 2", "document 1"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "cut of', "not JSON: Unterminated string starting at (character 10)"),
        (b'{"text": 1' + b"0" * 5000 + b"}", "not JSON: Exceeds the limit (4300 digits) for integer string conversion"),
        (b"[" * 100_000, "not JSON: nested too deeply"),
        (b'["text"]', "not a JSON object: list"),
        (b'{"content": "x", "id": 1}', "no field 'text'; it has 'content', 'id'"),
        (b"{}", "no field 'text'; it has (none)"),
        (b'{"text": ["x"]}', "not text: field 'text' holds list"),
        (b'{"text": null}', "null"),
        (b'{"text": "\xff"}', f"invalid UTF-8: byte 0xff at 11{LATIN_1}"),
        (b'{"text": "gr\xfcn"}', f"invalid UTF-8: byte 0xfc at 13{LATIN_1}"),
        (b'{"text": "\xed\xa0\xbd"}', "invalid UTF-8: byte 0xed at 11"),
        (b'{"text": "x\\ud83d"}', "invalid Unicode: half a surrogate pair at character 2"),
    ],
)
def test_bad_line_is_one_row_with_a_reason(tmp_path: Path, line: bytes, problem: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    before, bad, after = rows_of(tmp_path)
    assert (before.text, after.text) == ("before", "after")
    assert (bad.text, bad.number) == ("", 2)
    assert bad.problem.startswith(problem)
    assert ":" not in bad.kind


def test_invalid_bytes_in_plain_text_lose_one_document(tmp_path: Path) -> None:
    pieces = [b"a" * CHUNK_BYTES + b"\n\n", b"b" * 3000 + b"\xff" + b"b" * 3000 + b"\n\n", b"c" * 3000]
    (tmp_path / "a.txt").write_bytes(b"".join(pieces))
    first, bad, last = rows_of(tmp_path)
    assert (first.text.encode(), last.text.encode()) == (pieces[0], pieces[2])
    assert bad == Row("", 0, 2, f"invalid UTF-8: byte 0xff at {len(pieces[0]) + 3001}{LATIN_1}")


def test_cut_by_length_splits_no_character_and_no_line_ending(tmp_path: Path) -> None:
    for shift in range(4):
        for character in ("ü", "€", "😀", "\r\n"):
            text = "x" * shift + character * LONGEST_CHUNK_BYTES
            (tmp_path / "a.txt").write_bytes(text.encode())
            rows = rows_of(tmp_path / "a.txt")
            assert "".join(row.text for row in rows) == text.replace("\r\n", "\n")


def test_python_file_that_is_not_utf8_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_bytes(b"# \xe9\n")
    (tmp_path / "b.py").write_bytes(b"\xef\xbb\xbfpass\r\n")
    monkeypatch.setattr(stdlib, "stdlib_folder", lambda: tmp_path)
    assert rows_of(sources.STDLIB) == [Row("", 0, 1, f"invalid UTF-8: byte 0xe9 at 3{LATIN_1}"), Row("pass\n", 1, 1)]


def test_parquet_values_that_are_not_text_are_bad_rows(tmp_path: Path) -> None:
    broken = pyarrow.StringArray.from_buffers(
        3, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\3\0\0\0\5\0\0\0"), pyarrow.py_buffer(b"ab\xffcd")
    )
    write_parquet(tmp_path / "a.parquet", {"text": broken})
    write_parquet(tmp_path / "b.parquet", {"text": pyarrow.array([b"x"], pyarrow.binary())})
    write_parquet(tmp_path / "c.parquet", {"text": [{"deep": "x"}]})
    write_parquet(tmp_path / "d.parquet", {"text": ["x"]})
    assert rows_of(tmp_path) == [
        Row("ab", 0, 1),
        Row("", 0, 2, "invalid UTF-8: byte 0xff at 1"),
        Row("cd", 0, 3),
        Row("", 1, 1, "not text: field 'text' holds binary"),
        Row("", 2, 1, "not text: field 'text' holds struct<deep: string>"),
        Row("x", 3, 1),
    ]


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_broken_parquet_page_loses_the_rest_of_its_row_group(tmp_path: Path, compression: str) -> None:
    write_broken_parquet(tmp_path / "a.parquet", compression)
    rows = rows_of(tmp_path)
    (bad,) = [row for row in rows if row.problem]
    assert 101 <= bad.number <= 200
    assert bad.kind == "broken row group"
    assert f"rows {bad.number} to 200 are lost: " in bad.problem
    assert [row.number for row in rows] == [*range(1, bad.number + 1), *range(201, 301)]
    assert rows[-1].text.startswith("document 299 ")


def write_broken_parquet(path: Path, compression: str = "zstd") -> Path:
    """Three row groups of a hundred rows, a byte flipped in the middle of the second."""
    texts = [f"document {number} " + f"{number * 7919}" * 20 for number in range(300)]
    options: dict[str, Any] = {
        "data_page_size": 1000,
        "write_batch_size": 10,
        "write_page_checksum": True,
        "write_statistics": False,
    }
    write_parquet(path, {"text": texts}, row_group_size=100, compression=compression, use_dictionary=False, **options)
    column = pyarrow.parquet.read_metadata(path).row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["b.parquet", "b.jsonl.gz", "b.jsonl.zst"])
def test_file_with_a_wrong_suffix_is_one_bad_row(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("before")
    (tmp_path / name).write_bytes(b"\xff\xfe no such thing" * 10)
    (tmp_path / "c.txt").write_text("after")
    before, bad, after = rows_of(tmp_path)
    assert (before.text, after.text) == ("before", "after")
    assert (bad.file, bad.number) == (1, 1)
    assert bad.kind == "broken file"
    assert bad.problem.endswith("; the rest of the file is lost")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_compressed_file_that_breaks_off_keeps_the_rows_before(tmp_path: Path, name: str) -> None:
    path = write_json_lines(tmp_path / name, [{"text": f"document {i} {i * i * 7919}"} for i in range(20_000)])
    whole = rows_of(path)
    path.write_bytes(path.read_bytes()[:-1000])
    rows = rows_of(path)
    assert len(rows) > 10_000
    assert rows[:-1] == whole[: len(rows) - 1]
    assert rows[-1].kind == "broken file"
    assert rows[-1].number == len(rows)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_rest_of_a_broken_compressed_file_counts_as_all_its_rows(tmp_path: Path, name: str) -> None:
    chance = random.Random(0)
    texts = [f"{chance.randbytes(chance.randrange(50)).hex()}" for _ in range(40_000)]
    path = write_json_lines(tmp_path / name, [{"text": text} for text in texts])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + chance.randbytes(len(data) // 2))
    *good, bad = rows_of(path)
    assert 15_000 < len(good) < 21_000
    assert bad.lost == pytest.approx(len(texts) - len(good), rel=0.1)
    stream = open_rows(str(path), text_field="text")
    assert list(islice(stream, len(good))) == good
    assert rows_of(path, cursor=stream.cursor) == [bad]
    path.write_bytes(chance.randbytes(100_000))  # no row comes of it
    (bad,) = rows_of(path)
    assert bad.lost == 3 * 100_000 // 4096


@pytest.mark.parametrize("count", [10, 20_000])
def test_zeros_after_a_gz_are_not_damage(count: int, tmp_path: Path) -> None:
    """Block devices and tapes leave them; gzip ignores them. They do not stand for what is missing."""
    path = write_json_lines(tmp_path / "a.jsonl.gz", [{"text": f"document {i}"} for i in range(count)])
    whole, rows = path.read_bytes(), rows_of(path)
    path.write_bytes(whole + bytes(1000))
    assert rows_of(path) == rows and len(rows) == count
    path.write_bytes(whole[: len(whole) // 2] + bytes(1000))
    found = rows_of(path)
    assert found[-1].kind == "broken file" and len(found) < 0.75 * count


def test_missing_file_is_one_bad_row_that_counts_as_many(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.jsonl.gz", "d.parquet", "e.txt"):
        (tmp_path / name).write_text(name * (1 if name.endswith("txt") else 10_000))
    stream = open_rows(str(tmp_path), text_field="text")
    for name in ("b.jsonl", "c.jsonl.gz", "d.parquet"):
        (tmp_path / name).unlink()
    rows = list(stream)
    assert [row.text for row in rows] == ["a.txt", "", "", "", "e.txt"]
    assert [row.lost for row in rows[1:4]] == [70_000 // 4096, 3 * 100_000 // 4096, 90_000 // 4096]


@pytest.mark.slow
def test_large_row_group_is_read_in_bounded_memory(tmp_path: Path) -> None:
    texts = [f"{number * 7919 % 65_521:06}" * 5000 for number in range(2000)]  # 60 MB
    write_parquet(
        tmp_path / "a.parquet", {"text": texts}, write_batch_size=10, use_dictionary=False, compression="none"
    )
    code = (
        "import sys, pyarrow; from recipes.data.text.rows import open_rows\n"
        "print(sum(len(row.text) for row in open_rows(sys.argv[1], text_field='text')))\n"
        "print(pyarrow.default_memory_pool().max_memory())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    length, peak = map(int, found.stdout.split())
    assert length == 60_000_000
    assert peak < 20_000_000


def test_line_of_the_largest_size_is_read_and_a_longer_one_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, PIECE=7, LONGEST_ROW=30)
    lengths = range(14, 31)
    (tmp_path / "a.jsonl").write_text("".join('{"text": "' + "x" * (n - 13) + '"}\n' for n in lengths))
    assert [len(row.text) for row in rows_of(tmp_path)] == [n - 13 for n in lengths]
    (tmp_path / "a.jsonl").write_text('{"text": "' + "x" * 18 + '"}\n{"text": "last"}')
    assert [row.problem for row in rows_of(tmp_path)] == ["too long: a line of 31 bytes, more than 30", ""]


def test_too_long_parquet_value_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, LONGEST_ROW=30)
    write_parquet(tmp_path / "a.parquet", {"text": ["x" * 30, "x" * 31]})
    assert [row.problem for row in rows_of(tmp_path)] == ["", "too long: 31 characters, more than 30"]


# ------------------------------------------------------------------------------------------------------------- cursors


@pytest.fixture
def nasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every kind of file and every kind of bad row."""
    set_limits(monkeypatch, PIECE=64, LONGEST_ROW=1000)
    monkeypatch.setattr(tables, "BATCH_ROWS", 16)
    bad = [b"{", b'["x"]', b'{"id": 1}', b'{"text": 1}', b'{"text": null}', b'{"text": "\xff"}', b'{"text": "\\udc00"}']
    odd = [b"", b"   ", b'{"text": ""}', b'{"text": "' + b"x" * 2000 + b'"}', b'{"text": "\xc3\xbc 1"}\r']
    lines = b"\xef\xbb\xbf" + b"\n".join([*odd, *bad, b'{"text": "' + b"y" * 900 + b'"}', *odd, *bad, b'{"text": "z"}'])
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        compress(tmp_path / name, lines)
    compress(tmp_path / "d.jsonl", lines + b"\n\n")
    for number, kind in enumerate(("gz", "zst")):
        many = write_json_lines(tmp_path / f"e{number}.jsonl.{kind}", [{"text": str(i**3)} for i in range(9000)])
        many.write_bytes(many.read_bytes()[:-5000])
        (tmp_path / f"f{number}.jsonl.{kind}").write_bytes(b"nothing of the kind")
    text = "".join(f"Absatz {i}: " + "ä€😀\r\n" * (i * 37 % 300) + "\r\n" for i in range(30)) + "€" * 80_000
    (tmp_path / "g.txt").write_bytes(text.encode().replace(b"Absatz 7", b"Absatz \xff"))
    (tmp_path / "h.txt").touch()
    write_broken_parquet(tmp_path / "i.parquet")
    write_parquet(tmp_path / "j.parquet", {"text": ["x", None, "y", "", "z" * 2000] * 20}, row_group_size=30)
    write_parquet(tmp_path / "k.parquet", {"text": [1, 2]})
    write_parquet(tmp_path / "l.parquet", {"other": ["x"] * 100})
    write_parquet(tmp_path / "m.parquet", {"text": pyarrow.array([], pyarrow.string())})
    (tmp_path / "n.parquet").write_bytes(b"PAR1 is all there is PAR1")
    write_json_lines(tmp_path / "o.jsonl", [{"text": "the end"}])
    return tmp_path


@pytest.mark.slow
def test_rows_are_the_same_from_every_cursor(nasty: Path) -> None:
    stream = open_rows(str(nasty), text_field="text")
    rows, cursors = [], [stream.cursor]
    for row in stream:
        rows.append(row)
        cursors.append(stream.cursor)
    kinds = {row.kind for row in rows}
    assert len(kinds) == 11, kinds  # all there are, and none
    assert len({(row.file, row.number) for row in rows}) == len(rows)
    starts = [0, *(index for index in range(1, len(rows)) if rows[index].file != rows[index - 1].file)]
    near = {start + step for start in starts for step in range(-40, 41)}
    for index, cursor in enumerate(cursors):
        if index in near or index % 500 == 0 or index > len(rows) - 2:
            entered = open_rows(str(nasty), text_field="text", cursor=json.loads(json.dumps(cursor)))
            assert entered.cursor == cursor
            # To the end of the next file: everything after that runs the same code again.
            for expected in rows[index : index + 150]:
                assert next(entered) == expected
            if index > len(rows) - 150:
                assert next(entered, None) is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt"])
def test_damaged_files_give_the_same_rows_from_every_cursor(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    chance = random.Random(0)
    texts = [chance.choice(["", "x", "é€😀" * 5, "word " * 50, "\n"]) for _ in range(300)]
    if name == "a.parquet":
        options: dict[str, Any] = {"row_group_size": 100, "data_page_size": 500, "write_batch_size": 20}
        write_parquet(path, {"text": texts}, **options)
    elif name == "a.txt":
        path.write_text("\n".join(texts * 10), encoding="utf-8")
    else:
        write_json_lines(path, [{"text": text} for text in texts])
    whole = path.read_bytes()
    for _ in range(40):
        damaged = bytearray(whole[: chance.choice([len(whole), len(whole), chance.randrange(1, len(whole))])])
        for _ in range(chance.choice([0, 1, 20])):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        start = {"file": 0}
        stream = open_rows(str(path), text_field="text", cursor=start)
        entered = [(row, stream.cursor) for row in stream]
        for index in chance.sample(range(len(entered)), min(3, len(entered))):
            rows = rows_of(path, cursor=entered[index][1])
            assert rows == [row for row, _ in entered[index + 1 :]]


def test_resuming_at_a_cursor_reads_nothing_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json_lines(tmp_path / "a.jsonl", [{"text": f"document {number}"} for number in range(1000)])
    stream = open_rows(str(tmp_path), text_field="text")
    for _ in range(900):
        next(stream)
    cursor = stream.cursor
    with (tmp_path / "a.jsonl").open("r+b") as file:
        file.write(b"\xff" * 10_000)  # nothing of the first rows is looked at
    assert [row.text for row in rows_of(tmp_path, cursor=cursor)] == [f"document {n}" for n in range(900, 1000)]

    write_parquet(tmp_path / "a.parquet", {"text": [f"row {n}" for n in range(300)]}, row_group_size=100)
    groups = []
    original = tables._row_group
    monkeypatch.setattr(tables, "_row_group", lambda *args, **more: groups.append(args[1]) or original(*args, **more))
    found = rows_of(tmp_path / "a.parquet", cursor={"file": 0, "number": 250})
    assert [row.text for row in found] == [f"row {n}" for n in range(250, 300)]
    assert groups == [2]


# --------------------------------------------------------------------------------------------------- wrong text fields


def test_source_without_the_text_field_is_refused_with_its_fields(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", [{"content": "x", "id": 1}] * 100)
    message = f"data.text_field: '{path}', line 1: no field 'text'; it has 'content', 'id'; name a text field"
    assert failure(path) == message
    path = write_parquet(tmp_path / "a.parquet", {"content": ["y"], "id": [1]})
    assert f"data.text_field: '{path}', row 1: no field 'text'; it has 'content', 'id'" in failure(path)
    assert failure(tmp_path) == message
    path = write_json_lines(tmp_path / "b.jsonl", [{"text": 1}])
    assert "line 1: not text: field 'text' holds int; name a text field" in failure(path)


def test_source_with_the_text_field_in_one_of_its_first_rows_is_accepted(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", [{"content": "x"}] * 100)
    write_json_lines(tmp_path / "b.jsonl", [{"content": "x"}, {"text": None}, {"text": "y"}])
    assert sum(not row.problem for row in rows_of(tmp_path)) == 1


# ---------------------------------------------------------------------------------------------------- just the texts


def test_readable_documents_skips_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": null}\n\n{"text": " "}\n{"body": 1}\n{"text"\n{"text": "two"}\n')
    assert list(readable_documents(str(path), text_field="text")) == ["one", "two"]
    assert list(readable_documents(str(path), text_field="text", characters=3)) == ["one"]
    path.write_text('{"text": ""}\n{"text"\n')
    with pytest.raises(UserError, match="holds no text: every document is empty or bad"):
        list(readable_documents(str(path), text_field="text"))
