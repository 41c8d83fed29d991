"""Prepared tokens and the order in which training reads them."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from parallel.errors import UserError
from recipes.data import tokens
from recipes.data.rows import documents
from recipes.data.sources import STDLIB
from recipes.data.tokens import Prepared, TokenSequences, permuted, prepare


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, list[str]]:
    reports: list[str] = []
    prepared = prepare(
        source=STDLIB,
        text_field="text",
        tokenizer="train:4096",
        validation_fraction=0.02,
        cache=tmp_path_factory.mktemp("cache"),
        report=reports.append,
    )
    return prepared, reports


def write_rows(path: Path, count: int, start: int = 0) -> list[str]:
    texts = [f"Document number {number} says {number * 7919 % 1000} words." for number in range(start, start + count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def prepare_rows(
    path: Path, *, fraction: float = 0.2, tokenizer: str = "train:300", reports: list[str] | None = None
) -> Prepared:
    return prepare(
        source=str(path),
        text_field="text",
        tokenizer=tokenizer,
        validation_fraction=fraction,
        cache=path.parent / "cache",
        report=([] if reports is None else reports).append,
    )


def texts_of(prepared: Prepared, path: Path) -> list[str]:
    text = prepared.tokenizer.decode(np.load(path).tolist())
    assert text.endswith("<|endoftext|>")
    return text.removesuffix("<|endoftext|>").split("<|endoftext|>")


# ---------------------------------------------------------------------------------------------------------- preparing


def test_the_standard_library_is_prepared_whole(stdlib: tuple[Prepared, list[str]]) -> None:
    prepared, reports = stdlib
    train, held_out = texts_of(prepared, prepared.train), texts_of(prepared, prepared.validation)
    assert sorted(train + held_out) == sorted(documents(STDLIB, text_field="text"))
    assert not set(train) & set(held_out)
    assert np.load(prepared.train, mmap_mode="r").dtype == np.uint16
    assert len(reports) >= 2  # a slow machine tells of its progress in between
    assert reports[0].startswith("trained a tokenizer of 4096 entries on ")
    assert reports[-1].startswith("tokenized ")
    assert reports[-1].endswith(" of them held out")


def test_documents_are_split_by_content_alone(tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "rows.jsonl", 200)
    first = prepare_rows(tmp_path / "rows.jsonl")
    train, held_out = texts_of(first, first.train), texts_of(first, first.validation)
    assert [text for text in texts if text in set(train)] == train  # in the order of the corpus
    assert sorted(train + held_out) == sorted(texts)
    assert 20 < len(held_out) < 60
    more = write_rows(tmp_path / "more.jsonl", 300, start=-100)  # the same 200 and a hundred before them
    second = prepare_rows(tmp_path / "more.jsonl")
    assert set(texts_of(second, second.validation)) & set(texts) == set(held_out)
    wider = prepare_rows(tmp_path / "more.jsonl", fraction=0.4)
    assert set(texts_of(second, second.validation)) < set(texts_of(wider, wider.validation)) < set(more)


def test_a_second_call_does_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", 100)
    first = prepare_rows(tmp_path / "rows.jsonl")
    monkeypatch.setattr(tokens, "_tokenize", None)
    monkeypatch.setattr("recipes.tokenizer._train", None)
    reports: list[str] = []
    second = prepare_rows(tmp_path / "rows.jsonl", reports=reports)
    assert (second.train, second.validation, second.fingerprint) == (first.train, first.validation, first.fingerprint)
    assert reports == [f"tokens found in {first.train.parent}"]


def test_what_changes_the_tokens_changes_the_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, 100)
    fingerprints = {prepare_rows(path).fingerprint}
    fingerprints.add(prepare_rows(path, fraction=0.3).fingerprint)
    fingerprints.add(prepare_rows(path, tokenizer="train:301").fingerprint)
    write_rows(path, 101)
    fingerprints.add(prepare_rows(path).fingerprint)
    assert len(fingerprints) == 4


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("train.npy", cut),
        ("train.npy", flip),
        ("validation.npy", Path.unlink),
        ("index.json", cut),
        ("index.json", Path.unlink),
        ("index.json", lambda path: path.write_text("[]")),
        ("index.json", lambda path: path.write_text("{}")),
        ("index.json", lambda path: path.write_text('{"train.npy": {}}')),
    ],
)
def test_a_damaged_or_half_written_cache_is_made_again(
    tmp_path: Path, file: str, damage: Callable[[Path], object]
) -> None:
    write_rows(tmp_path / "rows.jsonl", 100)
    folder = prepare_rows(tmp_path / "rows.jsonl").train.parent
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"train.npy", "validation.npy", "index.json"}
    damage(folder / file)
    reports: list[str] = []
    prepare_rows(tmp_path / "rows.jsonl", reports=reports)
    assert reports[0].startswith("tokenized ")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing unfinished stays


def test_an_interruption_leaves_nothing_that_looks_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", 100)

    def interrupted(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokens._TokenWriter, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_rows(tmp_path / "rows.jsonl")
    assert not list((tmp_path / "cache" / "tokens").iterdir())
    assert prepare_rows(tmp_path / "rows.jsonl").train.exists()


def _prepare_in_process(path: Path) -> bytes:
    return prepare_rows(path).train.read_bytes()


def test_several_processes_at_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 2000)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.map(_prepare_in_process, [tmp_path / "rows.jsonl"] * 3, chunksize=1)
    assert len(set(results)) == 1
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 50)
    vocabulary = {"<unk>": 0, "Document": 70_000, "</s>": 70_001}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model})
    )
    prepared = prepare_rows(tmp_path / "rows.jsonl", tokenizer=str(tmp_path))
    ids = np.load(prepared.train)
    assert ids.dtype == np.uint32
    assert ids[0] == 70_000
    assert ids[-1] == 70_001


def test_progress_is_reported_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", 100)
    monkeypatch.setattr(tokens, "SECONDS_BETWEEN_REPORTS", 0.0)
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 1000)
    reports: list[str] = []
    prepare_rows(tmp_path / "rows.jsonl", reports=reports)
    assert sum(line.endswith("going on") for line in reports) > 2


def test_too_little_text_for_the_share_says_what_would_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, 4)
    with pytest.raises(UserError, match=r"validation_fraction: .* share of 1e-05: of 4 documents none would") as caught:
        prepare_rows(path, fraction=0.00001)
    needed = float(str(caught.value).split("write ")[1].split(" or more")[0])
    assert prepare_rows(path, fraction=needed).validation.exists()
    with pytest.raises(UserError, match="of 4 documents all would be held out") as caught:
        prepare_rows(path, fraction=0.99999)
    allowed = float(str(caught.value).split("write ")[1].split(" or less")[0])
    assert prepare_rows(path, fraction=allowed).train.exists()
    path.write_text('{"text": "always the same"}\n' * 3)
    with pytest.raises(UserError, match="of 3 documents no two differ, so none can be held out; give more text"):
        prepare_rows(path, fraction=0.5)


def test_problems_of_the_other_fields_come_through(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 10)
    with pytest.raises(UserError, match=r"data\.tokenizer: "):
        prepare_rows(tmp_path / "rows.jsonl", tokenizer="train:no")
    with pytest.raises(UserError, match=r"data\.source: "):
        prepare_rows(tmp_path / "none.jsonl")
    prepare_rows(tmp_path / "rows.jsonl", fraction=0.5)
    (tmp_path / "cache" / "tokens").rename(tmp_path / "cache" / "aside")
    (tmp_path / "cache" / "tokens").write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"data\.cache: cannot write below .*; give another folder"):
        prepare_rows(tmp_path / "rows.jsonl", fraction=0.5)


# -------------------------------------------------------------------------------------------------------- permutation


def epoch_order(size: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
    return permuted(np.arange(size), np.full(size, epoch), size=size, seed=seed)


@pytest.mark.parametrize("epoch", [0, 1, 10**6])
def test_every_epoch_is_a_permutation(epoch: int) -> None:
    for size in range(1, 201):
        assert np.array_equal(np.sort(epoch_order(size, epoch)), np.arange(size))
    assert np.array_equal(np.sort(epoch_order(100_003, epoch)), np.arange(100_003))


def test_a_permutation_of_a_trillion_is_one_where_we_look() -> None:
    size = 10**12
    places = np.random.default_rng(0).integers(size, size=200_000)
    places = np.unique(np.concatenate([places, [0, 1, size - 1]]))
    images = permuted(places, np.zeros_like(places), size=size, seed=3)
    assert len(np.unique(images)) == len(places)
    assert images.min() >= 0
    assert images.max() < size
    assert abs(images.mean() / size - 0.5) < 0.01


def test_epochs_and_seeds_differ() -> None:
    orders = [epoch_order(50, epoch, seed) for epoch in range(10) for seed in (0, 1, 2, 2**70)]
    assert len({order.tobytes() for order in orders}) == len(orders)


def test_all_orders_of_a_few_sequences_are_about_as_likely() -> None:
    epochs = 2400
    orders = permuted(np.tile(np.arange(4), epochs), np.repeat(np.arange(epochs), 4), size=4, seed=0)
    _, counts = np.unique(orders.reshape(epochs, 4), axis=0, return_counts=True)
    assert len(counts) == 24
    assert counts.min() > 60
    assert counts.max() < 140


def test_the_order_never_changes() -> None:
    """A resumed run must meet the order it began with, whatever version runs it."""
    assert epoch_order(10, epoch=0, seed=0).tolist() == [9, 3, 5, 1, 6, 7, 0, 4, 8, 2]
    assert epoch_order(10, epoch=1, seed=0).tolist() == [8, 0, 3, 9, 1, 6, 7, 5, 2, 4]
    assert permuted(np.array([0, 1]), np.array([5, 6]), size=10**12, seed=7).tolist() == [638887843235, 473742779976]


# ---------------------------------------------------------------------------------------------------------- sequences


def test_an_epoch_predicts_every_token_but_the_first_and_the_tail() -> None:
    tokens = np.arange(1000, 1103, dtype=np.uint16)  # 103 tokens: 10 sequences of 10 + 1, a tail of 2
    sequences = TokenSequences(tokens, sequence_length=10, shuffle=False)
    assert len(sequences) == 10
    rows = sequences.rows(0, 10)
    assert rows.shape == (10, 11)
    assert rows.dtype == np.int64
    assert rows[:, 1:].ravel().tolist() == list(range(1001, 1101))
    assert rows[:, :-1].ravel().tolist() == list(range(1000, 1100))
    assert len(TokenSequences(tokens[:101], sequence_length=10)) == 10
    assert len(TokenSequences(tokens[:100], sequence_length=10)) == 9


def test_two_epochs_see_every_sequence_twice_in_different_orders() -> None:
    sequences = TokenSequences(np.arange(701, dtype=np.uint32), sequence_length=10, seed=1)
    firsts = sequences.rows(0, 140)[:, 0]
    assert np.array_equal(np.bincount(firsts // 10), np.full(70, 2))
    assert sorted(firsts[:70]) == sorted(firsts[70:]) == list(range(0, 700, 10))
    assert firsts[:70].tolist() != firsts[70:].tolist()


def test_the_stream_does_not_depend_on_how_it_is_cut() -> None:
    sequences = TokenSequences(np.arange(701, dtype=np.uint32), sequence_length=10, seed=1)
    whole = sequences.rows(0, 240)  # three epochs and a half
    for share in (1, 7, 16, 80):
        parts = [sequences.rows(first, min(share, 240 - first)) for first in range(0, 240, share)]
        assert np.array_equal(np.concatenate(parts), whole)
    again = TokenSequences(np.arange(701, dtype=np.uint32), sequence_length=10, seed=1)
    assert np.array_equal(again.rows(100, 5), whole[100:105])
    assert again.rows(0, 0).shape == (0, 11)


def test_without_shuffling_epochs_repeat_in_order() -> None:
    sequences = TokenSequences(np.arange(31, dtype=np.uint16), sequence_length=10, shuffle=False)
    assert sequences.rows(0, 7)[:, 0].tolist() == [0, 10, 20, 0, 10, 20, 0]
    assert sequences.rows(10**9, 1)[0, 0] == 10**9 % 3 * 10


def test_rows_come_from_the_file_and_from_anywhere_in_the_stream(stdlib: tuple[Prepared, list[str]]) -> None:
    prepared, _ = stdlib
    sequences = TokenSequences(prepared.train, sequence_length=256, seed=0)
    rows = sequences.rows(10**9, 4)
    tokens = np.load(prepared.train)
    for row in rows:
        starts = np.flatnonzero(tokens[:-256:1] == row[0])
        assert any(start % 256 == 0 and np.array_equal(tokens[start : start + 257], row) for start in starts)
    assert rows.max() < prepared.tokenizer.vocabulary


def test_less_than_one_sequence(tmp_path: Path) -> None:
    for name, remedy in (("train", "give more text"), ("validation", "raise data.validation_fraction")):
        np.save(tmp_path / f"{name}.npy", np.zeros(100, dtype=np.uint16))
        with pytest.raises(UserError) as caught:
            TokenSequences(tmp_path / f"{name}.npy", sequence_length=100)
        assert str(caught.value) == (
            f"batch.sequence_length: the {name} text has 100 tokens, a single sequence of 100 and its last target "
            f"need 101; write at most 99, or {remedy}"
        )
    assert len(TokenSequences(tmp_path / "train.npy", sequence_length=99)) == 1
