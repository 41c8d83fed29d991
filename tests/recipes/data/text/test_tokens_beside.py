"""Tokenizers of whole folders: the tokens that transformers finds beside tokenizer.json, and settings inside of it."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import xxhash
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from models.config import TextFacts
from parallel.errors import UserError
from recipes.data.text.pair_format import ID, PairEncoder, PairFormat
from recipes.data.text.row import Row
from recipes.data.text.tokenizer import Tokenizer, load_tokenizer, read_tokenizer, text_library, tokenizer_problem
from recipes.evaluation.opened import OpenedModel

FAST: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
END = "<|endoftext|>"
FACTS = TextFacts(64)
WORDS = "the quick brown fox jumps over the lazy dog "


def token(content: str, *, special: bool = True, **flags: Any) -> dict[str, Any]:
    return {"content": content, "special": special, **FLAGS, **flags}


FOLDERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "names alone": {CONFIG: FAST | {"eos_token": END}},
    "tokens of a chat": {
        CONFIG: FAST
        | {
            "added_tokens_decoder": {
                "0": token(END),
                "301": token("<|im_end|>"),
                "300": token("<|im_start|>"),
                "310": token("<tool>", special=False),
            },
            "eos_token": "<|im_end|>",
            "pad_token": "[PAD]",
        }
    },
    "other flags": {CONFIG: FAST | {"added_tokens_decoder": {"0": token(END, lstrip=True, rstrip=True)}}},
    "older files": {
        CONFIG: FAST,
        ADDED: {"<|im_start|>": 300, "<|im_end|>": 301, "<x>": 0},
        MAP: {
            "eos_token": {"content": "<|im_end|>", **FLAGS},
            "additional_special_tokens": ["<|im_start|>"],
            "pad_token": "<pad>",
            "boi_token": "<boi>",
        },
    },
    "older files that do not count": {
        CONFIG: FAST | {"added_tokens_decoder": {}},
        ADDED: {"<a>": 300},
        MAP: {"pad_token": "<pad>"},
    },
    "extra tokens": {
        CONFIG: FAST
        | {
            "extra_special_tokens": ["<e1>", "the", "<e2>"],
            "boi_token": "<boi>",
            "unk_token": "quick",
            "cls_token": {"__type": "AddedToken", **FLAGS, "content": "<cls>", "lstrip": True, "normalized": True},
        }
    },
    "extra tokens with names": {
        CONFIG: FAST | {"extra_special_tokens": {"image_token": "<image>"}, "mask_token": "<m>"}
    },
    "tokens of one model": {CONFIG: FAST | {"model_specific_special_tokens": {"image_token": "<x>"}}},
    "tokens of one model that do not count": {
        CONFIG: FAST | {"model_specific_special_tokens": {"image_token": "<x>"}, "boi_token": "<boi>"}
    },
    "additional tokens": {CONFIG: FAST | {"additional_special_tokens": ["<|im_start|>"], "pad_token": "<pad>"}},
    "a word": {CONFIG: FAST | {"added_tokens_decoder": {"9": token("fox", special=False, single_word=True)}}},
}  # fmt: skip
TEXTS = (
    "<|im_start|>user\nthe quick <tool> fox<|im_end|>\n<pad>[PAD] <image><e1> the <e2><boi> <cls>  <|endoftext|>  <x>",
    "the quick brown foxes fox",
)


def write_folder(folder: Path, files: dict[str, Any], **changes: Any) -> Path:
    """A folder with a tokenizer.json, in which the model has these changes, and these files beside it."""
    folder.mkdir()
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([WORDS * 50], trainer)
    content = json.loads(library.to_str())
    content["model"] |= changes
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for name, own in files.items():
        (folder / name).write_text(json.dumps(own))
    return folder


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder), sources=[], text_field="text", cache=folder / "cache", log=print)


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_beside_a_tokenizer_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", FOLDERS[name])
    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder)
    library = text_library(ours.json, spelled_out=True)
    as_text = {number: repr(added) for number, added in library.get_added_tokens_decoder().items()}
    assert as_text == {number: repr(added) for number, added in theirs.added_tokens_decoder.items()}
    for text in TEXTS:
        assert library.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False)["input_ids"]
    # What a run keeps means the same wherever it lies.
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tokenizer.json").write_text(ours.json)
    assert load(tmp_path / "kept").fingerprint == load(folder / "tokenizer.json").fingerprint == ours.fingerprint


@pytest.mark.parametrize("name", ["nothing", "names alone", "older files that do not count"])
def test_tokenizer_with_nothing_beside_keeps_its_text_and_fingerprint(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", FOLDERS[name])
    assert read_tokenizer(folder / "tokenizer.json") == (folder / "tokenizer.json").read_text()
    assert load(folder).fingerprint == load(write_folder(tmp_path / "plain", {})).fingerprint


def test_line_ends_of_another_system_keep_the_fingerprint(tmp_path: Path) -> None:
    unix, dos = write_folder(tmp_path / "unix", {}), write_folder(tmp_path / "dos", {})
    text = json.dumps(json.loads((unix / "tokenizer.json").read_text()), indent=2)
    (unix / "tokenizer.json").write_bytes(text.encode())
    (dos / "tokenizer.json").write_bytes(text.replace("\n", "\r\n").encode())
    assert load(dos).fingerprint == load(unix).fingerprint


@pytest.mark.parametrize("name", ["owner.txt", "model.json"])
def test_tokenizer_of_our_own_shards_and_checkpoints_is_what_they_were_made_with(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", FOLDERS["tokens of a chat"] | {name: {}})
    assert read_tokenizer(folder / "tokenizer.json") == (folder / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        (CONFIG, "[]", "it must contain one JSON object"),
        (CONFIG, "null", "it must contain one JSON object"),
        (CONFIG, "[" * 100_000, "it is nested too deeply"),
        (CONFIG, '{"added_tokens_decoder": []}', "its tokens are not as transformers writes them"),
        (CONFIG, '{"added_tokens_decoder": {"x": {"content": "<a>"}}}', "its tokens are not as transformers writes"),
        (CONFIG, '{"added_tokens_decoder": {"300": 7}}', "its tokens are not as transformers writes them"),
        (CONFIG, '{"eos_token": 7}', "its tokens are not as transformers writes them"),
        (CONFIG, '{"split_special_tokens": true}', "split_special_tokens is not supported; take it out"),
        (CONFIG, '{"fast_tokenizer_files": ["tokenizer.4.0.json"]}', "fast_tokenizer_files is not supported"),
        (ADDED, "7", "it must contain one JSON object"),
        (MAP, '{"eos_token": [1]}', "its tokens are not as transformers writes them"),
    ],
)
def test_files_beside_a_tokenizer_that_cannot_be_read_are_refused(
    file: str, text: str, problem: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "folder", {})
    (folder / file).write_text(text)
    assert problem in str(tokenizer_problem(str(folder), 1000))
    with pytest.raises(UserError, match=problem):
        load(folder)


def test_tokenizers_that_never_end_are_refused_at_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", {})
    os.mkfifo(tmp_path / "pipe")
    for spec in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="it is not a regular file"):
            load(spec)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"has no tokenizer\.json|it is not a regular file"):
        load(folder)
    (folder / CONFIG).symlink_to("/dev/zero")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a regular file"):
        load(folder)


def test_the_end_that_tokenizer_config_names_is_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", {CONFIG: FAST | {"eos_token": "[END]"}})
    content = (folder / "tokenizer.json").read_text().replace(END, "<other>")
    (folder / "tokenizer.json").write_text(content)
    found = load(folder)
    assert found.decode([found.end_of_document]) == "[END]"
    (folder / "tokenizer.json").write_text(found.json)  # as checkpoints and prepared folders keep it
    (folder / CONFIG).unlink()
    assert load(folder).end_of_document == found.end_of_document and load(folder).fingerprint == found.fingerprint
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="has no token that ends a document"):
        load(folder)


@pytest.mark.parametrize(
    ("own", "named", "expected"),
    [
        ("</s>", "<eos>", "<eos>"),  # Gemma's </s> is HTML
        ("<|im_end|>", "<eos>", "<eos>"),
        (END, "<eos>", END),  # as documents always ended with such tokenizers
        ("</s>", "</s>", "</s>"),
        ("</s>", None, "</s>"),
    ],
)
def test_documents_end_with_the_named_token_unless_there_is_a_certain_one(
    own: str, named: str | None, expected: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "folder", {CONFIG: FAST | ({"eos_token": named} if named else {})})
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace(END, own))
    found = load(folder)
    assert found.decode([found.end_of_document]) == expected
    kept = tmp_path / "kept" / "tokenizer.json"
    kept.parent.mkdir()
    kept.write_text(found.json)
    assert (load(kept.parent).end_of_document, load(kept.parent).fingerprint) == (
        found.end_of_document,
        found.fingerprint,
    )
    assert AutoTokenizer.from_pretrained(folder)(WORDS)["input_ids"] == found.ids(WORDS)


def test_prefix_space_that_a_class_of_transformers_would_override_is_refused(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}
    folder = write_folder(tmp_path / "folder", {CONFIG: settings})
    text = json.loads((folder / "tokenizer.json").read_text())
    text["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match="add_prefix_space differs in "):
        load(folder)


def pairs_of(tokenizer: Tokenizer, prompt: str, answer: str) -> list[int]:
    encoder = PairEncoder(PairFormat(prompt="p", answer="a"), tokenizer)
    _, (pair,) = encoder.encode([Row(json.dumps([prompt, answer]), 0, 0, "")])
    return [int(number) for number in np.asarray(pair) & ID]


def test_nothing_in_a_tokenizer_makes_chance_decide(tmp_path: Path) -> None:
    certain, by_chance = load(write_folder(tmp_path / "a", {})), load(write_folder(tmp_path / "b", {}, dropout=0.5))
    expected = certain.ids(WORDS * 20)
    assert by_chance.ids(WORDS * 20) == expected == next(iter(by_chance.encode_batch([WORDS * 20])))
    assert pairs_of(by_chance, WORDS * 20, "fox") == pairs_of(certain, WORDS * 20, "fox")
    opened = OpenedModel(None, by_chance, FACTS, as_pairs=True)  # type: ignore[arg-type]
    assert opened.prompt_ids(WORDS * 20) == expected
    assert AutoTokenizer.from_pretrained(_kept(by_chance, tmp_path / "kept"))(WORDS * 20)["input_ids"] == expected
    # Tokens that were made by chance are not taken from the cache.
    then = xxhash.xxh3_128_hexdigest((tmp_path / "b" / "tokenizer.json").read_bytes())
    assert by_chance.fingerprint != then


def _kept(tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.json)
    (folder / CONFIG).write_text(json.dumps(FAST))
    return folder


def test_padding_and_truncation_in_a_tokenizer_change_no_prompt(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", {})
    plain = load(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_padding(length=64, pad_id=5, pad_token="!")
    library.enable_truncation(3)
    library.save(str(folder / "tokenizer.json"))
    saved = load(folder)
    for as_pairs in (False, True):
        one, other = (OpenedModel(None, own, FACTS, as_pairs=as_pairs) for own in (plain, saved))  # type: ignore[arg-type]
        assert other.prompt_ids("the quick brown fox") == one.prompt_ids("the quick brown fox")
        assert len(other.prompt_ids("the quick brown fox")) > 3
    assert pairs_of(saved, "the quick brown", "fox") == pairs_of(plain, "the quick brown", "fox")
