"""Loss on the answers of pairs: that of transformers for each pair alone, whatever the micro-batches and processes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from models.transformers import TransformersModel
from parallel.dist import start, stop
from parallel.errors import UserError
from recipes.data.pair_sequences import Pairing
from recipes.data.text.pair_format import PairFormat
from recipes.data.text.tokenizer import Tokenizer, build_tokenizer
from recipes.evaluation.evaluate import Evaluation, PairReader, evaluate_pairs
from tests.build import cpu_mesh
from tests.families import family_config
from tests.processes import run_processes
from tests.recipes.evaluation.test_by_transformers import END, tokenizer

PAIRS = [("w3 w4 w5 w6 w7 w8 w9", "w10"), ("w3", "w11 w12 w13 w14"), ("w20 w21", "w22 w23"), ("w5 w6", "w7")]
LENGTH = 12


def encoder() -> Tokenizer:
    return build_tokenizer(tokenizer(), where=Path("tokenizer.json"), ends=(END,))


def pairing(name: str, **changes: Any) -> Pairing:
    reads = name == "t5"
    format = PairFormat(prompt="p", answer="a", encoder_decoder=reads, **changes)
    return Pairing(format, decoder_start=0, padding=0 if reads else None)


def reader(
    name: str, *, length: int = LENGTH, long: str = "leave_out", pairs: Any = PAIRS, **changes: Any
) -> PairReader:
    texts = [json.dumps(pair) for pair in pairs]
    return PairReader(texts, tokenizer=encoder(), pairing=pairing(name, **changes), length=length, long=long)


def model(name: str) -> TransformersModel:
    found = TransformersModel(family_config(name, initializer_range=0.3))
    shapes = {key: value.shape for key, value in (*found.named_parameters(), *found.named_buffers())}
    values = dict(found.initial_values(shapes, seed=0, device=torch.device("cpu")))
    found.load_state_dict(values, strict=False)
    return found


def evaluated(name: str, *, micro: int = 2, **options: Any) -> Evaluation:
    start("cpu", seed=0)
    try:
        pairs = reader(name, **options)
        return evaluate_pairs(model(name), pairs, pairing=pairing(name), micro_batch_size=micro, mesh=cpu_mesh())
    finally:
        stop()


def ids(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


@pytest.fixture(scope="module", params=["t5", "gpt2"])
def expected(request: pytest.FixtureRequest) -> tuple[str, float, int]:
    """Name, and the summed loss and targets of transformers on each pair alone."""
    name, summed, count = request.param, 0.0, 0
    theirs = model(name).eval()
    for prompt, answer in PAIRS:
        labels = [*ids(answer), END]
        if name == "t5":
            logits = theirs.model(input_ids=torch.tensor([ids(prompt)]), labels=torch.tensor([labels])).logits[0]
        else:
            logits = theirs.model(input_ids=torch.tensor([ids(prompt) + labels])).logits[0, len(ids(prompt)) - 1 : -1]
        summed += torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="sum").item()
        count += len(labels)
    return name, summed, count


def test_the_loss_is_that_of_each_pair_alone(expected: tuple[str, float, int]) -> None:
    name, summed, count = expected
    for micro in (1, 3, 8):
        found = evaluated(name, micro=micro)
        assert (found.tokens, found.documents) == (count, len(PAIRS))
        assert found.nats == pytest.approx(summed, rel=1e-5)


@pytest.mark.slow
def test_two_processes_share_the_pairs(expected: tuple[str, float, int]) -> None:
    name, summed, count = expected
    for found in run_processes(2, partial(evaluated, name, micro=1)):
        assert found.tokens == count and found.nats == pytest.approx(summed, rel=1e-5)


def test_pairs_that_are_too_long_are_left_out_or_cut_as_in_training() -> None:
    whole = [list(tokens & 0xFFFF) for tokens, _ in reader("t5")]
    left_out = reader("t5", length=3)
    assert [list(tokens & 0xFFFF) for tokens, _ in left_out] == whole[1:]
    assert (left_out.pairs, left_out.left_out) == (3, 1)
    (at_start, *_), (at_end, *_) = (
        list(reader("t5", length=3, long=f"cut_prompt_{side}")) for side in ("start", "end")
    )
    assert (list(at_start[0] & 0xFFFF), at_start[1]) == ([7, 8, 9, 10, END], 3)
    assert (list(at_end[0] & 0xFFFF), at_end[1]) == ([3, 4, 5, 10, END], 3)
    (causal, *_) = list(reader("gpt2", length=5, long="cut_prompt_start"))
    assert (list(causal[0] & 0xFFFF), causal[1]) == ([6, 7, 8, 9, 10, END], 0)


def test_texts_around_prompts_are_read_with_them() -> None:
    plain, longer = (next(iter(reader("t5", prefix=prefix))) for prefix in ("", "w30 "))
    assert list(longer[0] & 0xFFFF) == [30, *(plain[0] & 0xFFFF)] and longer[1] == plain[1] + 1


def test_a_source_without_a_usable_pair_is_refused() -> None:
    with pytest.raises(UserError, match="no pair can be evaluated: 4 are too long"):
        evaluated("gpt2", length=1)
