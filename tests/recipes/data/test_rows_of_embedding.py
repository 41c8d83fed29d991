"""A tokenizer may have added tokens that the model's embedding has no row for, as long as no text holds them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallel.errors import UserError
from recipes.data.open_data import Data
from recipes.data.text.pair_format import PairEncoder, PairFormat
from recipes.data.text.row import Row
from recipes.data.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_problem
from recipes.data.tokens.shards import TRAIN, array_path
from recipes.evaluation.generate import open_model
from tests.recipes.data.test_open_data import batches, opened
from tests.recipes.data.texts import shards_in, work_on, write_rows
from tests.tiny_llama import save_tiny_llama

ROWS = 300
IMAGE = "<image>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, whose tokenizer has one plain added token more than the model has rows."""
    write_rows(tmp_path / "rows.jsonl", 300)
    folder = save_tiny_llama(tmp_path, tmp_path / "rows.jsonl", max_position_embeddings=64)
    content = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": ROWS, "content": IMAGE, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def tokenizer_in(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder), sources=[], text_field="text", cache=folder, log=print)


def test_a_tokenizer_with_an_unused_token_beyond_the_embedding_is_accepted(folder: Path) -> None:
    assert tokenizer_problem(str(folder), ROWS) is None
    assert tokenizer_in(folder).vocabulary == ROWS + 1
    assert f"ids up to {ROWS - 1}, but model.vocabulary is {ROWS - 1}" in str(tokenizer_problem(str(folder), ROWS - 1))
    opened_model = open_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    assert opened_model.prompt_ids("Document number 7")


def test_a_prompt_with_a_token_that_has_no_row_is_refused(folder: Path) -> None:
    opened_model = open_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(UserError, match=f"the text holds token {ROWS}, '{IMAGE}', but the model has {ROWS} rows"):
        opened_model.prompt_ids(f"a {IMAGE} of")
    with pytest.raises(UserError, match=f"the text holds token {ROWS}, '{IMAGE}'"):
        list(opened_model.tokenizer.encode_batch(["a", f"a {IMAGE} of"]))  # as evaluations do


def test_a_pair_with_a_token_that_has_no_row_is_refused(folder: Path) -> None:
    tokenizer = open_model(folder, dtype=torch.float32, device=torch.device("cpu")).tokenizer
    encoder = PairEncoder(PairFormat(prompt="p", answer="a"), tokenizer)
    assert encoder.encode([Row(json.dumps(["a", "b"]), 0, 0, "")])[1]
    with pytest.raises(UserError, match=f"the text holds token {ROWS}, '{IMAGE}'"):
        encoder.encode([Row(json.dumps(["a", IMAGE]), 0, 0, "")])


def read_some(data: Data) -> None:
    reader = batches(data.training)
    reader._require_rows = data.tokenizer.require_rows
    for batch in range(20):
        reader.take_once(batch)


def prepared(folder: Path, place: Path, source: Path) -> Path:
    shards_in(place, work_on(source, tokenizer=tokenizer_in(folder)))
    return place


def test_prepared_tokens_without_a_row_are_an_error_when_they_are_read(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    place = prepared(folder, tmp_path / "prepared", source)
    how: dict[str, Any] = {"tokenizer": tokenizer_in(folder), "vocabulary": ROWS}
    read_some(opened(tmp_path / "cache", {str(place): 1.0}, **how))
    with source.open("a") as file:
        file.write(json.dumps({"text": f"an {IMAGE}"}) + "\n")
    place = prepared(folder, tmp_path / "other", source)
    assert any(ROWS in np.load(file) for file in place.glob(array_path(place, 0, TRAIN).name.replace("00000", "*")))
    with pytest.raises(UserError, match=f"the text holds token {ROWS}, '{IMAGE}', but the model has {ROWS} rows"):
        read_some(opened(tmp_path / "cache", {str(place): 1.0}, **how))


@pytest.mark.slow
def test_text_with_a_token_that_has_no_row_ends_its_tokenizing(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    how: dict[str, Any] = {"tokenizer": tokenizer_in(folder), "vocabulary": ROWS}
    with source.open("a") as file:
        file.write(json.dumps({"text": f"an {IMAGE}"}) + "\n")
    with pytest.raises(UserError, match=f"the text holds token {ROWS}, '{IMAGE}'"):
        read_some(opened(tmp_path / "cache", {str(source): 1.0}, **how))
