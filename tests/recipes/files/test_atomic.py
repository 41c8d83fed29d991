"""Small files under kills and full disks."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.files import atomic
from recipes.files.atomic import BLOCK, Lines, cut_back, write_whole
from tests.full_disk import files_of_at_most


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("sync", [False, True])
def test_text_is_replaced_completely_or_not_at_all(sync: bool, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    write_whole(file, "old\n", sync=sync)
    with files_of_at_most(100), pytest.raises(OSError, match="too large"):
        write_whole(file, "new\n" * 100, sync=sync)
    assert file.read_text() == "old\n"
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_lines_lost_to_a_full_disk_are_counted_and_logged_once(tmp_path: Path) -> None:
    logged: list[str] = []
    lines = Lines(tmp_path / "rows", log=logged.append)
    lines.append("first", "second")
    whole = (tmp_path / "rows").read_bytes()
    with files_of_at_most(len(whole) + 10):
        for _ in range(3):
            lines.append("third, of which half would fit", "fourth")
            assert (tmp_path / "rows").read_bytes() == whole
        assert logged == [f"{tmp_path / 'rows'} cannot be written: File too large; its lines are lost until it can"]
    for text in ("fifth", "sixth"):
        lines.append(text)
    assert logged[1:] == [f"{tmp_path / 'rows'} can be written again; 6 lines were lost"]
    assert (tmp_path / "rows").read_text() == "first\nsecond\nfifth\nsixth\n"


def test_lines_are_written_again_once_their_folder_exists(tmp_path: Path) -> None:
    logged: list[str] = []
    lines = Lines(tmp_path / "folder" / "rows", log=logged.append)
    lines.append("lost")
    (tmp_path / "folder").mkdir()
    lines.append()
    lines.append("kept")
    assert [line.partition(": ")[2] for line in logged] == [
        "No such file or directory; its lines are lost until it can",
        "",
    ]
    assert (tmp_path / "folder" / "rows").read_text() == "kept\n"


@pytest.mark.parametrize("before", ["", "a\n", "a\n" + "b" * (2 * BLOCK) + "\n"])
@pytest.mark.parametrize("torn", ["", "x", "y" * (BLOCK - 1), "z" * (3 * BLOCK)])
def test_partial_line_is_removed_before_the_next_is_appended(before: str, torn: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(before + torn)
    Lines(path, log=print).append("next")
    assert path.read_text() == before + "next\n"


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """Two rows for each of three steps, and a partial row."""
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path, log=print)
    for step in (1, 2, 3):
        lines.append(json.dumps({"step": step, "loss": 1 / step}), json.dumps({"step": step, "validation_loss": 2.0}))
    with path.open("ab") as file:
        file.write(b'{"step": 2, "lo\xff\x00')
    return path


def test_cut_back_removes_later_steps_and_a_partial_row(metrics: Path) -> None:
    before = metrics.read_bytes().splitlines()
    cut_back(metrics, 2)
    assert metrics.read_bytes().splitlines() == before[:4]
    assert [path.name for path in metrics.parent.iterdir()] == ["metrics.jsonl"]


def test_cut_back_file_can_be_appended_to(metrics: Path) -> None:
    cut_back(metrics, 2)
    Lines(metrics, log=print).append('{"step": 3}')
    assert len(rows(metrics)) == 5 and rows(metrics)[-1] == {"step": 3}


def test_cut_back_to_step_0_removes_the_file(metrics: Path) -> None:
    cut_back(metrics, 0)
    assert not list(metrics.parent.iterdir())


@pytest.mark.parametrize(
    "row", ['{"step": Infinity}', '{"step": 1e400}', '{"step": "1"}', '{"step": [1]}', "[1]", '"step"', "[" * 100_000]
)
def test_cut_back_removes_lines_that_are_not_rows(row: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{row}\n{{"step": 2}}\n')
    cut_back(path, 2)
    assert rows(path) == [{"step": 1}, {"step": 2}]


def test_cut_back_creates_no_file(tmp_path: Path) -> None:
    cut_back(tmp_path / "metrics.jsonl", 5)
    assert not list(tmp_path.iterdir())


def test_cut_back_leaves_a_file_alone_that_has_nothing_to_remove(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5}\n')
    before = path.stat()
    cut_back(path, 5)
    assert path.stat().st_ino == before.st_ino and path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    "after",
    [
        b"\0" * 5000,
        b"\0" * 5000 + b'\n{"step": 1001}\n',
        b'{"step": 10',
        b'\n\n{"step": 999, "lo',
        b'{"step": 1001}\n' * 200_000,
        b"\xff" * 3_000_000,
    ],
    ids=["zeros", "zeros and a row", "half a row", "empty lines", "many rows", "one long line"],
)
def test_cut_back_shortens_a_file_in_place_whatever_a_power_cut_left_at_its_end(after: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "text": "x" * 2000}).encode() + b"\n" for step in range(1, 1001)]
    path.write_bytes(b"".join(lines) + after)
    file = path.stat().st_ino
    for step in (1000, 900):
        cut_back(path, step)
        assert path.read_bytes() == b"".join(lines[:step]) and path.stat().st_ino == file


def test_cut_back_keeps_late_rows_of_earlier_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 999}\n{"step": 1002}\n{"step": 998, "skipped": true}\ntorn\n{"step": 1003}\n{"step": 1000}'
    )
    cut_back(path, 1000)
    assert path.read_bytes() == b'{"step": 999}\n{"step": 998, "skipped": true}\n{"step": 1000}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_cut_back_equals_looking_at_every_row(tmp_path: Path) -> None:
    chosen, path = random.Random(0), tmp_path / "metrics.jsonl"
    pieces = [b'{"step": %d}\n' % step for step in range(6)] + [b"\n", b"\0\0", b"{", b'"step"\n', b'{"step": 2}']
    for _ in range(500):
        text = b"".join(chosen.choices(pieces, k=chosen.randrange(12)))
        path.write_bytes(text)
        cut_back(path, 3)
        kept = [line for line in text.split(b"\n") if line in {b'{"step": %d}' % step for step in range(4)}]
        assert (path.read_bytes() if kept else b"") == b"".join(line + b"\n" for line in kept), text
        assert path.exists() == bool(kept)


def test_a_file_system_without_fsync_and_sizes_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert atomic.sync_folder(tmp_path) and atomic.free_bytes(tmp_path)

    def fails(number: int) -> Callable[..., None]:
        def call(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return call

    for number in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
        monkeypatch.setattr(os, "fsync", fails(number))
        monkeypatch.setattr(shutil, "disk_usage", fails(number))
        atomic.write_whole(tmp_path / "a", "text", sync=True)
        assert not atomic.sync_folder(tmp_path) and atomic.free_bytes(tmp_path) is None
    monkeypatch.setattr(os, "fsync", fails(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        atomic.write_whole(tmp_path / "a", "other", sync=True)
    assert (tmp_path / "a").read_text() == "text"
