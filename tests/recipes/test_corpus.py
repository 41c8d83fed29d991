"""Sources: what they hold, in what order, how they are recognised again, and what a bad one is told."""

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
from recipes import corpus


def read(source: Path | str, text_field: str = "text") -> list[str]:
    return list(corpus.documents(str(source), text_field=text_field))


def write_json_lines(path: Path, rows: list[object]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".zst":
        with pyarrow.output_stream(str(path), compression="zstd") as stream:
            stream.write(lines.encode())
    else:
        path.write_text(lines, encoding="utf-8")
    return path


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def failure(source: Path | str, text_field: str = "text") -> str:
    with pytest.raises(UserError) as caught:
        read(source, text_field)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------ reading


def test_the_standard_library_is_there_and_always_in_the_same_order() -> None:
    texts = read(corpus.STDLIB)
    assert len(texts) > 400
    assert sum(map(len, texts)) > 5_000_000
    assert any("class Thread" in text for text in texts)
    assert not any("site-packages" in str(file) or "/test/" in str(file) for file in corpus._stdlib_files())
    assert texts == read(corpus.STDLIB)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    rows = [{"text": "one", "id": 1}, {"text": ""}, {"text": None}, {"text": " \n"}, {"text": "zwei ü 😀"}]
    assert read(write_json_lines(tmp_path / name, rows)) == ["one", "zwei ü 😀"]


def test_blank_lines_between_json_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n   \n')
    assert read(tmp_path / "rows.jsonl") == ["one", "two"]


def test_parquet_reads_the_named_column_in_batches(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(3000)]
    path = write_parquet(tmp_path / "rows.parquet", {"body": [*texts, None, ""], "id": list(range(3002))})
    assert read(path, text_field="body") == texts


def test_plain_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {number}\n" + "some more words\n" * 20 + "\n" for number in range(100)]
    (tmp_path / "book.txt").write_text("".join(paragraphs), encoding="utf-8")
    chunks = read(tmp_path / "book.txt")
    assert "".join(chunks) == "".join(paragraphs)
    assert all(chunk.startswith("Paragraph") and chunk.endswith("\n\n") for chunk in chunks)
    lengths = [len(chunk) for chunk in chunks[:-1]]
    assert min(lengths) >= corpus.CHUNK_CHARACTERS
    assert max(lengths) < corpus.CHUNK_CHARACTERS + max(map(len, paragraphs))


def test_plain_text_without_blank_lines_or_line_ends_is_cut_by_length(tmp_path: Path) -> None:
    (tmp_path / "line.txt").write_text("x" * 200_000, encoding="utf-8-sig")
    chunks = read(tmp_path / "line.txt")
    assert "".join(chunks) == "x" * 200_000  # the byte order mark is gone
    assert max(map(len, chunks)) == corpus.LONGEST_CHUNK_CHARACTERS


def test_a_folder_is_read_in_the_order_of_its_paths_and_other_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write_json_lines(tmp_path / "b" / "2.jsonl", [{"text": "b2"}])
    write_json_lines(tmp_path / "b" / "1.jsonl.gz", [{"text": "b1"}])
    write_parquet(tmp_path / "c.parquet", {"text": ["c"]})
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "README.md").write_text("not a document")
    (tmp_path / ".hidden.txt").write_text("nor this")
    (tmp_path / "empty.txt").write_text("")
    assert read(tmp_path) == ["a", "b1", "b2", "c"]


def test_globs_and_names_that_look_like_globs(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.jsonl", "[x].txt"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert len(read(tmp_path / "?.txt")) == 2
    assert read(tmp_path / "*.jsonl") == ["c.jsonl"]
    assert len(read(tmp_path / "**")) == 4
    assert read(tmp_path / "[x].txt") == ['{"text": "[x].txt"}']


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("at home")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert corpus.source_problem("~/a.txt") is None
    assert read("~/a.txt") == ["at home"]


# -------------------------------------------------------------------------------------------------------- fingerprint


def identity(source: Path | str, text_field: str = "text") -> str:
    return corpus.fingerprint(str(source), text_field=text_field)


def test_the_fingerprint_follows_contents_names_and_field_but_not_place_or_time(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        write_json_lines(folder / "a.jsonl", [{"text": "one"}])
    os.utime(second / "a.jsonl", (1, 1))
    assert identity(first) == identity(second) == identity(first / "a.jsonl") == identity(first / "*.jsonl")
    assert identity(first) != identity(first, text_field="body")
    write_json_lines(second / "a.jsonl", [{"text": "two"}])  # of the same size
    assert identity(first) != identity(second)
    before = identity(first)
    (first / "a.jsonl").rename(first / "b.jsonl")
    assert identity(first) != before


def test_the_field_does_not_matter_where_there_are_no_fields(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert identity(tmp_path) == identity(tmp_path, text_field="body")


def test_big_corpora_are_recognised_by_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "HASH_CONTENTS_UP_TO", 1)
    (tmp_path / "a.txt").write_text("text")
    before = identity(tmp_path)
    assert identity(tmp_path) == before
    os.utime(tmp_path / "a.txt", (1, 1))
    assert identity(tmp_path) != before


def test_document_hash_is_the_same_everywhere() -> None:
    assert corpus.document_hash("ü") == 6748675957732712302


# ----------------------------------------------------------------------------------------------------------- problems


def test_no_problem_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for source in (corpus.STDLIB, tmp_path, tmp_path / "a.txt", tmp_path / "*.txt"):
        assert corpus.source_problem(str(source)) is None


def test_a_source_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("text")
    problem = corpus.source_problem(str(tmp_path / "shakespear.txt"))
    assert problem is not None
    assert "does not exist; did you mean" in problem
    assert repr(str(tmp_path / "shakespeare.txt")) in problem
    assert corpus.source_problem("python_stdlib") == "'python_stdlib' does not exist; did you mean 'python-stdlib'?"
    assert "write 'python-stdlib', or a file" in str(corpus.source_problem(str(tmp_path / "zzz")))
    problem = corpus.source_problem(str(tmp_path / "no" / "where" / "a.txt"))
    assert f"there is no folder '{tmp_path / 'no' / 'where'}'; the nearest that exists is '{tmp_path}'" in str(problem)
    assert failure(tmp_path / "zzz").startswith("data.source: ")
    with pytest.raises(UserError, match=r"data\.source: .* does not exist"):
        identity(tmp_path / "zzz")


def test_nothing_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "notes.docx").write_text("text")
    assert "is of no known kind; known are .txt, .jsonl," in str(corpus.source_problem(str(tmp_path / "notes.docx")))
    assert "no file of a known kind in the folder" in str(corpus.source_problem(str(tmp_path)))
    assert "no file matches" in str(corpus.source_problem(str(tmp_path / "*.txt")))


def test_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert "is empty (0 bytes)" in str(corpus.source_problem(str(tmp_path / "a.txt")))
    (tmp_path / "b.txt").touch()
    assert "all 2 files of" in str(corpus.source_problem(str(tmp_path)))
    (tmp_path / "b.txt").write_text(" \n\n")
    assert corpus.source_problem(str(tmp_path)) is None
    assert "holds no text: every document is empty" in failure(tmp_path)


def test_files_and_folders_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).suffix != ".txt")  # root may read everything
    assert "a.txt' cannot be read by this user; change its permissions" in str(corpus.source_problem(str(tmp_path)))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "may not be read by this user" in str(corpus.source_problem(str(tmp_path)))


def test_an_interpreter_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_stdlib_folder", lambda: tmp_path)
    assert "this Python has no library sources" in str(corpus.source_problem(corpus.STDLIB))


def test_a_missing_field_names_those_that_exist(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", [{"text": "x"}, {"id": 1, "body": "y"}])
    assert failure(path) == f"data.text_field: '{path}', line 2 has no field 'text'; it has 'id', 'body'"
    path = write_parquet(tmp_path / "a.parquet", {"body": ["y"], "id": [1]})
    assert failure(path) == f"data.text_field: '{path}' has no field 'text'; it has 'body', 'id'"


def test_a_field_that_is_not_text(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", [{"text": ["x"]}])
    assert "line 1: field 'text' holds list, not text; name a field of text" in failure(path)
    path = write_parquet(tmp_path / "a.parquet", {"text": [1, 2]})
    assert "row 1: field 'text' holds int, not text" in failure(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut of', "line 1 is not JSON: "),
        ('["text"]', 'line 1 is not a JSON object such as {"text": ...}'),
        ('{"text": "\\ud83d"}', "line 1 is no valid Unicode: "),
        ("\udcff", "line 1 is not JSON: "),  # written as the single byte 0xff
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8", errors="surrogateescape")
    assert message in failure(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.txt", "a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
def test_files_that_are_not_what_their_name_says(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe no such thing" * 10)
    message = failure(tmp_path / name)
    assert message.startswith(f"data.source: cannot read '{tmp_path / name}': ")
    assert message.endswith("; repair it or leave it out")


def test_a_truncated_archive_is_noticed(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl.gz", [{"text": f"document {number}"} for number in range(2000)])
    path.write_bytes(path.read_bytes()[:-100])
    assert "a.jsonl.gz" in failure(path)


def test_neither_checks_nor_plain_reading_import_anything_heavy() -> None:
    code = (
        "import sys; from recipes import corpus, tokenizer\n"
        "assert corpus.source_problem('python-stdlib') is None\n"
        "assert tokenizer.tokenizer_problem('train:4096', 4096) is None\n"
        "next(corpus.documents('python-stdlib', text_field='text'))\n"
        "loaded = {'torch', 'datasets', 'tokenizers', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "import recipes.data.tokens; assert 'torch' not in sys.modules and 'tokenizers' not in sys.modules"
    )
    root = Path(corpus.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
