"""How a source goes on when the length, the shares or the window change: every token once per epoch."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest

from recipes.data.history import (
    Continuation,
    History,
    Segment,
    Window,
    beginning,
    consumed_tokens,
    from_json,
    joined,
    readings,
    to_json,
)
from recipes.data.order import SequenceOrder
from recipes.data.sequences import Quarantine, Sequences, Source
from recipes.data.tokens.shards import Shards
from tests.processes import PATIENCE
from tests.recipes.data.test_open_data import batches
from tests.recipes.data.texts import shards_in, work_on, write_rows


def inputs_of(position: Continuation, count: int, *, total: int | None) -> list[int]:
    """Where in the source the inputs of the first `count` sequences are."""
    found = [
        token
        for pieces in position.pieces(np.arange(count), total=total)
        for start, length in pieces
        for token in range(start, start + length)
    ]
    assert len(found) == count * position.fresh.sequence_length
    return found


def rest_of_unit(position: Continuation, after: int, *, total: int) -> tuple[list[int], int]:
    """The inputs that are left of the window or epoch being read, and where the fresh part begins after them."""
    position = position.then(1, None, after=after, total=total)
    return inputs_of(position, position.joined, total=total), position.fresh.origin


@pytest.mark.parametrize("seed", range(12))
def test_every_token_is_an_input_once_per_epoch_whatever_the_lengths_and_windows(seed: int) -> None:
    draw = random.Random(seed)
    total = draw.choice([3, 7, 50, 103, 1000, 997])
    inputs: list[int] = []
    position, count = None, 0
    for _ in range(draw.randint(1, 8)):
        length = draw.choice([1, 2, 3, 5, 8, 10, 16, 40, 64])
        window = draw.choice([None, Window(draw.choice([1, 10, 40, 100]), draw.random() < 0.5)])
        position = (
            position.then(length, window, after=count, total=total)
            if position
            else beginning(length, window, seed=seed)
        )
        count = draw.choice([1, 2, 3, 5, 11, 30])
        inputs += inputs_of(position, count, total=total)
    assert position is not None
    left, end = rest_of_unit(position, count, total=total)
    seen = np.bincount(np.array(inputs + left) % total, minlength=total)
    epochs, rest = divmod(end, total)
    assert (seen[:rest] == epochs + 1).all() and (seen[rest:] == epochs).all()


def test_a_window_that_is_not_known_whole_gives_the_same_positions() -> None:
    """What a run does while its text is tokenized equals what it does once the length of the text is known."""
    window = Window(40, every_epoch=False)
    found = []
    for total in (None, 4000):
        position = beginning(8, window, seed=1).then(20, window, after=7, total=total)
        position = position.then(4, window, after=3, total=total)
        found.append((inputs_of(position, 30, total=total), [position.needs(number) for number in range(30)]))
    assert found[0] == found[1]


def test_sources_below_a_window_and_below_a_sequence_are_read_whole() -> None:
    position = beginning(4, Window(100, every_epoch=True), seed=0)
    position = position.then(64, Window(100, every_epoch=True), after=2, total=10)
    seen = np.bincount(np.array(inputs_of(position, 10, total=10)) % 10, minlength=10)
    assert seen.min() >= 63 and seen.max() <= 65


def test_what_a_longer_length_joins_is_at_most_a_window() -> None:
    window = Window(40, every_epoch=True)
    position = beginning(4, window, seed=0).then(16, window, after=1, total=10_000)
    assert (position.joined, position.fresh.origin) == (3, 40 + 3 * 16 - 36)
    assert all(len(pieces) == 1 for pieces in position.pieces(np.arange(3, 500), total=10_000))


def test_an_unchanged_length_has_the_order_that_it_always_had() -> None:
    order = SequenceOrder(10, 5, 4)
    position = beginning(10, Window(40, every_epoch=False), seed=5)
    numbers = np.arange(200)
    starts = [pieces[0][0] for pieces in position.pieces(numbers, total=703)]
    assert starts == order.starts(numbers, total=703).tolist()
    assert [position.needs(number) for number in (0, 5)] == [order.needs(0), order.needs(5)]


# ------------------------------------------------------------------------------------------------------------ segments


def test_neighbours_with_equal_sources_and_lengths_are_one_segment() -> None:
    one, other = Segment({"a": 1.0, "b": 2.0}, 8, 5), Segment({"b": 2.0, "a": 1.0}, 8, 3)
    assert joined([one, one]) == (Segment(one.sources, 8, 10),)
    assert joined([one, other]) == (one, other)  # the order of the sources is the order of the sequences
    assert joined([one, Segment({"a": 1.0}, 8, 0)]) == (one,)
    assert joined([one, Segment(one.sources, 16, 1)])[1].sequence_length == 16


def test_a_source_at_one_length_has_one_reading_through_changed_shares() -> None:
    history = (Segment({"a": 1.0}, 8, 5), Segment({"a": 1.0, "b": 1.0}, 8, 4), Segment({"b": 1.0}, 16, 3))
    assert [tuple(one) for one in readings(history, "a")] == [(8, None, 7)]
    assert [tuple(one) for one in readings(history, "b")] == [(8, None, 2), (16, None, 3)]
    assert consumed_tokens(history) == {"a": 56, "b": 64}


def test_a_history_survives_json() -> None:
    history = (Segment({"a": 0.3, "b": 1.0}, 8, 5, {"a": Window(64, every_epoch=True)}), Segment({"b": 1.0}, 16, 3))
    assert from_json(to_json(history)) == history
    for wrong in ([{}], "x", [{**to_json(history)[0], "sequence_length": 0}]):
        with pytest.raises(ValueError, match="validation error"):
            from_json(wrong)


# ------------------------------------------------------------------------------------------------------------- batches


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three small sources, tokenized."""
    place = tmp_path_factory.mktemp("sources")
    found = {}
    for name, rows in (("a", 40), ("b", 7), ("c", 90)):
        path = place / f"{name}.jsonl"
        write_rows(path, rows, name=name)
        found[name] = place / name
        shards_in(found[name], work_on(path))
    return found


def opened(folders: dict[str, Path], segment: Segment) -> Sequences:
    sources = []
    for name in segment.sources:
        window = segment.windows.get(name)
        size = max(1, window.tokens // segment.sequence_length) if window else None
        order = SequenceOrder(segment.sequence_length, 3, size, every_epoch=bool(window and window.every_epoch))
        sources.append(Source(name, Shards(folders[name]), order))
    return Sequences(sources, [*segment.sources.values()])


def random_plan(draw: random.Random) -> list[tuple[Segment, int, int]]:
    """Segments with the size of a batch and the number of batches of each; sources leave and come back."""
    plan = []
    for _ in range(draw.randint(2, 6)):
        names = draw.sample(["a", "b", "c"], draw.randint(1, 3))
        length = draw.choice([8, 24, 32, 100])
        windows = {name: Window(length * draw.choice([1, 4, 30]), draw.random() < 0.5) for name in names[1:]}
        shares = {name: draw.choice([1.0, 0.3, 2.0]) for name in names}
        plan.append((Segment(shares, length, 0, windows), draw.choice([60, 120]), draw.randint(1, 3)))
    return plan


def documents_of(sequences: Sequences, numbers: range) -> list[Any]:
    return [piece for number in numbers for piece in sequences.pieces(number)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_documents_of_random_stages_are_read_once_per_epoch_on_any_number_of_processes(
    seed: int, folders: dict[str, Path]
) -> None:
    draw = random.Random(seed)
    history: History = ()
    times: dict[str, np.ndarray] = {name: np.zeros(Shards(folder).tokens, int) for name, folder in folders.items()}
    step = 0
    for segment, size, count in random_plan(draw):
        alone = opened(folders, segment)
        first = alone.continue_after(history)
        ranks = draw.choice([1, 2, 3, 4, 5])
        shares = [batches(opened(folders, segment), size=size, rank=rank, ranks=ranks) for rank in range(ranks)]
        for share in shares:
            share.begin(step, share.sequences.continue_after(history))
        for batch in range(count):
            rows = [row for share in shares for inputs, _, _ in share.take(step + batch) for row in inputs.tolist()]
            numbers = range(first + batch * size, first + (batch + 1) * size)
            assert rows == [inputs_in(alone, number, times) for number in numbers]
        for share in shares:
            share.close()
        step += count
        history = alone.history(first + count * size)
        consumed = consumed_tokens(history)
        assert {name: int(seen.sum()) for name, seen in times.items() if seen.any()} == consumed
    for name, seen in times.items():
        if name in consumed:
            left = rest_of_source(opened(folders, Segment({name: 1.0}, 1, 0)), history, name, len(seen))
            np.add.at(seen, left, 1)
            assert seen.max() - seen.min() <= 1


def inputs_in(sequences: Sequences, number: int, times: dict[str, np.ndarray]) -> list[int]:
    """The input tokens of a sequence, counted in `times`."""
    (place,), own = sequences._places(np.array([number]))
    source = sequences.sources[place]
    (pieces,) = source.position.pieces(own, total=source.tokens)
    row: list[int] = []
    for start, length in pieces:
        out = np.empty(length, dtype=np.int64)
        source.shards.read(start, out)
        row += out.tolist()
        np.add.at(times[source.name], np.arange(start, start + length) % len(times[source.name]), 1)
    return row


def rest_of_source(sequences: Sequences, history: History, name: str, total: int) -> np.ndarray:
    """Where the tokens are that are left of the window or epoch being read."""
    sequences.continue_after(history)
    position = sequences.sources[0].position
    return np.array(inputs_of(position, position.joined, total=total), dtype=np.int64) % total


def test_a_source_goes_on_where_it_was_when_only_shares_and_batches_change(folders: dict[str, Path]) -> None:
    alone = opened(folders, Segment({"c": 1.0}, 16, 0))
    expected = [piece for number in range(60) for piece in alone.pieces(number)]
    mixed = opened(folders, Segment({"a": 1.0, "c": 3.0}, 16, 0))
    mixed.continue_after((Segment({"c": 1.0}, 16, 30),))
    found = [piece for number in range(40) for piece in mixed.pieces(number) if piece.source == "c"]
    assert found == expected[-len(found) :]
    assert mixed.epochs(40)["c"] == 60 * 16 / Shards(folders["c"]).tokens


def test_checksums_at_a_border_are_the_same_for_both_stages(folders: dict[str, Path]) -> None:
    window = {"c": Window(64, every_epoch=True)}
    before = opened(folders, Segment({"c": 1.0, "a": 1.0}, 16, 0, window))
    after = opened(folders, Segment({"c": 1.0}, 32, 0, window))
    after.continue_after(before.history(30))
    assert after.checksums(0)["c"] == before.checksums(30)["c"]
    assert after.checksums(4)["c"] != before.checksums(30)["c"]
    new = opened(folders, Segment({"b": 1.0}, 32, 0))
    new.continue_after(before.history(30))
    assert new.checksums(0) == {}  # nothing was read of it


def test_text_that_is_still_tokenized_goes_on_at_another_length(tmp_path: Path) -> None:
    """Positions wait for what earlier lengths read, and are those of the complete source."""
    source = tmp_path / "text.jsonl"
    write_rows(source, 120, name="line")
    shards = shards_in(tmp_path / "whole", work_on(source))
    window = {"x": Window(400, every_epoch=True)}
    history = (Segment({"x": 1.0}, 20, 35, window),)
    segment = Segment({"x": 1.0}, 50, 0, window)
    whole = opened({"x": tmp_path / "whole"}, segment)
    whole.continue_after(history)
    growing = tmp_path / "growing"
    growing.mkdir()
    part = opened({"x": growing}, segment)
    part.continue_after(history)
    with ThreadPoolExecutor(1) as thread:
        rows = thread.submit(lambda: (part.require(0, 4), part.rows(0, 4))[1])
        for number in range(len(shards)):
            assert number > 1 or not rows.done()  # 700 tokens were read, and the window ends at 800
            for file in (tmp_path / "whole").glob(f"{number:05d}*"):
                (growing / file.name).symlink_to(file)
            sleep(0.2)
        assert (rows.result(PATIENCE) == whole.rows(0, 4)).all()


def test_bad_rows_of_sources_that_earlier_stages_read_stay_listed(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "quarantine.jsonl"
    lines = [json.dumps({"source": name, "file": "x", "row": 1, "reason": "empty"}) for name in ("old", "a")]
    file.write_text("\n".join([*lines, '{"source": "ol']))  # a kill left half a line
    assert Quarantine(file).note(opened(folders, Segment({"a": 1.0}, 8, 0)).sources) == 1
    assert file.read_text() == f"{lines[0]}\n"
