"""Sources: their fingerprints, and the messages for bad ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.errors import TemporaryError, UserError
from recipes.data.text import sources, stdlib
from recipes.data.text.tokenizer import tokenizer_problem
from recipes.files import reading
from recipes.weights.companions import read_companions

# -------------------------------------------------------------------------------------------------------- fingerprint


def identity(source: Path | str, text_field: str = "text") -> str:
    return sources.fingerprint(str(source), text_field=text_field)


def test_fingerprint_depends_on_contents_names_and_field_but_not_on_place_or_time(tmp_path: Path) -> None:
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


def test_fingerprint_of_plain_text_does_not_depend_on_the_text_field(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert identity(tmp_path) == identity(tmp_path, text_field="body")


def test_fingerprint_of_a_big_corpus_depends_on_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "HASH_CONTENTS_UP_TO", 1)
    (tmp_path / "a.txt").write_text("text")
    before = identity(tmp_path)
    assert identity(tmp_path) == before
    os.utime(tmp_path / "a.txt", (1, 1))
    assert identity(tmp_path) != before


def test_document_hash_is_the_same_on_every_machine() -> None:
    assert sources.document_hash("ü") == 6748675957732712302


# ----------------------------------------------------------------------------------------------------------- problems


def test_missing_source_suggests_the_most_similar_name(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("text")
    problem = sources.source_problem(str(tmp_path / "shakespear.txt"))
    assert problem is not None
    assert "does not exist; did you mean" in problem
    assert repr(str(tmp_path / "shakespeare.txt")) in problem
    assert "write 'hf:owner/data' for the dataset" in str(sources.source_problem("owner/data"))
    assert sources.source_problem("python_stdlib") == "'python_stdlib' does not exist; did you mean 'python-stdlib'?"


def test_missing_source_without_a_similar_name_lists_what_to_write(tmp_path: Path) -> None:
    assert "write 'python-stdlib', 'hf:ID' for a dataset on the hub, or a file" in str(
        sources.source_problem(str(tmp_path / "zzz"))
    )
    with pytest.raises(UserError, match=r"data\.source: .* does not exist"):
        identity(tmp_path / "zzz")


def test_missing_folder_names_the_nearest_existing_one(tmp_path: Path) -> None:
    problem = sources.source_problem(str(tmp_path / "no" / "where" / "a.txt"))
    assert f"there is no folder '{tmp_path / 'no' / 'where'}'; the nearest existing one is '{tmp_path}'" in str(problem)


def test_source_without_files_of_a_supported_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.docx").write_text("text")
    assert "has an unknown type; supported are .txt, .jsonl," in str(
        sources.source_problem(str(tmp_path / "notes.docx"))
    )
    assert "no file of a supported type is in the folder" in str(sources.source_problem(str(tmp_path)))
    assert "no file matches" in str(sources.source_problem(str(tmp_path / "*.txt")))


def test_source_with_only_empty_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert "is empty (0 bytes)" in str(sources.source_problem(str(tmp_path / "a.txt")))
    (tmp_path / "b.txt").touch()
    assert "all 2 files of" in str(sources.source_problem(str(tmp_path)))
    (tmp_path / "b.txt").write_text(" \n\n")
    assert sources.source_problem(str(tmp_path)) is None


def test_source_without_read_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).suffix != ".txt")  # root may read everything
    assert f"this user may not read '{tmp_path / 'a.txt'}'; change its permissions" in str(
        sources.source_problem(str(tmp_path))
    )
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "this user may not read the folder" in str(sources.source_problem(str(tmp_path)))


def test_python_without_its_library_sources_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib, "stdlib_folder", lambda: tmp_path)
    assert "this Python has no library sources" in str(sources.source_problem(sources.STDLIB))


def test_a_package_of_the_library_is_a_source_and_another_name_lists_them() -> None:
    whole, part = sources.find_files("python-stdlib"), sources.find_files("python-stdlib/asyncio")
    assert 0 < len(part) < len(whole) and set(part) < set(whole)
    assert {file.parent.name for file in part} == {"asyncio"}
    for wrong in ("python-stdlib/asynchronous", "python-stdlib/../..", "python-stdlib/email/../asyncio"):
        assert "it has asyncio, collections, " in str(sources.source_problem(wrong))


@pytest.mark.slow
def test_checking_and_reading_plain_text_import_neither_heavy_libraries_nor_unused_files() -> None:
    code = (
        "import sys; from recipes.data.text import tokenizer; from recipes.data.text import rows, sources\n"
        "assert sources.source_problem('python-stdlib') is None\n"
        "assert tokenizer.tokenizer_problem('train:4096', 4096) is None\n"
        "next(rows.readable_documents('python-stdlib', text_field='text'))\n"
        "loaded = {'torch', 'datasets', 'tokenizers', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "import recipes.data.open_data; assert 'torch' not in sys.modules and 'tokenizers' not in sys.modules\n"
        "unused = {'text.hub', 'text.compressed', 'tokens.prepare', 'tokens.background'}\n"
        "loaded = {f'recipes.data.{module}' for module in unused} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    root = Path(sources.__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


PATTERNS = ("k", "k/**", "k/*", "k/*/*.txt", "k/**/o*.txt", "**", "*/*", "k/.cache/**", "k/**/out/*", "k/[a-o]*/*")


@pytest.mark.parametrize("pattern", [*PATTERNS, "k/m.jsonl"])
def test_would_read_predicts_which_new_files_a_source_reads(tmp_path: Path, pattern: str) -> None:
    places = [f"{folder}owner.txt" for folder in ("k/", "k/out/", "k/a/b/out/", "k/.cache/", "out/", "")]
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


def test_a_text_a_tokenizer_or_a_setting_that_cannot_be_read_now_is_a_fault_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PAUSES", (0, 0))
    (tmp_path / "b.txt").write_text("text")
    for name in ("a.txt", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to("/proc/self/mem")  # reading it is an input/output error (EIO)
    with pytest.raises(TemporaryError, match=r"^data.source: cannot read '.*a.txt' now: Input/output error"):
        identity(tmp_path / "*.txt")
    with pytest.raises(TemporaryError, match=r"^data.tokenizer: '.*tokenizer.json' cannot be read now: Input/output"):
        tokenizer_problem(str(tmp_path / "tokenizer.json"), 512)
    with pytest.raises(TemporaryError, match=r"tokenizer_config.json cannot be read now: Input/output error"):
        read_companions(tmp_path)
