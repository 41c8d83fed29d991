"""From the [data] section to batches: the same tokens in the same order for any process at any time."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from parallel.errors import TemporaryError, UserError
from recipes.data.batches import Batches
from recipes.data.config import BatchConfig, DataConfig
from recipes.data.open_data import Data, DataSettings, Launch, open_data
from recipes.data.pair_sequences import Pairing
from recipes.data.sequences import Piece, Quarantine, Sequences, Source
from recipes.data.text.pair_format import PairFormat
from recipes.data.tokens.background import Background
from recipes.data.tokens.prepare import write_shards
from recipes.data.tokens.shards import array_path, problem_path, read_index, shard_path
from tests.processes import PATIENCE, process_context, wait_for
from tests.recipes.data.text.test_hub import c4, tiny_stories
from tests.recipes.data.texts import SMALL, shards_in, tokenizer_for, work_on, write_rows

LENGTH, BATCH = 32, 12


def opened(cache: Path, mixture: Mapping[str, float], **changes: Any) -> Data:
    section = DataConfig(mixture=dict(mixture), validation_fraction=0.2, shuffle_tokens=5000, cache=str(cache))
    launch = Launch(run="this", writes=True, log=lambda line: None, pieces=SMALL)
    length, tokenizer = changes.pop("sequence_length", LENGTH), changes.pop("tokenizer", "train:300")
    resumed = changes.pop("resumed_data_state", {})
    section, launch = (
        replace(one, **{field.name: changes.pop(field.name) for field in fields(one) if field.name in changes})
        for one in (section, launch)
    )
    settings = DataSettings(section, BatchConfig(sequence_length=length), 3, lambda: tokenizer, **changes)
    return open_data(settings, launch, resumed_data_state=resumed)


def batches(
    sequences: Sequences, *, rank: int = 0, ranks: int = 1, mask: int | None = None, size: int = BATCH
) -> Batches:
    return Batches(
        sequences,
        global_batch_size=size,
        micro_batch_size=1,
        data_rank=rank,
        data_ranks=ranks,
        end_of_document=mask,
        device=torch.device("cpu"),
    )


# ------------------------------------------------------------------------------------------- exactly once, any world


def as_text(folder: Path) -> Path:
    path = folder / "plain.txt"
    path.write_text("\n\n".join(f"Chapter {n}. " + "It goes on for a while. " * 90 for n in range(12)))
    return path


def as_parquet(folder: Path) -> Path:
    texts = write_rows(folder / "for_parquet.jsonl", 300, name="Column")
    table = pyarrow.table({"id": range(300), "text": texts})
    pyarrow.parquet.write_table(table, folder / "table.parquet", row_group_size=50)
    return folder / "table.parquet"


def as_lines(folder: Path) -> Path:
    write_rows(folder / "lines.jsonl", 300, name="Line")
    return folder / "lines.jsonl"


def as_compressed(folder: Path, compression: str, suffix: str) -> Path:
    write_rows(folder / f"for_{compression}.jsonl", 300, name=compression)
    path = folder / f"lines.jsonl.{suffix}"
    with pyarrow.output_stream(str(path), compression=compression) as out:
        out.write((folder / f"for_{compression}.jsonl").read_bytes())
    return path


def as_folder(folder: Path) -> Path:
    for number in range(3):
        (folder / "many" / str(number)).mkdir(parents=True)
        write_rows(folder / "many" / str(number) / "part.jsonl", 100, name=f"Part {number}")
    return folder / "many"


def as_glob(folder: Path) -> str:
    for number in range(3):
        write_rows(folder / f"piece-{number}.jsonl", 100, name=f"Piece {number}")
    return str(folder / "piece-*.jsonl")


def as_prepared(folder: Path) -> Path:
    write_rows(folder / "for_shards.jsonl", 300, name="Shard")
    work = work_on(folder / "for_shards.jsonl", fraction=0.2, tokenizer=tokenizer_for(folder / "for_shards.jsonl"))
    shards_in(folder / "shards", work)
    return folder / "shards"


def as_c4(folder: Path) -> str:
    return f"hf:{c4(folder / 'c4')}:en"


def as_tiny_stories(folder: Path) -> str:
    return f"hf:{tiny_stories(folder / 'stories')}"


KINDS: dict[str, Callable[[Path], Path | str]] = {
    "hub, JSON": as_c4,
    "hub, parquet": as_tiny_stories,
    "text": as_text,
    "parquet": as_parquet,
    "lines": as_lines,
    "prepared": as_prepared,
    "gzip": partial(as_compressed, compression="gzip", suffix="gz"),
    "zstd": partial(as_compressed, compression="zstd", suffix="zst"),
    "folder": as_folder,
    "glob": as_glob,
}
MIXTURES = (
    ["lines"],
    ["lines", "parquet", "prepared"],
    ["text", "hub, parquet", "hub, JSON"],
    ["gzip", "folder"],
    ["zstd", "glob"],
)


def mixture_of(kinds: list[str], folder: Path) -> tuple[dict[str, float], str]:
    """Sources with their shares, and the tokenizer for them."""
    sources = [KINDS[kind](folder) for kind in kinds]
    tokenizer = str(folder / "shards" / "tokenizer.json") if "prepared" in kinds else "train:300"
    return {str(source): 1.0 + index for index, source in enumerate(sources)}, tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("kinds", MIXTURES)
def test_changing_numbers_of_processes_read_what_one_process_reads(tmp_path: Path, kinds: list[str]) -> None:
    mixture, tokenizer = mixture_of(kinds, tmp_path)
    steps = 150  # beyond the first epoch of each source
    data = opened(tmp_path / "whole", mixture, tokenizer=tokenizer)
    end = data.tokenizer.end_of_document
    reader = batches(data.training, mask=end)
    expected = [reader.take(step) for step in range(steps)]
    order = [list(data.training.pieces(number)) for number in range(steps * BATCH)]
    assert all(times and times > 1 for times in data.training.epochs(steps * BATCH).values())
    reader.close()

    begin = 0
    for world, until in ((2, 20), (4, 64), (3, steps)):
        # Every process opens the data anew, as after a restart; the first alone writes.
        opened_by = [
            opened(tmp_path / "elastic", mixture, tokenizer=tokenizer, writes=rank == 0) for rank in range(world)
        ]
        readers = [batches(own.training, rank=rank, ranks=world, mask=end) for rank, own in enumerate(opened_by)]
        for step in range(begin, until):
            parts = [part for reader in readers for part in reader.take(step)]
            for (inputs, targets, documents), (inputs_then, targets_then, documents_then) in zip(
                parts, expected[step], strict=True
            ):
                assert torch.equal(inputs, inputs_then)
                assert torch.equal(targets, targets_then)
                assert torch.equal(documents.positions, documents_then.positions)
            own = [list(opened_by[-1].training.pieces(step * BATCH + index)) for index in range(BATCH)]
            assert own == order[step * BATCH : (step + 1) * BATCH]
        begin = until
        for reader in readers:
            reader.close()


def inputs_of(data: Data, pieces: list[Piece]) -> int:
    return sum(piece.end - piece.begin for piece in pieces)


@pytest.mark.slow
def test_held_out_documents_are_never_trained_on(tmp_path: Path) -> None:
    mixture, _ = mixture_of(["lines", "parquet"], tmp_path)
    data = opened(tmp_path / "cache", mixture)
    reader = batches(data.training)
    trained = set()
    for step in range(60):
        for inputs, _, _ in reader.take(step):
            trained.update(data.tokenizer.decode(inputs.flatten().tolist()).split("<|endoftext|>")[1:-1])
    held_out = set()
    for number in range(data.validation[""].available):
        rows = data.validation[""].rows(number, 1)[0]
        held_out.update(data.tokenizer.decode(rows.tolist()).split("<|endoftext|>")[1:-1])
    assert len(trained) > 250
    assert len(held_out) > 5
    assert not trained & held_out
    reader.close()


@pytest.mark.slow
def test_held_out_text_is_read_once(tmp_path: Path) -> None:
    data = opened(tmp_path / "cache", {str(as_lines(tmp_path)): 1.0}, shuffle_tokens=10**6)
    available = data.validation[""].available
    (source,) = data.validation[""].sources
    assert available == (source.shards.tokens - 1) // LENGTH
    reader = batches(data.validation[""])
    rows = [
        (inputs, targets) for batch in range(-(-available // BATCH)) for inputs, targets, _ in reader.take_once(batch)
    ]
    counted = [bool((targets != -100).all()) for _, targets in rows]
    assert counted == [True] * available + [False] * (len(rows) - available)
    assert all((targets == -100).all() for _, targets in rows[available:])
    everything = np.empty(available * LENGTH, dtype=np.int64)
    source.shards.read(0, everything)
    assert sorted(torch.cat([inputs.flatten() for inputs, _ in rows[:available]]).tolist()) == sorted(everything)
    reader.close()
    data.training.close()


def test_prepared_shards_are_shuffled_as_a_whole_and_read_from_anywhere(tmp_path: Path) -> None:
    mixture, tokenizer = mixture_of(["prepared"], tmp_path)
    data = opened(tmp_path / "cache", mixture, tokenizer=tokenizer)
    (source,) = data.training.sources
    starts = source.order.starts(np.arange(40), total=source.tokens)
    assert starts.max() > source.shards.tokens * 0.9
    far = data.training.rows(10**9, 3)
    assert far.shape == (3, LENGTH + 1)
    assert far.max() < data.tokenizer.vocabulary


# -------------------------------------------------------------------------------------------------- while it is written


@pytest.mark.slow
def test_training_starts_before_the_source_is_tokenized_and_waits_for_the_rest(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 4000)
    work = work_on(tmp_path / "rows.jsonl", fraction=0.2)
    reports: list[str] = []
    data = opened(tmp_path / "cache", {str(tmp_path / "rows.jsonl"): 1.0}, tokenizer=work.tokenizer, log=reports.append)
    folder = tmp_path / "cache" / "tokens" / work.fingerprint
    (source,) = data.training.sources
    assert source.tokens is None
    assert reports[-1].endswith("; the rest follows while the model trains")
    follower = opened(tmp_path / "cache", {str(tmp_path / "rows.jsonl"): 1.0}, tokenizer=work.tokenizer, writes=False)
    time.sleep(0.5)  # there is time to tokenize too much
    early = follower.training.sources[0].shards
    early.refresh()
    assert early.tokens < 2 * 5000 + 4000 + 2000  # the window, one ahead, and the shard in which that ends
    readers = [batches(data.training, ranks=2), batches(follower.training, rank=1, ranks=2)]
    for step in range(60):
        for reader in readers:
            reader.take(step)
    source.require(10**6)
    assert source.tokens is not None
    wait_for("the index", lambda: read_index(folder) is not None)
    for reader in readers:
        reader.close()


@pytest.mark.slow
def test_held_out_text_does_not_depend_on_how_much_is_tokenized(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 2000)
    source = {str(tmp_path / "rows.jsonl"): 1.0}
    first = opened(tmp_path / "cache", source)
    rows = first.validation[""].rows(0, first.validation[""].available)
    first.training.sources[0].require(10**6)
    first.training.close()
    second = opened(tmp_path / "cache", source)
    assert np.array_equal(second.validation[""].rows(0, second.validation[""].available), rows)


@pytest.mark.slow
def test_opening_data_again_tokenizes_nothing(tmp_path: Path) -> None:
    source = {str(as_lines(tmp_path)): 1.0}
    first = opened(tmp_path / "cache", source, shuffle_tokens=10**6)
    first.training.close()
    reports: list[str] = []
    second = opened(tmp_path / "cache", source, log=reports.append)
    assert second.data_state == first.data_state
    assert [line.partition(" in ")[0] for line in reports] == ["tokens found"]
    assert second.training.sources[0].background is None


@pytest.mark.slow
def test_tokenizing_process_ends_with_its_parent(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 4000)
    context = process_context()
    pid = context.Queue()
    parent = context.Process(target=_open_and_wait, args=(tmp_path, pid))
    parent.start()
    child = pid.get(timeout=PATIENCE)
    os.kill(child, 0)  # it exists
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    wait_for("the end of the child", lambda: has_ended(child))


def has_ended(process: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True


def _open_and_wait(folder: Path, pid: Any) -> None:
    data = opened(folder / "cache", {str(folder / "rows.jsonl"): 1.0})
    background = data.training.sources[0].background
    assert background is not None
    pid.put(background._process.pid)
    threading.Event().wait()


def kill_each_time(background: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the process that tokenizes now, and whenever it is started again."""
    monkeypatch.setattr("recipes.data.tokens.background.SECONDS_BEFORE_TRIES", (0.0,) * 3)
    check = background.check

    def kill(**needed: bool) -> None:
        background._process.kill()
        background._process.join()
        check(**needed)

    monkeypatch.setattr(background, "check", kill)


@pytest.mark.slow
def test_all_processes_notice_when_the_tokenizing_process_keeps_dying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows.jsonl", 4000)
    source = {str(tmp_path / "rows.jsonl"): 1.0}
    data = opened(tmp_path / "cache", source)
    follower = opened(tmp_path / "cache", source, writes=False)
    background = data.training.sources[0].background
    assert background is not None
    kill_each_time(background, monkeypatch)
    for own in (data, follower):
        with pytest.raises(TemporaryError, match=r"the process that tokenizes .* ended early 4 times, .* SIGKILL"):
            own.training.sources[0].require(10**6)
    again = opened(tmp_path / "cache", source)
    again.training.sources[0].require(10**6)
    again.training.close()


# ------------------------------------------------------------------------------------------------------------ bad rows


def spoil(path: Path, lines: list[int]) -> None:
    rows = path.read_text().splitlines()
    for line in lines:
        rows[line - 1] = '{"text": "cut off'
    path.write_text("\n".join(rows) + "\n")


@pytest.mark.slow
def test_unreadable_file_is_tried_again_by_another_run(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b", "c"):
        write_rows(tmp_path / "in" / f"{name}.jsonl", 100, name=name)
    source, tokenizer = {str(tmp_path / "in"): 1.0}, tokenizer_for(tmp_path / "in" / "a.jsonl")
    work = work_on(tmp_path / "in", tokenizer=tokenizer)
    folder = tmp_path / "cache" / "tokens" / work.fingerprint
    shards = write_shards(folder, work)
    next(shards)
    (tmp_path / "in" / "c.jsonl").rename(tmp_path / "c.jsonl")  # removed before it is read
    assert list(shards)[-1].unread
    with pytest.raises(UserError, match=r"files of .* appeared or disappeared just now; start again"):
        list(write_shards(tmp_path / "other", work))
    (tmp_path / "c.jsonl").rename(tmp_path / "in" / "c.jsonl")
    options: dict[str, Any] = {"tokenizer": tokenizer, "bad_row_budget": 0.9}
    renewed = f"{work.fingerprint}-1"
    for used, count in ((work.fingerprint, 200), ("", 300), (work.fingerprint, 200), ("", 300), (renewed, 300)):
        # What a run was trained on stays as it was, whatever other runs of the same source find.
        before = {"sources": {str(tmp_path / "in"): {"tokens": used}}} if used else {}
        data = opened(tmp_path / "cache", source, resumed_data_state=before, **options)
        data.training.sources[0].require(10**6)
        found = data.training.sources[0].shards.shards
        assert sum(shard.documents + shard.held_out for shard in found) == count
        assert any(shard.bad for shard in found) == (count == 200)
        assert data.data_state["sources"][str(tmp_path / "in")]["tokens"] == (used or renewed)
        follower = opened(tmp_path / "cache", source, resumed_data_state=data.data_state, writes=False, **options)
        assert follower.data_state == data.data_state
        data.training.close()
    folders = sorted((tmp_path / "cache" / "tokens").iterdir())
    assert [path.name for path in folders] == [work.fingerprint, f"{work.fingerprint}-1"]
    assert len({array_path(path, 0, "train").stat().st_ino for path in folders}) == 1  # not made again


@pytest.mark.slow
def test_broken_file_counts_as_all_its_rows_in_the_budget(tmp_path: Path) -> None:
    """Nine of ten files are cut off. Counted as nine bad rows among a thousand, that would look like a small loss."""
    (tmp_path / "in").mkdir()
    for number in range(10):
        file = tmp_path / "in" / f"{number}.parquet"
        texts = [f"{number} {row} " + "word " * 300 for row in range(100)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, compression="none")
        if number:
            file.write_bytes(file.read_bytes()[:-200])
    data = opened(tmp_path / "cache", {str(tmp_path / "in"): 1.0}, bad_row_budget=0.2)
    with pytest.raises(UserError, match=r"data.bad_row_budget: \d+ of the first \d+ rows"):
        data.training.sources[0].require(10**6)
    data.training.close()


def test_process_that_sees_different_text_than_rank_0_is_refused_at_once(rows: Path, tmp_path: Path) -> None:
    facts = {"sources": {str(rows): {"tokens": "those of rank 0"}}}
    with pytest.raises(UserError, match=r"sees different text in .*rows.jsonl', or another tokenizer, than rank 0"):
        opened(tmp_path / "cache", {str(rows): 1.0}, resumed_data_state=facts, writes=False)


@pytest.mark.slow
def test_processes_that_do_not_look_read_the_same_tokens_without_the_text(rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    list(write_shards(folder, work := work_on(rows)))
    for source in (rows, folder):
        first = opened(tmp_path / "cache", {str(source): 1.0}, tokenizer=work.tokenizer)
        first.training.require(0, 50)
        tokens = first.training.rows(0, 50)
        first.training.close()
        if source == rows:
            rows.unlink()
        quiet = {"writes": False, "looks": False, "resumed_data_state": first.data_state}
        follower = opened(tmp_path / "cache", {str(source): 1.0}, tokenizer=work.tokenizer, **quiet)
        follower.training.require(0, 50)
        assert follower.data_state == first.data_state and (follower.training.rows(0, 50) == tokens).all()


def test_fingerprint_of_an_index_depends_on_what_unreadable_files_left_out(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 100)
    work = work_on(tmp_path / "rows.jsonl")
    list(write_shards(tmp_path / "out", work))
    index = read_index(tmp_path / "out")
    assert index is not None and index.fingerprint == work.fingerprint
    without = [
        replace(index, shards=(replace(index.shards[0], unread=True, checksums={"train": sum}), *index.shards[1:]))
        for sum in ("a", "b")
    ]
    assert len({index.fingerprint, *(other.fingerprint for other in without)}) == 3


@pytest.mark.slow
def test_tokenizing_stays_a_bounded_amount_ahead_after_a_resume(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 6000)
    tokenizer = tokenizer_for(tmp_path / "rows.jsonl")
    there = []
    for _ in range(3):
        data = opened(tmp_path / "cache", {str(tmp_path / "rows.jsonl"): 1.0}, tokenizer=tokenizer)
        (source,) = data.training.sources
        wait_for("the tokens that are wanted", partial(has_wanted, source))
        time.sleep(0.5)  # there is time to tokenize too much
        data.training.close()
        source.shards.refresh()
        there.append(source.shards.tokens)
    assert there[0] < 2 * 5000 + 2 * 4000
    assert there[0] == there[1] == there[2]


def has_wanted(source: Source) -> bool:
    source.shards.refresh()
    return source.background is not None and source.shards.tokens >= source.background._wanted.value


@pytest.mark.slow
def test_small_sources_of_a_mixture_repeat_in_validation(tmp_path: Path) -> None:
    write_rows(tmp_path / "large.jsonl", 600, name="Large")
    write_rows(tmp_path / "small.jsonl", 60, name="Small")
    mixture = {str(tmp_path / "large.jsonl"): 0.9, str(tmp_path / "small.jsonl"): 0.1}
    data = opened(tmp_path / "cache", mixture, shuffle_tokens=10**6)
    large, small = (source.sequences for source in data.validation[""].sources)
    assert large > 5 * small > 0
    consumed = data.validation[""].mixture.consumed(data.validation[""].available)
    assert consumed[0] >= large and consumed[1] >= small
    data.training.close()


@pytest.mark.slow
def test_run_stops_beyond_the_bad_row_budget_at_the_same_step_on_any_number_of_processes(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 2000)
    spoil(tmp_path / "rows.jsonl", [5, *range(1500, 1700)])
    source = {str(tmp_path / "rows.jsonl"): 1.0}
    steps = []
    for ranks in (1, 2):
        data = opened(tmp_path / f"cache{ranks}", source, bad_row_budget=0.05)
        reader = batches(data.training, rank=ranks - 1, ranks=ranks)
        with pytest.raises(UserError) as caught:
            for step in range(10_000):
                steps.append(step)
                reader.take(step)
        assert "rows.jsonl' hold no usable text, a share of" in str(caught.value)
        assert "more than 0.05; repair the source or raise the budget. All of them are listed in '" in str(caught.value)
        assert f"{tmp_path / 'rows.jsonl'}, line 5: " in str(caught.value)
        listed = Path(str(caught.value).split("listed in '")[1].split("'")[0])
        assert json.loads(listed.read_text().splitlines()[0])["row"] == 5
        reader.close()
    assert steps[: len(steps) // 2] == steps[len(steps) // 2 :]  # at the same step
    assert len(steps) // 2 > 20


@pytest.mark.slow
def test_quarantine_lists_each_bad_row_of_used_text_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 2000)
    spoil(tmp_path / "rows.jsonl", [5, *range(1500, 1700)])
    source = {str(tmp_path / "rows.jsonl"): 1.0}
    quarantine = Quarantine(tmp_path / "quarantine.jsonl")
    generous = opened(tmp_path / "cache", source, bad_row_budget=0.2)
    assert quarantine.note(generous.training.sources) == 1
    (line,) = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (row["source"], row["file"], row["row"]) == (*source, str(tmp_path / "rows.jsonl"), 5)
    assert row["reason"].startswith("not JSON: ")
    generous.training.sources[0].require(10**6)
    assert quarantine.note(generous.training.sources) == quarantine.note(generous.training.sources) == 201
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 201
    assert Quarantine(tmp_path / "quarantine.jsonl").note(generous.training.sources) == 201  # a resumed run
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 201
    generous.training.close()


# -------------------------------------------------------------------------------------------------------- what is wrong


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Path]:
    write_rows(tmp_path / "rows.jsonl", 100)
    yield tmp_path / "rows.jsonl"


@pytest.mark.slow
def test_too_few_documents_for_the_held_out_share_names_a_share_that_works(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, 4)
    options: dict[str, Any] = {"mixture": {str(path): 1.0}, "sequence_length": 1}
    with pytest.raises(UserError, match=r"validation_fraction: of the 4 documents .* none would be held") as caught:
        opened(tmp_path / "cache", **options, validation_fraction=0.00001)
    needed = float(str(caught.value).split("write ")[1].split(" or more")[0])
    opened(tmp_path / "cache", **options, validation_fraction=needed)
    with pytest.raises(UserError, match=r"of the 4 documents .* all would be held out") as caught:
        opened(tmp_path / "cache", **options, validation_fraction=0.99999)
    allowed = float(str(caught.value).split("write ")[1].split(" or less")[0])
    opened(tmp_path / "cache", **options, validation_fraction=allowed)


@pytest.mark.slow
def test_documents_that_are_all_equal_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "always the same"}\n' * 3)
    with pytest.raises(UserError, match=r"of the 3 documents .* all would be held out with 0.5; write 0, or give"):
        opened(tmp_path / "cache", {str(tmp_path / "rows.jsonl"): 1.0}, sequence_length=1, validation_fraction=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "message"),
    [
        (100_000, "batch.sequence_length: the training text .* or give more text"),
        (800, r"the held-out text .* write at most \d+, or raise data.validation_fraction"),
    ],
)
def test_text_shorter_than_one_sequence_is_refused(length: int, message: str, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "cache", {str(rows): 1.0}, sequence_length=length)


def test_prepared_shards_that_do_not_match_the_recipe_are_refused(rows: Path, tmp_path: Path) -> None:
    work = work_on(rows, fraction=0.2)
    shards_in(tmp_path / "out", work)
    prepared = {str(tmp_path / "out"): 1.0}
    with pytest.raises(UserError, match=r"data.tokenizer: .*out' holds tokens of another tokenizer; write tokenizer"):
        opened(tmp_path / "cache", prepared, tokenizer=tokenizer_for(rows, entries=301))
    with pytest.raises(UserError, match=r"data.validation_fraction: .* was prepared with 0.2; write that, or prepare"):
        opened(tmp_path / "cache", prepared, tokenizer=work.tokenizer, validation_fraction=0.1)


def test_damaged_prepared_shards_are_refused(rows: Path, tmp_path: Path) -> None:
    work = work_on(rows, fraction=0.2)
    shards_in(tmp_path / "out", work)
    prepared = {str(tmp_path / "out"): 1.0}
    file = tmp_path / "out" / "00000-train.npy"
    file.write_bytes((content := file.read_bytes())[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"data.source: .*out' is damaged: 00000-train.npy does not have the checksum"):
        opened(tmp_path / "cache", prepared, tokenizer=work.tokenizer)
    file.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"data.source: .*out' is damaged: 00000-train.npy cannot be read"):
        opened(tmp_path / "cache", prepared, tokenizer=work.tokenizer)
    (tmp_path / "out" / "index.json").write_text("{}")
    with pytest.raises(UserError, match=r"index.json' is damaged or of another version"):
        opened(tmp_path / "cache", prepared, tokenizer=work.tokenizer)


def test_unwritable_cache_for_tokens_is_reported(rows: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_for(rows)
    (tmp_path / "cache" / "tokens").write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"data\.cache: cannot write below .*; give another folder"):
        opened(tmp_path / "cache", {str(rows): 1.0}, tokenizer=tokenizer)


@pytest.mark.slow
def test_source_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n' * 5)
    write_rows(tmp_path / "other.jsonl", 50)
    with pytest.raises(UserError, match=r"data\.source: .* holds no text: every document is empty; give another"):
        opened(
            tmp_path / "cache", {str(tmp_path / "rows.jsonl"): 1.0}, tokenizer=tokenizer_for(tmp_path / "other.jsonl")
        )


@pytest.mark.slow
def test_problem_of_the_tokenizing_process_reaches_waiting_processes(rows: Path, tmp_path: Path) -> None:
    data = opened(tmp_path / "cache", {str(rows): 1.0})
    folder = data.training.sources[0].shards.folder
    data.training.sources[0].require(10**6)
    background = data.training.sources[0].background
    assert background is not None
    background._process.join()  # it has written the index
    (folder / "index.json").unlink()
    last = json.loads(shard_path(folder, 0).read_text())
    assert last["documents"]
    for number in range(1, 100):
        shard_path(folder, number).unlink(missing_ok=True)
    follower = opened(tmp_path / "cache", {str(rows): 1.0}, writes=False, shuffle_tokens=500)
    problem_path(folder, "this").write_text("data.source: something happened")
    with pytest.raises(UserError, match="something happened"):
        follower.training.sources[0].require(10**6)


@pytest.mark.slow
def test_problem_of_another_run_does_not_stop_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", 4000)
    source = {str(tmp_path / "rows.jsonl"): 1.0}
    data = opened(tmp_path / "cache", source)
    follower = opened(tmp_path / "cache", source, writes=False)
    other = opened(tmp_path / "cache", source, run="other")
    background = other.training.sources[0].background
    assert background is not None
    kill_each_time(background, monkeypatch)
    with pytest.raises(TemporaryError, match="SIGKILL"):
        other.training.sources[0].require(10**6)
    # Before there is more than what the other run's process made: it looks for trouble then.
    follower.training.sources[0]._require_progress()
    data.training.sources[0].require(10**6)
    follower.training.sources[0].require(10**6)
    data.training.close()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["in/cache", "in/deep/cache"])
def test_cache_inside_the_source_is_refused_before_anything_is_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "rows.jsonl", 100)
    for source in (tmp_path / "in", tmp_path / "in" / "**", f"hf:{tmp_path / 'in'}"):
        with pytest.raises(UserError, match=r"data.cache: .* lies inside the source .* give a cache elsewhere"):
            opened(tmp_path / place, {str(source): 1.0})
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["rows.jsonl"]
    opened(tmp_path / "in" / ".cache", {str(tmp_path / "in"): 1.0}).training.close()  # hidden: no source reads it


@pytest.mark.slow
def test_a_run_on_chats_of_an_older_version_goes_on_with_its_tokens(tmp_path: Path) -> None:
    chats = ([{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}] for n in range(30))
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps({'messages': chat})}\n" for chat in chats))
    newer = PairFormat(messages="messages", template="{% for m in messages %}{{ m.content }};{% endfor %}", rules=2)
    pairing = {name: Pairing(replace(newer, rules=rules)) for name, rules in (("older", 0), ("newer", 2))}

    def tokens(version: str, **then: Any) -> dict[str, Any]:
        data = opened(tmp_path / "cache", {str(tmp_path / "chats.jsonl"): 1.0}, pairing=pairing[version], **then)
        (entry,) = data.data_state["sources"].values()
        return dict(entry)

    older = tokens("older")
    state = {"sources": {str(tmp_path / "chats.jsonl"): older}}
    assert tokens("newer", resumed_data_state=state) == older != tokens("newer")
