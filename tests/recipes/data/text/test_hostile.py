"""Files that are small and decode to gigabytes, and folders that hold more than text."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.data.text import row as row_module
from recipes.data.text import sources
from recipes.data.text.row import LONGEST_WORD, UNREADABLE
from recipes.data.text.rows import open_rows, readable_documents
from tests.recipes.data.text.test_rows import ROOT, rows_of, write_json_lines, write_parquet

PEAK = """
import re, sys
from recipes.data.text.rows import open_rows
rows = open_rows(sys.argv[1], text_field="text")
for _ in range(int(sys.argv[2])):
    row = next(rows)
    print(len(row.text), row.problem)
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024)
"""


def peak_megabytes(path: Path, rows: int) -> tuple[list[str], int]:
    """What the first rows are, and the memory that reading them took."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path), str(rows)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    *lines, peak = done.stdout.splitlines()
    return lines, int(peak)


# -------------------------------------------------------------------------------------------------------------- memory


def test_row_that_does_not_fit_in_memory_is_bad_and_tried_again_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Python and pyarrow raise where an allocation is refused; nothing that a machine does reliably.
    def refuse(*arguments: object, **options: object) -> None:
        raise MemoryError

    write_json_lines(tmp_path / "a.jsonl", [{"text": "x"}] * 3)
    write_parquet(tmp_path / "b.parquet", {"text": ["x"] * 3})
    (tmp_path / "c.txt").write_text("last")
    stream = open_rows(str(tmp_path), text_field="text")
    monkeypatch.setattr(row_module, "text_or_problem", refuse)
    first, second, last = list(stream)
    assert (first.kind, second.kind, last.text) == (UNREADABLE, UNREADABLE, "last")
    assert "not enough memory" in first.problem
    assert (second.problem, second.lost) == ("unreadable file: rows 1 to 3 are lost: not enough memory", 3)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt"])
@pytest.mark.parametrize("character", ["a", "=", " "])
def test_word_without_end_is_a_bad_row(tmp_path: Path, name: str, character: str) -> None:
    longest = LONGEST_WORD
    texts = ["x" + ", " + character * (longest + extra) + "; y" for extra in (-2, 7)] + ["last"]
    if name == "a.txt":
        (tmp_path / name).write_text("\n<|endoftext|>\n".join(texts))
    elif name == "a.jsonl":
        write_json_lines(tmp_path / name, [{"text": text} for text in texts])
    else:
        write_parquet(tmp_path / name, {"text": texts})
    before, bad, last = rows_of(tmp_path)
    assert (before.text, last.text) == (texts[0], "last")
    assert bad.problem.startswith("too long: a word of 10000")


@pytest.mark.slow
def test_gzip_bomb_is_one_bad_row_in_bounded_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b'{"text": "' + bytes(1_000_000))
        file.write(b'\n{"text": "last"}\n')
    assert (tmp_path / "a.jsonl.gz").stat().st_size < 3_000_000
    lines, peak = peak_megabytes(tmp_path / "a.jsonl.gz", 2)
    assert lines == ["0 too long: a line of 300003001 bytes, more than 64000000", "4 "]
    assert peak < 400


# ------------------------------------------------------------------------------------------------------ what is wrong


def wide_zstd(text: bytes) -> bytes:
    """A frame whose window is 256 MB, as `zstd --long=28` writes them, with the text as one block that is stored."""
    return b"\x28\xb5\x2f\xfd" + bytes([0, 18 << 3]) + (1 | len(text) << 3).to_bytes(3, "little") + text


@pytest.mark.parametrize("count", [0, 20])
def test_zstd_with_a_window_that_is_too_wide_is_refused_with_the_command_that_mends_it(
    tmp_path: Path, count: int
) -> None:
    for number in range(count):  # more than are looked at before the first row
        write_json_lines(tmp_path / f"{number:02}.jsonl", [{"text": "good"}])
    (tmp_path / "wide.jsonl.zst").write_bytes(wide_zstd(b'{"text": "all rows are good"}\n'))
    with pytest.raises(UserError, match=r"wide\.jsonl\.zst.* above 128 MB.*zstd -dc --long=31 OLD.zst \| zstd -o NEW"):
        rows_of(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("share", [0.4, 0.9])
def test_rows_lost_of_a_highly_compressible_file_are_counted_rightly(tmp_path: Path, name: str, share: float) -> None:
    path = write_json_lines(tmp_path / name, [{"text": "the same row over and over again, " * 10}] * 40_000)
    data = bytearray(path.read_bytes())
    place = int(share * len(data))
    data[place : place + 8] = b"\xff" * 8
    path.write_bytes(data)
    *good, bad = rows_of(path)
    assert len(good) > 1000
    assert bad.lost == pytest.approx(40_000 - len(good), rel=0.2)


def test_source_without_a_good_row_is_refused_with_file_row_and_reason(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n[1]\n{"text": \n')
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(UserError) as caught:
        list(readable_documents(str(tmp_path), text_field="text"))
    message = str(caught.value)
    assert f"'{tmp_path}' holds no text: every document is empty or bad: '{tmp_path / 'a.jsonl'}', line 2: " in message
    assert "line 3: not JSON: Expecting value" in message
    assert "b.parquet', row 1: broken file: " in message


def test_file_that_is_one_json_array_names_the_command_that_makes_rows_of_it(tmp_path: Path) -> None:
    for text in (json.dumps([{"text": "x"}]), json.dumps([{"text": "x"}], indent=1)):
        (tmp_path / "a.jsonl").write_text(text)
        (problem, *_) = [row.problem for row in rows_of(tmp_path)]
        assert problem.endswith("jq -c '.[]' OLD > NEW.jsonl")
    (tmp_path / "a.jsonl").rename(tmp_path / "a.json")
    for source in (tmp_path, tmp_path / "*"):
        assert str(sources.source_problem(str(source))).endswith(f'; to read .json, name them: "{tmp_path}/**/*.json"')


@pytest.mark.parametrize(
    ("text", "problem"),
    [("[1", "broken file: Expecting ',' delimiter"), ("[" * 99_999, "broken file: not JSON: nested too deeply")],
)
def test_array_that_is_damaged_is_a_broken_file(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.json").write_text(text)
    (row,) = rows_of(tmp_path / "a.json")
    assert row.problem.startswith(problem)


# --------------------------------------------------------------------------------------------------- what is in folders


def test_notes_count_what_is_read_and_what_is_not(tmp_path: Path) -> None:
    for number in range(3):
        write_json_lines(tmp_path / f"{number}.jsonl", [{"text": "x"}])
        (tmp_path / f"{number}.pdf").touch()
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "folder.jsonl" / "a.TXT").write_text("a\n")
    (tmp_path / "table.csv").touch()
    (tmp_path / "README").touch()
    (tmp_path / "broken.jsonl").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.jsonl")
    first, second = sources.notes(str(tmp_path), text_documents="auto")
    assert first == (
        f"'{tmp_path}': reads 3 .jsonl, 1 .txt; does not read"
        " 3 .pdf, 1 .csv, 1 broken link, 1 pipe or device, 1 without a suffix"
        f'; to read .csv, name them: "{tmp_path}/**/*.csv"'
    )
    assert "up to the first blank line after 2,048 bytes; without any in 65,536 bytes, up to the last line" in second
    (globbed,) = sources.notes(str(tmp_path / "*.jsonl"), text_documents="auto")
    assert globbed.endswith(": reads 3 .jsonl; does not read 1 broken link, 1 pipe or device")
    assert sources.notes(str(tmp_path / "0.jsonl"), text_documents="auto") == []
    assert sources.notes(sources.STDLIB, text_documents="auto") == []


def test_link_back_to_its_own_folder_adds_no_file_twice(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.txt").write_text("once")
    (tmp_path / "inner" / "up").symlink_to("..")
    (tmp_path / "other").symlink_to("inner")  # no loop: read twice, as it is there twice
    expected = [tmp_path / "inner" / "a.txt", tmp_path / "other" / "a.txt"]
    assert sources.find_files(str(tmp_path)) == expected
    assert sources.find_files(str(tmp_path / "**")) == expected


def test_folder_inside_the_source_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: str | Path) -> object:  # root may read everything
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert f"this user may not read the folder '{tmp_path / 'closed'}'" in str(sources.source_problem(str(tmp_path)))


def test_pipe_is_not_a_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is a pipe or device, not a file or folder" in str(sources.source_problem(str(tmp_path / "pipe.jsonl")))


def test_names_with_control_characters_and_bytes_that_are_not_utf8_can_be_read(tmp_path: Path) -> None:
    for name in (b"line\nfeed.jsonl", b"\xff\x1b[31m.jsonl"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text('{"text": "x"}\n{')
    rows = open_rows(str(tmp_path), text_field="text")
    found = list(rows)
    assert [row.text for row in found] == ["x", "", "x", ""]
    for row in found:
        rows.where(row).encode()
        assert rows.where(row).isprintable()
    assert sources.fingerprint(str(tmp_path), text_field="text")
