"""Batches of pairs: each pair once an epoch, whole, for any number of processes; what transformers' collator pads."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from models.encoder_decoder import EncoderDecoderInputs
from models.loss import IGNORED
from parallel.errors import UserError
from recipes.data import pair_batches
from recipes.data import pair_sequences as pairs
from recipes.data.batches import MicroBatch
from recipes.data.config import BatchConfig, DataConfig
from recipes.data.open_data import Data, DataSettings, Launch, open_data
from recipes.data.pair_batches import PairBatches
from recipes.data.pair_sequences import Pairing, PairSequences, pack, runs_of_similar
from recipes.data.sequences import Quarantine
from recipes.data.text.pair_format import PairFormat
from recipes.data.text.tokenizer import Tokenizer
from recipes.data.tokens.prepare import write_shards
from recipes.data.tokens.workspace import preparation
from recipes.weights.pairing import pair_problems
from tests.recipes.data.text.test_pair_format import both
from tests.recipes.data.texts import SMALL

PACKED = Pairing(PairFormat(prompt="question", answer="answer"))
PADDED = Pairing(PairFormat(prompt="question", answer="answer", encoder_decoder=True), decoder_start=0, padding=0)
LENGTH, BATCH, COUNT = 64, 12, 130


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    return both(ends=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of many lengths, each of which names its number."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"question": f"<{number}>" + " das" * (number * 7 % 23), "answer": f"{number}" + " ist" * (number % 5)}
        for number in range(COUNT)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(source: Path, tokenizer: Tokenizer, pairing: Pairing = PACKED, **changes: Any) -> Data:
    section = DataConfig(
        source=str(source), prompt_field="question", answer_field="answer", cache=str(source.parent / "cache")
    )
    section = replace(section, **{"validation_fraction": 0.0} | changes)
    launch = Launch(run="this", writes=True, log=lambda line: None, pieces=SMALL)
    batch = BatchConfig(sequence_length=LENGTH, global_batch_size=BATCH)
    validation = {"": ""} if section.validation_fraction else {}
    settings = DataSettings(section, batch, 3, lambda: tokenizer, validation=validation, pairing=pairing)
    return open_data(settings, launch, resumed_data_state={})


def batches(data: Data, pairing: Pairing, *, rank: int = 0, ranks: int = 1, micro: int = 2) -> PairBatches:
    assert isinstance(data.training, PairSequences)
    return PairBatches(
        data.training,
        pairing=pairing,
        end_of_document=data.tokenizer.end_of_document,
        global_batch_size=BATCH,
        micro_batch_size=micro,
        data_rank=rank,
        data_ranks=ranks,
        device=torch.device("cpu"),
    )


def answers(micro_batches: list[MicroBatch], tokenizer: Tokenizer) -> list[str]:
    """Every learned text of these micro-batches, which ends with its end token, sorted."""
    found: list[str] = []
    for _, targets, _ in micro_batches:
        for row in targets:
            text = tokenizer.decode(row[row != IGNORED].tolist())
            found += [part for part in text.split("<|im_end|>") if part]
    return sorted(found)


def expected_answers(*numbers: int) -> list[str]:
    return sorted(f"{number}" + " ist" * (number % 5) for number in numbers)


# ------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("seed", range(5))
def test_packing_keeps_every_pair_once_and_no_row_is_too_long(seed: int) -> None:
    sizes = np.random.default_rng(seed).integers(1, 101, size=700)
    rows = pack(sizes, capacity=100, key=seed)
    assert sorted(np.concatenate(rows).tolist()) == list(range(700))
    assert max(int(sizes[row].sum()) for row in rows) <= 100
    assert len(rows) <= max(int(sizes.sum()) / 100, (sizes > 50).sum()) * 11 / 9 + 1  # as of every best fit decreasing


def test_runs_of_similar_pairs_are_a_permutation_with_less_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 20, size=2003)
    shuffled = np.random.default_rng(1).permutation(2003)
    order = runs_of_similar(shuffled, (lengths,), run=16, key=9)
    assert sorted(order.tolist()) == list(range(2003))

    def padded(order: np.ndarray) -> int:
        return int(lengths[order[:2000]].reshape(-1, 16).max(axis=1).sum()) * 16

    assert padded(order) < 1.15 * lengths.sum() < padded(shuffled)
    firsts = lengths[order[:1024]].reshape(-1, 16)[:, 0]
    assert (np.diff(firsts) < 0).any(), "the runs are not shuffled"


@pytest.mark.slow
@pytest.mark.parametrize("pairing", [PACKED, PADDED])
def test_each_epoch_has_every_pair_once_in_another_order(
    source: Path, tokenizers: tuple[Tokenizer, object], pairing: Pairing
) -> None:
    data = opened(source, tokenizers[0], pairing)
    assert isinstance(data.training, PairSequences)
    sequences = data.training.available
    epochs = [
        [
            pair
            for number in range(epoch * sequences, (epoch + 1) * sequences)
            for pair in data.training.pairs(number)[1].tolist()
        ]
        for epoch in range(3)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(COUNT))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    data.training.close()


@pytest.mark.slow
@pytest.mark.parametrize("pairing", [PACKED, PADDED])
def test_one_two_and_three_processes_read_what_one_reads(
    source: Path, tokenizers: tuple[Tokenizer, object], pairing: Pairing
) -> None:
    tokenizer = tokenizers[0]
    data = opened(source, tokenizer, pairing)
    for batch, ranks in enumerate((1, 2, 3, 2, 6, 1)):
        alone = answers(batches(data, pairing).take_once(batch), tokenizer)
        shares = [batches(data, pairing, rank=rank, ranks=ranks).take_once(batch) for rank in range(ranks)]
        assert sorted(text for share in shares for text in answers(share, tokenizer)) == alone
        assert len({len(share) for share in shares}) == 1
    data.training.close()


@pytest.mark.slow
def test_resumed_reader_gets_the_same_batch(source: Path, tokenizers: tuple[Tokenizer, object]) -> None:
    for pairing in (PACKED, PADDED):
        data = opened(source, tokenizers[0], pairing)
        first, later = batches(data, pairing), batches(opened(source, tokenizers[0], pairing), pairing)
        for batch in range(12):
            expected = first.take(batch)
        for (_, one, _), (_, other, _) in zip(expected, later.take(11), strict=True):
            assert torch.equal(one, other)
        first.close()
        later.close()


# ------------------------------------------------------------------------------------------- packed batches


@pytest.mark.slow
def test_packed_row_holds_whole_pairs_each_a_document_and_learns_only_answers(
    source: Path, tokenizers: tuple[Tokenizer, Any]
) -> None:
    ours, theirs = tokenizers
    data = opened(source, ours)
    rows = {json.loads(line)["question"]: json.loads(line)["answer"] for line in source.read_text().splitlines()}
    seen: Counter[str] = Counter()
    for inputs, targets, documents in batches(data, PACKED, micro=1).take_once(0):
        assert isinstance(inputs, torch.Tensor)
        assert documents is not None
        assert inputs.shape == targets.shape == documents.positions.shape == (1, LENGTH)
        starts = (documents.positions[0] == 0).nonzero().flatten().tolist()
        for begin, end in zip(starts, [*starts[1:], LENGTH], strict=True):
            its_inputs, its_targets = inputs[0, begin:end].tolist(), targets[0, begin:end].tolist()
            if set(its_targets) == {IGNORED}:
                assert end == LENGTH, "only the rest of a row is padding"
                assert set(its_inputs) == {ours.end_of_document}
                continue
            prompt = max((p for p in rows if ours.decode(its_inputs).startswith(p)), key=len)
            question = theirs(prompt, add_special_tokens=False)["input_ids"]
            answer = [*theirs(rows[prompt], add_special_tokens=False)["input_ids"], ours.end_of_document]
            assert its_inputs == [*question, *answer][:-1]
            assert its_targets == [IGNORED] * (len(question) - 1) + answer
            seen[prompt] += 1
    assert seen
    assert set(seen.values()) == {1}
    data.training.close()


@pytest.mark.slow
def test_tokens_are_counted_without_padding(source: Path, tokenizers: tuple[Tokenizer, object]) -> None:
    for pairing in (PACKED, PADDED):
        data = opened(source, tokenizers[0], pairing)
        assert isinstance(data.training, PairSequences)
        reader, encoder, decoder = batches(data, pairing), 0, 0
        for batch in range(15):  # more than an epoch
            for inputs, targets, documents in reader.take(batch):
                if isinstance(inputs, EncoderDecoderInputs):
                    encoder += int(inputs.encoder_mask.sum())
                    decoder += int((targets != IGNORED).sum())
                else:
                    assert documents is not None
                    decoder += int(
                        sum(_used(row, their) for row, their in zip(documents.positions, targets, strict=True))
                    )
            assert data.training.tokens((batch + 1) * BATCH) == (encoder, decoder)
        reader.close()


def _used(positions: torch.Tensor, targets: torch.Tensor) -> int:
    last = int((targets != IGNORED).nonzero().max())  # every pair ends with a target
    return last + 1


# ------------------------------------------------------------------------------------------- padded batches


@pytest.mark.slow
def test_padded_batch_is_that_of_transformers_collator(source: Path, tokenizers: tuple[Tokenizer, Any]) -> None:
    ours, theirs = tokenizers
    data = opened(source, ours, PADDED)
    config = T5Config(vocab_size=320, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    by_prompt = {tuple(theirs(row["question"])["input_ids"]): row for row in rows}
    for inputs, targets, documents in batches(data, PADDED, micro=4).take_once(1):
        assert isinstance(inputs, EncoderDecoderInputs)
        assert documents is None
        prompts = [
            tuple(tokens[mask].tolist())
            for tokens, mask in zip(inputs.encoder_tokens, inputs.encoder_mask, strict=True)
        ]
        features = [
            dict(theirs(by_prompt[prompt]["question"], text_target=by_prompt[prompt]["answer"])) for prompt in prompts
        ]
        expected = DataCollatorForSeq2Seq(theirs, model=model, pad_to_multiple_of=64)(features)
        assert torch.equal(inputs.encoder_tokens, expected["input_ids"])
        assert torch.equal(inputs.encoder_mask, expected["attention_mask"].bool())
        assert torch.equal(targets, expected["labels"])
        assert torch.equal(inputs.decoder_tokens, expected["decoder_input_ids"])
    data.training.close()


@pytest.mark.slow
def test_processes_of_a_step_get_similarly_long_pairs(
    source: Path, tokenizers: tuple[Tokenizer, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pairs, pair_batches):
        monkeypatch.setattr(module, "PADDED_TO", 1)
    data = opened(source, tokenizers[0], PADDED)
    shares = [batches(data, PADDED, rank=rank, ranks=3).take_once(2) for rank in range(3)]
    lengths = [[_longest(inputs) for inputs, _, _ in share] for share in shares]
    for first, second in zip(zip(*lengths, strict=True), list(zip(*lengths, strict=True))[1:], strict=False):
        assert min(first) >= max(second), "a later micro-batch is longer"
    data.training.close()


def _longest(inputs: object) -> int:
    assert isinstance(inputs, EncoderDecoderInputs)
    return int(inputs.encoder_mask.sum(dim=1).max())


# ------------------------------------------------------------------------------------------- long pairs


@pytest.mark.slow
def test_long_pairs_are_refused_above_the_budget_and_otherwise_listed(
    source: Path, tokenizers: tuple[Tokenizer, object], tmp_path: Path
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(source.read_text() + json.dumps({"question": "Größe " * 40, "answer": "zu lang"}) + "\n")
    with pytest.raises(
        UserError, match=r"data.long_pairs: 1 of the 131 pairs .* longer than batch.sequence_length = 64"
    ):
        opened(path, tokenizers[0], bad_row_budget=0.001)
    for _ in range(2):  # a resumed run lists it again, and so once
        data = opened(path, tokenizers[0])
        assert isinstance(data.training, PairSequences)
        quarantine = Quarantine(tmp_path / "quarantine.jsonl")
        assert [quarantine.note(data.training.sources) for _ in range(2)] == [1, 1]
    (line,) = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(line)["row"] == COUNT + 1
    assert "too long" in json.loads(line)["reason"]
    data.training.close()


@pytest.mark.slow
@pytest.mark.parametrize("long", ["cut_prompt_start", "cut_prompt_end"])
@pytest.mark.parametrize("pairing", [PACKED, PADDED])
def test_long_prompt_is_cut_and_its_answer_is_whole(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Any], long: str, pairing: Pairing
) -> None:
    ours, theirs = tokenizers
    question = "first " + "Größe " * 40 + "last"
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": question, "answer": "kurz"}) + "\n")
    data = opened(tmp_path / "long.jsonl", ours, pairing, long_pairs=long)
    ((inputs, targets, _), *_) = batches(data, pairing).take_once(0)
    answer = [*theirs("kurz", add_special_tokens=False)["input_ids"], ours.end_of_document]
    assert targets[0][targets[0] != IGNORED].tolist() == answer
    tokens = theirs(question, add_special_tokens=pairing is PADDED)["input_ids"]
    if isinstance(inputs, EncoderDecoderInputs):
        found = inputs.encoder_tokens[0].tolist()
        kept = [*tokens[: LENGTH - 1], tokens[-1]] if long == "cut_prompt_end" else tokens[-LENGTH:]
    else:
        found = inputs[0].tolist()[: LENGTH - len(answer) + 1]
        kept = tokens[: len(found)] if long == "cut_prompt_end" else tokens[-len(found) :]
    assert found == kept
    assert isinstance(data.training, PairSequences)
    assert data.training.beginning(LENGTH) == kept  # what a sample of the trained model answers
    data.training.close()


@pytest.mark.slow
def test_long_answer_is_left_out_even_where_prompts_are_cut(
    source: Path, tokenizers: tuple[Tokenizer, object], tmp_path: Path
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(source.read_text() + json.dumps({"question": "wie?", "answer": "Größe " * 40}) + "\n")
    for pairing in (PACKED, PADDED):
        data = opened(path, tokenizers[0], pairing, long_pairs="cut_prompt_end", answer_length=30)
        assert isinstance(data.training, PairSequences)
        pairs = {int(pair) for number in range(data.training.available) for pair in data.training.pairs(number)[1]}
        assert len(pairs) == COUNT
        data.training.close()


# ------------------------------------------------------------------------------------------- held out, prepared


@pytest.mark.slow
def test_held_out_pairs_are_not_trained_on(source: Path, tokenizers: tuple[Tokenizer, object]) -> None:
    data = opened(source, tokenizers[0], validation_fraction=0.2)
    held = data.validation[""]
    assert isinstance(held, PairSequences)
    assert isinstance(data.training, PairSequences)

    def texts(sequences: PairSequences) -> list[str]:
        reader = batches(replace(data, training=sequences), PACKED)
        count = -(-sequences.available // BATCH)
        return [text for batch in range(count) for text in answers(reader.take_once(batch), tokenizers[0])]

    assert sorted(texts(held) + texts(data.training)) == expected_answers(*range(COUNT))
    assert 10 < len(texts(held)) < 50
    data.training.close()


@pytest.mark.slow
def test_prepared_pairs_are_read_and_refused_with_other_settings(
    source: Path, tokenizers: tuple[Tokenizer, object], tmp_path: Path
) -> None:
    def prepared(name: str, field: Any) -> Path:
        work = preparation(
            str(source), text_field=field, tokenizer=tokenizers[0], validation_fraction=0.0, pieces=SMALL
        )
        list(write_shards(tmp_path / name, work))
        return tmp_path / name

    folder, plain = prepared("pairs", PACKED.format), prepared("plain", "question")
    data = opened(folder, tokenizers[0])
    assert data.training.available == opened(source, tokenizers[0]).training.available
    other = Pairing(replace(PACKED.format, suffix="\n"))
    with pytest.raises(UserError, match=r"made otherwise \(suffix: '' there, '\\n' here\)"):
        opened(folder, tokenizers[0], other)
    with pytest.raises(UserError, match=r"holds text, not pairs"):
        opened(plain, tokenizers[0])


# ------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("data", "encoder_decoder", "field"),
    [
        (DataConfig(prompt_field="q"), False, "answer_field"),
        (DataConfig(answer_field="q"), False, "prompt_field"),
        (DataConfig(prompt_field="q", answer_field="q"), False, "answer_field"),
        (DataConfig(prompt_field="q", answer_field="a", messages_field="m"), False, "messages_field"),
        (DataConfig(prompt_field="q", answer_field="a", text_field="t"), False, "text_field"),
        (DataConfig(prompt_field="q", answer_field="a", chat_template="c"), False, "chat_template"),
        (DataConfig(messages_field="m", prompt_prefix="c"), False, "prompt_prefix"),
        (DataConfig(messages_field="m", chat_template="missing.jinja"), False, "chat_template"),
        (DataConfig(messages_field="m", chat_date="1.2.2026"), False, "chat_date"),
        (DataConfig(messages_field="m"), True, "messages_field"),
        (DataConfig(), True, "prompt_field"),
        (DataConfig(prompt_suffix="x"), False, "prompt_suffix"),
        (DataConfig(prompt_field="q", answer_field="a", answer_length=9), False, "answer_length"),
        (DataConfig(prompt_field="q", answer_field="a"), False, "source"),
    ],
)
def test_mistake_in_the_fields_of_pairs_names_its_field(data: DataConfig, encoder_decoder: bool, field: str) -> None:
    data = data if field == "source" else replace(data, source="pairs.jsonl")
    assert [name for name, _ in pair_problems(data, encoder_decoder=encoder_decoder)] == [field]


@pytest.mark.slow
def test_sources_of_a_mixture_share_the_steps_by_pairs(
    source: Path, tokenizers: tuple[Tokenizer, object], tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"question": "other", "answer": "X"}) + "\n")
    data = opened(source, tokenizers[0], PADDED, mixture={str(source): 3.0, str(other): 1.0})
    texts = [text for batch in range(5) for text in answers(batches(data, PADDED).take_once(batch), tokenizers[0])]
    assert texts.count("X") == 15
    data.training.close()


@pytest.mark.slow
def test_pairs_go_on_only_with_unchanged_sources_and_length(source: Path, tokenizers: tuple[Tokenizer, object]) -> None:
    data = opened(source, tokenizers[0], PADDED)
    history = data.training.history(12)
    assert data.training.continue_after(history) == 12
    longer = (replace(history[0], sequence_length=history[0].sequence_length * 2),)
    for others in (longer, (*longer, *history)):
        with pytest.raises(UserError, match=r"pairs cannot go on after other sources, shares or another batch"):
            data.training.continue_after(others)
    data.training.close()
