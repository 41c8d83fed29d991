"""Sources: how they are recognised again, and what a bad one is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.data.text import sources

# -------------------------------------------------------------------------------------------------------- fingerprint


def identity(source: Path | str, text_field: str = "text") -> str:
    return sources.fingerprint(str(source), text_field=text_field)


def test_the_fingerprint_follows_contents_names_and_field_but_not_place_or_time(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "a.jsonl").write_text('{"text": "one"}\n')
    os.utime(second / "a.jsonl", (1, 1))
    assert identity(first) == identity(second) == identity(first / "a.jsonl") == identity(first / "*.jsonl")
    assert identity(first) != identity(first, text_field="body")
    (second / "a.jsonl").write_text('{"text": "two"}\n')  # of the same size
    assert identity(first) != identity(second)
    before = identity(first)
    (first / "a.jsonl").rename(first / "b.jsonl")
    assert identity(first) != before


def test_the_field_does_not_matter_where_there_are_no_fields(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert identity(tmp_path) == identity(tmp_path, text_field="body")


def test_big_corpora_are_recognised_by_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "HASH_CONTENTS_UP_TO", 1)
    (tmp_path / "a.txt").write_text("text")
    before = identity(tmp_path)
    assert identity(tmp_path) == before
    os.utime(tmp_path / "a.txt", (1, 1))
    assert identity(tmp_path) != before


def test_document_hash_is_the_same_everywhere() -> None:
    assert sources.document_hash("ü") == 6748675957732712302


# ----------------------------------------------------------------------------------------------------------- problems


def test_no_problem_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for source in (sources.STDLIB, tmp_path, tmp_path / "a.txt", tmp_path / "*.txt"):
        assert sources.source_problem(str(source)) is None


def test_a_source_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("text")
    problem = sources.source_problem(str(tmp_path / "shakespear.txt"))
    assert problem is not None
    assert "does not exist; did you mean" in problem
    assert repr(str(tmp_path / "shakespeare.txt")) in problem
    assert sources.source_problem("python_stdlib") == "'python_stdlib' does not exist; did you mean 'python-stdlib'?"
    assert "write 'python-stdlib', 'hf:ID' for a dataset on the hub, or a file" in str(
        sources.source_problem(str(tmp_path / "zzz"))
    )
    problem = sources.source_problem(str(tmp_path / "no" / "where" / "a.txt"))
    assert f"there is no folder '{tmp_path / 'no' / 'where'}'; the nearest existing one is '{tmp_path}'" in str(problem)
    with pytest.raises(UserError, match=r"data\.source: .* does not exist"):
        identity(tmp_path / "zzz")


def test_nothing_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "notes.docx").write_text("text")
    assert "has an unknown type; supported are .txt, .jsonl," in str(
        sources.source_problem(str(tmp_path / "notes.docx"))
    )
    assert "no file of a supported type is in the folder" in str(sources.source_problem(str(tmp_path)))
    assert "no file matches" in str(sources.source_problem(str(tmp_path / "*.txt")))


def test_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert "is empty (0 bytes)" in str(sources.source_problem(str(tmp_path / "a.txt")))
    (tmp_path / "b.txt").touch()
    assert "all 2 files of" in str(sources.source_problem(str(tmp_path)))
    (tmp_path / "b.txt").write_text(" \n\n")
    assert sources.source_problem(str(tmp_path)) is None


def test_files_and_folders_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).suffix != ".txt")  # root may read everything
    assert f"this user may not read '{tmp_path / 'a.txt'}'; change its permissions" in str(
        sources.source_problem(str(tmp_path))
    )
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "this user may not read the folder" in str(sources.source_problem(str(tmp_path)))


def test_an_interpreter_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_stdlib_folder", lambda: tmp_path)
    assert "this Python has no library sources" in str(sources.source_problem(sources.STDLIB))


def test_neither_checks_nor_plain_reading_import_anything_heavy() -> None:
    code = (
        "import sys; from recipes.data.text import tokenizer; from recipes.data.text import rows, sources\n"
        "assert sources.source_problem('python-stdlib') is None\n"
        "assert tokenizer.tokenizer_problem('train:4096', 4096) is None\n"
        "next(rows.documents('python-stdlib', text_field='text'))\n"
        "loaded = {'torch', 'datasets', 'tokenizers', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "import recipes.data.open_data; assert 'torch' not in sys.modules and 'tokenizers' not in sys.modules"
    )
    root = Path(sources.__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


@pytest.mark.parametrize(
    "pattern",
    [
        "k",
        "k/**",
        "k/*",
        "k/*/*.txt",
        "k/**/o*.txt",
        "**",
        "*/*",
        "k/.cache/**",
        "k/**/out/*",
        "k/[a-o]*/*",
        "k/m.jsonl",
    ],
)
def test_what_a_source_would_read_is_known_before_it_is_there(tmp_path: Path, pattern: str) -> None:
    places = [
        "k/owner.txt",
        "k/out/owner.txt",
        "k/a/b/out/owner.txt",
        "k/.cache/owner.txt",
        "out/owner.txt",
        "owner.txt",
    ]
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "m.jsonl").write_text('{"text": "a"}\n')
    source = str(tmp_path / pattern)
    expected = [sources.would_read(source, tmp_path / place) for place in places]
    linked = tmp_path.with_name("link")
    linked.symlink_to(tmp_path)
    assert [sources.would_read(str(linked / pattern), tmp_path / place) for place in places] == expected
    linked.unlink()
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("text")
    assert [tmp_path / place in sources.find_files(source) for place in places] == expected
    assert not sources.would_read(sources.STDLIB, tmp_path / "owner.txt")
