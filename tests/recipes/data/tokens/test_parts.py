"""Parts of a source: any number of them, joined, give the bytes that one machine writes."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parallel.errors import TemporaryError, UserError
from recipes.data.tokens.join import join, missing, state
from recipes.data.tokens.parts import begin, parts_folder, write_slices
from recipes.data.tokens.shards import BadRowBudget, array_path
from recipes.data.tokens.workspace import Pieces, Preparation
from tests.recipes.data.texts import SMALL, contents, shards_in, tokenizer_for, work_on, write_rows

SLICE = 2000


def write_part(folder: Path, work: Preparation, number: int, parts: int) -> None:
    plan, source = begin(parts_folder(folder), work, parts=parts, slice_bytes=SLICE)
    list(write_slices(parts_folder(folder), plan.part(number, parts), plan, work, source=source))


def join_parts(folder: Path, work: Preparation, *, share: tuple[int, int] = (1, 1), threads: int = 2) -> int:
    plan, source = begin(parts_folder(folder), work, parts=1, slice_bytes=SLICE)
    budget = BadRowBudget(folder, source=work.source, budget=0.9)
    return join(
        folder, parts_folder(folder), plan, work, files=source.names, budget=budget, share=share, threads=threads
    )


def lines(folder: Path) -> None:
    for number, count in enumerate((1, 200, 3, 0, 40)):
        write_rows(folder / f"{number}.jsonl", count, start=1000 * number)
    with (folder / "1.jsonl").open("ab") as file:
        file.write(
            b'\n\n{"text": "cut\n{"text": ""}\n{"text": "\\u00e4 and more"}\r\n\xff\xfe\n{"text": "no line ending"}'
        )
    marked = (folder / "4.jsonl").read_bytes()
    (folder / "4.jsonl").write_bytes(b"\xef\xbb\xbf" + marked)


def parquet(folder: Path) -> None:
    for number, rows in enumerate((5, 900)):
        texts = [f"Row {row} of {number}: {row * 7919 % 1000}" if row % 50 else None for row in range(rows)]
        pq.write_table(pa.table({"text": texts}), folder / f"{number}.parquet", row_group_size=70)


def small_texts(folder: Path) -> None:
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(f"Text {number}.\n\n" * (number * 9 % 40), encoding="utf-8")


def broken(folder: Path) -> None:
    write_rows(folder / "a.jsonl", 100)
    (folder / "b.jsonl.gz").write_bytes(b"\x1f\x8b no gzip")
    write_rows(folder / "c.jsonl", 30)


@pytest.mark.parametrize("write", [lines, parquet, small_texts, broken])
@pytest.mark.parametrize("pieces", [SMALL, Pieces(3000, 3000, shard_rows=20, batch_characters=500, batch_rows=7)])
def test_parts_give_the_bytes_of_one_machine(tmp_path: Path, write: Callable[[Path], None], pieces: Pieces) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")
    work = work_on(tmp_path / "in", tokenizer=tokenizer_for(tmp_path / "in"), pieces=pieces)
    assert len(shards_in(tmp_path / "whole", work)) > 1
    for parts in (1, 2, 5):
        folder = tmp_path / f"{parts}"
        for number in reversed(range(1, parts + 1)):
            write_part(folder, work, number, parts)
        assert join_parts(folder, work) == 0
        assert contents(folder) == contents(tmp_path / "whole")


def test_large_files_are_divided_at_lines_and_row_groups(tmp_path: Path) -> None:
    for number, (write, name) in enumerate(((lines, "1.jsonl"), (parquet, "1.parquet"))):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        write(folder)
        work = work_on(folder, tokenizer=tokenizer_for(folder))
        plan, source = begin(tmp_path / f"{number}.parts", work, parts=3, slice_bytes=SLICE)
        stretches = [piece for piece in plan.slices if not piece.files]
        assert len(stretches) > 4
        assert {source.files[piece.file].name for piece in stretches} == {name}
        assert [piece.begin for piece in stretches[1:]] == [piece.end for piece in stretches[:-1]]
        for parts in (1, 3, 50):
            found = [index for number in range(1, parts + 1) for index in plan.part(number, parts)]
            assert found == list(range(len(plan.slices)))
        sizes = [sum(plan.slices[index].size for index in plan.part(number, 3)) for number in (1, 2, 3)]
        assert max(sizes) - min(sizes) <= 2 * max(piece.size for piece in plan.slices)


def test_damaged_slice_is_made_again_by_its_part(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 300)
    work = work_on(tmp_path / "rows.jsonl")
    write_part(tmp_path / "out", work, 1, 1)
    plan, source = begin(tmp_path / "out.parts", work, parts=1, slice_bytes=SLICE)
    assert missing(tmp_path / "out.parts", plan) == []
    tokens = array_path(tmp_path / "out.parts", 2, "tokens")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    array_path(tmp_path / "out.parts", 1, "rows").unlink()
    assert missing(tmp_path / "out.parts", plan) == [1, 2]
    assert state(tmp_path / "out.parts", plan)[1] == ["1/1"]
    made = write_slices(tmp_path / "out.parts", range(len(plan.slices)), plan, work, source=source)
    assert len(list(made)) == 2
    assert join_parts(tmp_path / "out", work) == 0
    shards_in(tmp_path / "whole", work)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_processes_that_share_the_join_write_each_shard_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 600)
    work = work_on(tmp_path / "rows.jsonl")
    shards = len(shards_in(tmp_path / "whole", work))
    write_part(tmp_path / "out", work, 1, 1)
    assert join_parts(tmp_path / "out", work, share=(2, 3)) == shards - len(range(1, shards, 3))
    assert not (tmp_path / "out" / "index.json").exists()
    assert join_parts(tmp_path / "out", work, share=(3, 3)) == len(range(0, shards, 3))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("0*")}
    assert join_parts(tmp_path / "out", work, share=(1, 3)) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_file_that_cannot_be_read_now_stops_a_part_for_a_while(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        write_rows(tmp_path / "in" / f"{name}.jsonl", 60)
    work = work_on(tmp_path / "in", tokenizer=tokenizer_for(tmp_path / "in"))
    plan, source = begin(tmp_path / "out.parts", work, parts=1, slice_bytes=SLICE)
    (tmp_path / "in" / "b.jsonl").rename(tmp_path / "aside")
    with pytest.raises(TemporaryError, match=r"b\.jsonl': unreadable file: .*; the same command continues"):
        list(write_slices(tmp_path / "out.parts", range(len(plan.slices)), plan, work, source=source))
    (tmp_path / "aside").rename(tmp_path / "in" / "b.jsonl")
    write_part(tmp_path / "out", work, 1, 1)
    assert join_parts(tmp_path / "out", work) == 0
    shards_in(tmp_path / "whole", work)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_file_that_changes_while_a_part_reads_it_stops_the_part(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    work = work_on(tmp_path / "rows.jsonl")
    plan, source = begin(tmp_path / "out.parts", work, parts=1, slice_bytes=SLICE)
    write_rows(tmp_path / "rows.jsonl", 60, name="document")
    with pytest.raises(UserError, match=r"rows\.jsonl' changed while it was read; start again"):
        list(write_slices(tmp_path / "out.parts", [0], plan, work, source=source))
    assert missing(tmp_path / "out.parts", plan)[0] == 0
