"""Parts of a source: any number of them hold, in order, the tokens that one machine makes."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parallel.errors import UserError
from recipes.data.order import SequenceOrder
from recipes.data.prepared import prepared_index
from recipes.data.sequences import Sequences, Source
from recipes.data.tokens.parts import Part, read_cuts, state, unfinished_problem
from recipes.data.tokens.prepare import write_shards
from recipes.data.tokens.shards import (
    DOCUMENTS,
    TRAIN,
    VALIDATION,
    BadRowBudget,
    Index,
    Shards,
    array_path,
    bad_rows,
    read_index,
    shard_path,
)
from recipes.data.tokens.workspace import Pieces, Preparation
from tests.recipes.data.texts import SMALL, contents, shards_in, tokenizer_for, work_on, write_rows


def write_part(folder: Path, work: Preparation, number: int, parts: int) -> None:
    list(write_shards(folder, work, part=Part(number, parts)))


def write_parts(folder: Path, work: Preparation, parts: int) -> None:
    for number in reversed(range(1, parts + 1)):
        assert read_index(folder) is None
        write_part(folder, work, number, parts)


def index_of(folder: Path) -> Index:
    index = read_index(folder)
    assert index is not None
    return index


def everything(folder: Path) -> dict[str, object]:
    """What readers see of a folder, without where its shards end."""
    index = index_of(folder)
    found: dict[str, object] = {"bad": list(bad_rows(folder, index.shards)), "fingerprint": index.fingerprint}
    for kind in (TRAIN, VALIDATION):
        shards = Shards(folder, kind)
        assert shards.complete
        tokens = np.zeros(shards.tokens, dtype=np.int64)
        shards.read(0, tokens)
        found[kind] = tokens.tobytes()
    found["documents"] = list(Shards(folder).documents(0, Shards(folder).tokens))
    names = ("train", "validation", "documents", "held_out", "empty", "bad")
    return found | {f"sum {name}": sum(getattr(shard, name) for shard in index.shards) for name in names}


def lines(folder: Path) -> None:
    for number, count in enumerate((1, 200, 3, 0, 40)):
        write_rows(folder / f"{number}.jsonl", count, start=1000 * number)
    with (folder / "1.jsonl").open("ab") as file:
        file.write(
            b'\n\n{"text": "cut\n{"text": ""}\n{"text": "\\u00e4 and more"}\r\n\xff\xfe\n{"text": "no line ending"}'
        )
    marked = (folder / "4.jsonl").read_bytes()
    (folder / "4.jsonl").write_bytes(b"\xef\xbb\xbf" + marked)


def blank_lines(folder: Path) -> None:
    """Wherever a part begins, there may be blank lines before and after it."""
    write_rows(folder / "rows.jsonl", 150)
    rows = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n" * 90 + "".join(row + "\n" * (1 + n % 90) for n, row in enumerate(rows)))


def parquet(folder: Path) -> None:
    for number, rows in enumerate((5, 900)):
        texts = [f"Row {row} of {number}: {row * 7919 % 1000}" if row % 50 else None for row in range(rows)]
        pq.write_table(pa.table({"text": texts}), folder / f"{number}.parquet", row_group_size=70)
    pq.write_table(pa.table({"other": list(range(1000))}), folder / "2.parquet", row_group_size=70)


def small_texts(folder: Path) -> None:
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(f"Text {number}.\n\n" * (number * 9 % 40), encoding="utf-8")


def broken(folder: Path) -> None:
    write_rows(folder / "a.jsonl", 100)
    (folder / "b.jsonl.gz").write_bytes(b"\x1f\x8b no gzip")
    write_rows(folder / "c.jsonl", 30)


@pytest.mark.parametrize("write", [lines, blank_lines, parquet, small_texts, broken])
@pytest.mark.parametrize("pieces", [SMALL, Pieces(3000, 3000, shard_rows=20, batch_characters=500, batch_rows=7)])
def test_parts_hold_the_tokens_of_one_machine(tmp_path: Path, write: Callable[[Path], None], pieces: Pieces) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")
    work = work_on(tmp_path / "in", tokenizer=tokenizer_for(tmp_path / "in"), pieces=pieces)
    shards_in(tmp_path / "whole", work)
    for parts in (2, 7, 30):
        write_parts(tmp_path / f"{parts}", work, parts)
        assert everything(tmp_path / f"{parts}") == everything(tmp_path / "whole")


def test_run_reads_parts_as_it_reads_the_tokens_of_one_machine(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    lines(tmp_path / "in")
    work = work_on(tmp_path / "in", tokenizer=tokenizer_for(tmp_path / "in"))
    shards_in(tmp_path / "whole", work)
    write_parts(tmp_path / "parts", work, 3)
    found = []
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        index = prepared_index(folder, work.tokenizer, 0.2, verify=True, setting="data.source")
        shards = Shards(folder, only=index.shards)
        read = Sequences([Source("text", shards, SequenceOrder(32, 3, None), prepared=True)], [1.0])
        epochs = 3 * read.available
        read.require(0, epochs)
        found.append((read.rows(0, epochs).tobytes(), [list(read.pieces(number)) for number in range(epochs)]))
    assert found[0] == found[1]


def test_large_files_are_divided_at_lines_and_row_groups(tmp_path: Path) -> None:
    for write, name in ((lines, "1.jsonl"), (parquet, "1.parquet")):
        source = tmp_path / name.partition(".")[2]
        source.mkdir()
        write(source)
        (source / "2.parquet").unlink(missing_ok=True)
        work = work_on(source, tokenizer=tokenizer_for(source))
        write_part(tmp_path / f"out {name}", work, 1, 4)
        cuts = read_cuts(tmp_path / f"out {name}")
        assert cuts == sorted(cuts) and {[*work.states][cut.file] for cut in cuts[1:-1]} == {str(source / name)}
        sizes = [end.read - begin.read for begin, end in pairwise(cuts)]
        assert max(sizes) < 1.4 * min(sizes)


def test_damaged_shard_is_made_again_by_its_part(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 900)
    work = work_on(tmp_path / "rows.jsonl")
    write_parts(tmp_path / "out", work, 3)
    before = contents(tmp_path / "out")
    tokens = array_path(tmp_path / "out", 2_000_001, TRAIN)
    tokens.write_bytes(tokens.read_bytes()[:-2] + b"??")
    with pytest.raises(UserError, match=r"is damaged: 2000001-train.npy does not have the checksum in 2000001\.json"):
        prepared_index(tmp_path / "out", work.tokenizer, 0.2, verify=True, setting="data.source")
    write_part(tmp_path / "out", work, 1, 3)
    made = next(write_shards(tmp_path / "out", work, part=Part(2, 3)))
    assert made.number == 2_000_001
    write_part(tmp_path / "out", work, 2, 3)
    assert contents(tmp_path / "out") == before


def test_unfinished_folder_names_the_parts_that_are_missing(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 1200)
    work, out = work_on(tmp_path / "rows.jsonl"), tmp_path / "out"
    assert not next(write_shards(out, work, part=Part(3, 4))).last
    write_part(out, work, 2, 4)
    assert f"the preparation of '{out}' lacks part 1/4, 3/4, 4/4; run " in str(unfinished_problem(str(out)))
    said = state(out, work)
    assert said[0] == "part 1/4: 0%, 0 shards with 0 tokens" and said[1].startswith("part 2/4: 100%, ")
    assert 0 < int(said[2].split()[2].rstrip("%,")) < 100
    for number in (1, 3, 4):
        write_part(out, work, number, 4)
    (out / "index.json").unlink()  # as if the last process had been killed before it wrote that
    assert "lacks its index; run scripts/prepare_data.py with any --part of it again" in str(
        unfinished_problem(str(out))
    )
    assert list(write_shards(out, work, part=Part(2, 4))) == []
    assert unfinished_problem(str(out)) is None and read_index(out) is not None


def test_bad_rows_of_all_parts_are_counted_before_there_is_an_index(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 99)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"text": "cut\n')
    work, out = work_on(tmp_path / "rows.jsonl"), tmp_path / "out"

    def write(number: int, share: float) -> None:
        budget = BadRowBudget(out, source="rows", budget=share)
        list(write_shards(out, work, part=Part(number, 3), check=budget.count))

    write(3, 0.005)  # alone, it has too many
    write(1, 0.005)
    with pytest.raises(UserError, match=r"1 of the first 100 rows of 'rows'(.|\n)*3\d*-bad\.jsonl(.|\n)*line 100: not"):
        write(2, 0.005)
    assert read_index(out) is None
    write(2, 0.01)
    assert read_index(out) is not None


def test_folder_has_one_number_of_parts(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    work = work_on(tmp_path / "rows.jsonl")
    shards_in(tmp_path / "whole", work)
    before = contents(tmp_path / "whole")
    with pytest.raises(UserError, match="was begun without --part; go on without it, or give another folder"):
        write_part(tmp_path / "whole", work, 1, 2)
    assert contents(tmp_path / "whole") == before
    write_part(tmp_path / "out", work, 1, 2)
    for number, parts in ((1, 3), (1, 1)):
        with pytest.raises(UserError, match="was begun as 2 parts; go on with --part I/2, or give another folder"):
            write_part(tmp_path / "out", work, number, parts)
    for damaged in ("[[0", "[]", '{"a": 1}', '[[0, "1", 2], [1, 0, 0], [2, 0, 0]]'):
        (tmp_path / "out" / "parts.json").write_text(damaged)
        with pytest.raises(UserError, match=r"parts\.json' is damaged; remove "):
            write_part(tmp_path / "out", work, 1, 2)
        assert r"parts.json' is damaged; remove " in str(unfinished_problem(str(tmp_path / "out")))


def test_file_that_changes_while_a_part_reads_it_stops_the_part(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    work = work_on(tmp_path / "rows.jsonl")
    write_rows(tmp_path / "rows.jsonl", 60, name="document")
    with pytest.raises(UserError, match=r"rows\.jsonl' changed while it was read; start again"):
        write_part(tmp_path / "out", work, 2, 2)
    assert not shard_path(tmp_path / "out", 2_000_000).exists()


def test_folder_without_parts_has_the_format_of_earlier_versions(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    shards = shards_in(tmp_path / "out", work_on(tmp_path / "rows.jsonl"))
    assert len(shards) > 1 and [shard.number for shard in shards] == list(range(len(shards)))
    said = state(tmp_path / "out", work_on(tmp_path / "rows.jsonl"))
    assert said == [f"begun without --part: {len(shards)} shards, whole"]
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert all(
        "number" not in shard for shard in (*index["shards"], json.loads(shard_path(tmp_path / "out", 1).read_text()))
    )
    assert list(index_of(tmp_path / "out").shards) == shards


@pytest.mark.parametrize("kind", [TRAIN, VALIDATION, DOCUMENTS])
def test_rotten_tokens_of_another_part_are_not_taken_over(tmp_path: Path, kind: str) -> None:
    write_rows(tmp_path / "rows.jsonl", 900)
    work, folder = work_on(tmp_path / "rows.jsonl"), tmp_path / "out"
    write_part(folder, work, 1, 2)
    file = array_path(folder, 1_000_001, kind)
    rotten = bytearray(file.read_bytes())
    rotten[-4:] = bytes(byte ^ 1 for byte in rotten[-4:])
    file.write_bytes(rotten)
    with pytest.raises(UserError, match=rf"part 1/2 in .* is damaged: .*{kind}.* make it again with --part 1/2"):
        write_part(folder, work, 2, 2)
    assert read_index(folder) is None
    list(write_shards(tmp_path / "alone", work))
    write_part(folder, work, 1, 2)
    assert everything(folder) == everything(tmp_path / "alone")
