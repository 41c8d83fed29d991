"""data.bos: every document begins with the tokenizer's token for that, and nothing else about the data changes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.sizes import SIZES
from parallel.errors import UserError
from recipes.data.config import DataConfig
from recipes.data.prepared import prepared_index
from recipes.data.text.beginning import beginning_problem, with_beginning
from recipes.data.text.tokenizer import Tokenizer, build_tokenizer
from recipes.data.tokens.shards import DOCUMENTS, TRAIN, VALIDATION, array_path
from recipes.data.tokens.workspace import Pieces
from recipes.weights.locate import trained_description
from recipes.weights.pairing import pair_problems
from tests.recipes.data.texts import shards_in, tokenizer_for, work_on, write_rows

ONE = Pieces()
BEGIN = "<|begin_of_text|>"
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<begin>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<begin>": {"id": "<begin>", "ids": [300], "tokens": ["<begin>"]}},
}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def with_token(tokenizer: Tokenizer, name: str, **changes: Any) -> Tokenizer:
    """The tokenizer with one more special token, number 300."""
    content = json.loads(tokenizer.json)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": 300, "content": name, "special": True, **flags})
    return build_tokenizer(json.dumps(content | changes), where=Path("tokenizer.json"))


@pytest.fixture
def plain(tmp_path: Path) -> Tokenizer:
    """A tokenizer without a beginning token, and tmp_path/rows.jsonl."""
    write_rows(tmp_path / "rows.jsonl", 200)
    return tokenizer_for(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("name", "post_processor"), [(BEGIN, None), ("<s>", BYTES), ("<begin>", TEMPLATE)], ids=["none", "bytes", "own"]
)
def test_documents_begin_with_the_token_that_the_tokenizer_has_for_it(
    plain: Tokenizer, name: str, post_processor: dict[str, Any] | None
) -> None:
    without = with_token(plain, name, post_processor=post_processor)
    tokenizer = with_beginning(without)
    assert tokenizer.beginning == 300
    assert [*tokenizer.encode_batch(["and so on"])] == [[300, *plain.ids("and so on")]]
    assert [*tokenizer.encode_batch(["and", "so"])] == [[300, *plain.ids("and")], [300, *plain.ids("so")]]
    # Its tokenizer.json says so to other programs, and means the same when it is read again.
    assert tokenizer.backend.encode("and so on").ids == [300, *plain.ids("and so on")]
    again = with_beginning(build_tokenizer(tokenizer.json, where=Path("tokenizer.json")))
    assert (again.json, again.fingerprint) == (tokenizer.json, tokenizer.fingerprint)
    assert with_beginning(tokenizer) is tokenizer
    assert tokenizer.fingerprint != without.fingerprint


def test_fingerprint_of_a_tokenizer_with_an_added_beginning_stays(tmp_path: Path) -> None:
    """Folders and runs of every version have it."""
    model = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "<s>": 1, "a": 2}, "unk_token": "a"}
    text = json.dumps({"version": "1.0", "added_tokens": [], "post_processor": BYTES, "model": model})
    found = with_beginning(build_tokenizer(text, where=tmp_path / "tokenizer.json"))
    assert found.fingerprint == "63bf9616f4277b0e433c4024176eb240"


def test_tokenizer_without_a_beginning_token_is_refused(tmp_path: Path, plain: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"data\.bos: the tokenizer has no token that begins a text: "):
        with_beginning(plain)
    (tmp_path / "tokenizer.json").write_text(plain.json)
    assert "has no token that begins a text" in str(beginning_problem(str(tmp_path)))
    assert "'train:300' trains a tokenizer without" in str(beginning_problem("train:300"))
    (tmp_path / "tokenizer.json").write_text(with_token(plain, BEGIN).json)
    assert beginning_problem(str(tmp_path)) is None


def test_token_that_ends_documents_cannot_begin_them(plain: Tokenizer) -> None:
    template = json.loads(json.dumps(TEMPLATE).replace("<begin>", "<|endoftext|>").replace("300", "0"))
    with pytest.raises(UserError, match="ends documents, so it cannot begin them, too: borders would be ambiguous"):
        with_beginning(with_token(plain, "<other>", post_processor=template))


def test_shards_differ_only_by_the_beginning_of_each_document(tmp_path: Path, plain: Tokenizer) -> None:
    without = with_token(plain, BEGIN)
    (before,) = shards_in(tmp_path / "without", work_on(tmp_path / "rows.jsonl", tokenizer=without, pieces=ONE))
    (after,) = shards_in(
        tmp_path / "with", work_on(tmp_path / "rows.jsonl", tokenizer=with_beginning(without), pieces=ONE)
    )
    assert after.documents == before.documents and after.held_out == before.held_out > 0
    assert after.train == before.train + before.documents
    assert after.validation == before.validation + before.held_out
    for kind in (TRAIN, VALIDATION):
        tokens = np.load(array_path(tmp_path / "with", 0, kind))
        assert tokens[0] == 300
        assert (tokens[np.flatnonzero(tokens == without.end_of_document)[:-1] + 1] == 300).all()
        assert (tokens[tokens != 300] == np.load(array_path(tmp_path / "without", 0, kind))).all()
    ends = [np.load(array_path(tmp_path / name, 0, DOCUMENTS))["end"] for name in ("with", "without")]
    assert (ends[0] == ends[1] + np.arange(1, len(ends[1]) + 1, dtype=np.uint64)).all()


def test_prepared_folder_of_the_other_kind_is_refused_with_what_to_write(tmp_path: Path, plain: Tokenizer) -> None:
    without = with_token(plain, BEGIN)
    for name, tokenizer in (("without", without), ("with", with_beginning(without))):
        shards_in(tmp_path / name, work_on(tmp_path / "rows.jsonl", tokenizer=tokenizer))

    def found(name: str, tokenizer: Tokenizer) -> object:
        return prepared_index(tmp_path / name, tokenizer, 0.2, verify=True, setting="data.source")

    stored = build_tokenizer((tmp_path / "with" / "tokenizer.json").read_text(), where=tmp_path)
    assert found("with", with_beginning(stored)) and found("without", without)
    with pytest.raises(UserError, match=r"data\.bos: '.*with' was prepared with --bos; write bos = true"):
        found("with", stored)
    with pytest.raises(UserError, match=r"data\.bos: '.*without' was prepared without --bos; write bos = false, or"):
        found("without", with_beginning(without))
    with pytest.raises(UserError, match="holds tokens of another tokenizer; write tokenizer = "):
        found("with", plain)


def test_description_of_the_weights_names_the_beginning_token(plain: Tokenizer) -> None:
    model = SIZES["smollm3_debug"]
    for tokenizer, number in ((plain, None), (with_beginning(with_token(plain, BEGIN)), 300)):
        found = trained_description(model, tokenizer, None, length=64, log=print)
        assert found.facts.bos_token_id == number


def test_pairs_are_refused() -> None:
    data = replace(DataConfig(), bos=True, source="rows.jsonl", prompt_field="a", answer_field="b")
    (problem,) = pair_problems(data, encoder_decoder=False)
    assert problem[0] == "bos" and "a chat template writes its own beginning" in problem[1]
