"""Documents of .txt files: what data.text_documents makes of them, and text that is not UTF-8."""

import json
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.data.text import plain_text, sources
from recipes.data.text.row import UTF_16
from recipes.data.text.rows import open_rows, readable_documents
from tests.recipes.data.text.test_rows import compress, set_limits

END = "<|endoftext|>"


def texts_of(source: Path, text_documents: str = "auto") -> list[str]:
    rows = list(open_rows(str(source), text_field="text", text_documents=text_documents))
    assert not any(row.problem for row in rows), rows
    return [row.text for row in rows]


def problems_of(source: Path, text_documents: str = "auto") -> list[str]:
    rows = open_rows(str(source), text_field="text", text_documents=text_documents)
    return [row.problem for row in rows if row.problem]


def stories(count: int, ending: str = "\n") -> list[str]:
    return [
        ending.join([f"Story {number}", "", "Once upon a time. " * (number % 9), "The end."]) for number in range(count)
    ]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_tiny_stories_become_one_document_each_without_being_told(tmp_path: Path, ending: str) -> None:
    text = f"{ending}{END}{ending}".join(stories(3000, ending)) + f"{ending}{END}{ending}"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert texts_of(tmp_path / "a.txt") == stories(3000)


def test_text_that_mentions_the_separator_inside_a_line_is_not_cut_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"GPT-2 writes {END} after each document.\n")
    assert texts_of(tmp_path / "a.txt") == [f"GPT-2 writes {END} after each document.\n"]
    assert texts_of(tmp_path / "a.txt", END) == ["GPT-2 writes ", " after each document."]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("file", ["a\nb\n\n\nc --- d\n \ne\n"]),
        ("line", ["a", "b", "c --- d", "e"]),
        ("blank_line", ["a\nb", "c --- d", "e"]),
        (" --- ", ["a\nb\n\n\nc", "d\n \ne"]),
        ("\n\n\n", ["a\nb", "c --- d\n \ne"]),
        ("pieces", ["a\nb\n\n\nc --- d\n \ne\n"]),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_setting_says_what_a_document_is(tmp_path: Path, setting: str, expected: list[str], ending: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\nb\n\n\nc --- d\n \ne\n".replace(b"\n", ending.encode()))
    assert texts_of(tmp_path / "a.txt", setting) == expected


def test_message_says_that_a_file_does_not_contain_the_separator(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n====\ntwo\n")
    (note,) = sources.notes(str(tmp_path), text_documents="----")
    assert "documents are separated by '----', which the first file does not contain" in note
    (note,) = sources.notes(str(tmp_path), text_documents="\n====\n")
    assert "contain" not in note


def test_message_names_every_kind_of_document_that_auto_finds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt").write_text("".join(f"{story}\n<|endoftext|>\n" for story in ("one", "two")))
    (note,) = sources.notes(str(tmp_path), text_documents="auto")
    assert "each document is a piece of a file" in note and ", as in 'a.txt'; " in note
    assert "documents are separated by '<|endoftext|>', as in 'b.txt' (2 .txt, " in note


@pytest.mark.parametrize("slip", ["lines", "Line", "blank-line", "FILE"])
def test_slip_in_a_keyword_is_not_taken_for_a_separator(slip: str) -> None:
    assert "did you mean" in str(plain_text.text_documents_problem(slip))
    assert plain_text.text_documents_problem("line") is None
    assert plain_text.text_documents_problem("<|endoftext|>") is None


def test_small_files_of_a_large_folder_are_one_document_each(tmp_path: Path) -> None:
    article = "A paragraph of an article.\n\n" * 300
    for number in range(plain_text.MANY_FILES - 1):
        (tmp_path / f"{number:03}.txt").write_text(f"{number}\n{article}")
    assert len(texts_of(tmp_path)) > 200
    (tmp_path / "last.txt").write_text("last")
    assert len(texts_of(tmp_path)) == plain_text.MANY_FILES
    (tmp_path / "big.txt").write_text(article * 200)
    assert len(texts_of(tmp_path)) > plain_text.MANY_FILES + 100


def test_text_without_blank_lines_is_cut_between_words(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(50_000)]
    for separator in (" ", "\n", "\t"):
        (tmp_path / "a.txt").write_text(separator.join(words))
        documents = texts_of(tmp_path / "a.txt")
        assert len(documents) > 4
        assert [word for document in documents for word in document.split()] == words
        assert len(texts_of(tmp_path / "a.txt", "pieces")) == len(documents)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["auto", "line", "blank_line", END, "\r\n--\r\n", "pieces"])
def test_documents_are_the_same_from_every_cursor_and_piece_size(
    tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\r\n".join(f"{END}\r\nä{number}\n\n\r\r--\r\n" + "€" * (number % 7) for number in range(60)) + "\r"
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xff" + b"x\n\n" * 40)
    found = []
    for piece in (1 << 20, 1, 2, 5):
        set_limits(monkeypatch, PIECE=piece)
        stream = open_rows(str(tmp_path), text_field="text", text_documents=setting)
        rows = [(row, stream.cursor) for row in stream]
        found.append(rows)
        for index, (_, cursor) in enumerate(rows):
            entered = open_rows(
                str(tmp_path), text_field="text", text_documents=setting, cursor=json.loads(json.dumps(cursor))
            )
            assert list(entered) == [row for row, _ in rows[index + 1 :]]
    assert all(rows == found[0] for rows in found)


def test_document_between_separators_that_is_too_long_is_one_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, LONGEST_ROW=1000, PIECE=64)
    (tmp_path / "a.txt").write_text(f"one\n{END}\n" + "x " * 5000 + f"\n{END}\nthree\n{END}\n")
    rows = list(open_rows(str(tmp_path), text_field="text"))
    size = 10_001 + len(END)
    assert [row.text for row in rows] == ["one", "", "three"]
    assert rows[1].problem == f"too long: a document of {size + 1} bytes, more than 1000"
    assert problems_of(tmp_path, "file")[0].startswith("too long: a document of ")


def test_another_setting_is_another_source_and_pieces_is_what_it_was_before_the_setting(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')

    def identity(text_documents: str) -> str:
        return sources.fingerprint(str(tmp_path), text_field="text", text_documents=text_documents)

    assert identity("auto") == identity("line") == identity("pieces")
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    assert len({identity(setting) for setting in ("auto", "line", "pieces", END)}) == 4
    # Computed before data.text_documents existed.
    (tmp_path / "a.jsonl").unlink()
    assert identity("pieces") == "dd7ad3bf648bc7df1af9c4c3b18663e2"


# ----------------------------------------------------------------------------------------------------- not UTF-8 at all


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_reported_with_the_command_that_converts_it(tmp_path: Path, name: str, encoding: str) -> None:
    text = '\ufeff{"text": "some words"}\n' + '{"text": "some words"}\n' * 99
    compress(tmp_path / name, text.encode(encoding))
    first, *others = problems_of(tmp_path)
    assert first == UTF_16 and "iconv -f UTF-16 -t UTF-8" in first
    assert all(problem.startswith("NUL bytes: ") for problem in others[:98])  # of .txt, the file is one document
    with pytest.raises(UserError, match=f"{name}', (line|document) 1: looks like UTF-16"):
        list(readable_documents(str(tmp_path), text_field="text"))


def test_nul_bytes_are_a_bad_row_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100 + b"\0" + b"y" * 200)
    assert problems_of(tmp_path) == ["NUL bytes: 1, the first at 101; the file is damaged or is not text"]
    (tmp_path / "a.txt").write_bytes(b"x" * 100 + bytes(4096))  # the hole that a crash leaves
    assert problems_of(tmp_path) == ["NUL bytes: 4096, the first at 101; the file is damaged or is not text"]
