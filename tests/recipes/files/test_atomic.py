"""Small files under kills and full disks."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.files.atomic import BLOCK, Lines, cut_back, write_whole
from tests.full_disk import files_of_at_most


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_text_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    for sync in (False, True):
        write_whole(file, "old\n", sync=sync)
        with files_of_at_most(100), pytest.raises(OSError, match="too large"):
            write_whole(file, "new\n" * 100, sync=sync)
        assert file.read_text() == "old\n"
        assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_lines_that_a_full_disk_takes_are_counted_and_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    lines = Lines(tmp_path / "rows", log=told.append)
    lines.append("first", "second")
    whole = (tmp_path / "rows").read_bytes()
    with files_of_at_most(len(whole) + 10):
        for _ in range(3):
            lines.append("third, of which half would fit", "fourth")
            assert (tmp_path / "rows").read_bytes() == whole
        assert told == [f"{tmp_path / 'rows'} cannot be written: File too large; its lines are lost until it can"]
    for text in ("fifth", "sixth"):
        lines.append(text)
    assert told[1:] == [f"{tmp_path / 'rows'} can be written again; 6 lines were lost"]
    assert (tmp_path / "rows").read_text() == "first\nsecond\nfifth\nsixth\n"


def test_lines_are_written_again_when_their_folder_is(tmp_path: Path) -> None:
    told: list[str] = []
    lines = Lines(tmp_path / "folder" / "rows", log=told.append)
    lines.append("lost")
    (tmp_path / "folder").mkdir()
    lines.append()
    lines.append("kept")
    assert [line.partition(": ")[2] for line in told] == [
        "No such file or directory; its lines are lost until it can",
        "",
    ]
    assert (tmp_path / "folder" / "rows").read_text() == "kept\n"


@pytest.mark.parametrize("before", ["", "a\n", "a\n" + "b" * (2 * BLOCK) + "\n"])
@pytest.mark.parametrize("torn", ["", "x", "y" * (BLOCK - 1), "z" * (3 * BLOCK)])
def test_half_a_line_does_not_swallow_the_next(before: str, torn: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(before + torn)
    Lines(path, log=print).append("next")
    assert path.read_text() == before + "next\n"


def test_cut_back_forgets_later_steps_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path, log=print)
    for step in (1, 2, 3):
        lines.append(json.dumps({"step": step, "loss": 1 / step}), json.dumps({"step": step, "validation_loss": 2.0}))
    before = path.read_text().splitlines()
    with path.open("ab") as file:
        file.write(b'{"step": 2, "lo\xff\x00')
    cut_back(path, 2)
    assert path.read_text().splitlines() == before[:4]
    lines.append('{"step": 3}')
    assert rows(path)[-1] == {"step": 3}
    cut_back(path, 0)
    assert rows(path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_cut_back_writes_only_where_it_must(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    cut_back(path, 5)
    assert not list(tmp_path.iterdir())
    path.write_text('{"step": 5}\n')
    before = path.stat()
    cut_back(path, 5)
    assert path.stat().st_ino == before.st_ino and path.stat().st_mtime_ns == before.st_mtime_ns
