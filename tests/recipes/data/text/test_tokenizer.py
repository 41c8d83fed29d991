"""Tokenizers: trained once and cached, or loaded from a file, and refused if they do not fit the model or the data."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import tokenizers

from parallel.errors import UserError
from recipes.data.text import tokenizer as tokenizer_module
from recipes.data.text.sources import document_hash
from recipes.data.text.tokenizer import (
    SMALLEST_VOCABULARY,
    Tokenizer,
    load_tokenizer,
    tokenizer_problem,
    training_sample,
)

WORDS = "the quick brown fox jumps over the lazy dog and runs through the long dark forest of words\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    path.write_text(WORDS * 50, encoding="utf-8")
    return path


def load(spec: str | Path, source: Path, reports: list[str] | None = None) -> Tokenizer:
    return load_tokenizer(
        str(spec),
        sources=[str(source)],
        text_field="text",
        cache=source.parent / "cache",
        log=(reports if reports is not None else []).append,
    )


def write_tokenizer(path: Path, tokens: list[str], special: list[str]) -> Path:
    """A word-level tokenizer.json with these tokens, the special ones after them."""
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0])
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(special)
    library.save(str(path))
    return path


# ----------------------------------------------------------------------------------------------------------- training


def test_any_text_decodes_to_itself(source: Path) -> None:
    tokenizer = load("train:300", source)
    assert tokenizer.vocabulary == 300
    for text in ("the quick fox", "ümlaut 😀 \x00 \t\r\n  x", "<|endoftext|>", "123456 don't  ", ""):
        assert tokenizer.decode(tokenizer.ids(text)) == text
    assert len(tokenizer.ids(WORDS)) < len(WORDS) / 1.5
    assert list(tokenizer.encode_batch([WORDS, "x"])) == [tokenizer.ids(WORDS), tokenizer.ids("x")]


def test_text_cannot_end_its_document_by_spelling_out_the_token(source: Path) -> None:
    tokenizer = load("train:300", source)
    assert tokenizer.end_of_document not in tokenizer.ids("a <|endoftext|> b")
    assert tokenizer.decode([tokenizer.end_of_document]) == "<|endoftext|>"


def test_text_cannot_end_its_document_if_the_file_does_not_mark_the_token_special(tmp_path: Path, source: Path) -> None:
    library = load("train:280", source).backend
    library.add_tokens(["<|im_end|>"])
    content = json.loads(library.to_str())
    content["added_tokens"] = [added for added in content["added_tokens"] if added["content"] == "<|im_end|>"]
    content["model"]["vocab"]["<other>"] = content["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = load(tmp_path, source)
    assert found.decode([found.end_of_document]) == "<|im_end|>"
    assert found.end_of_document not in found.ids("one<|im_end|>two")
    assert found.decode(found.ids("one<|im_end|>two")) == "one<|im_end|>two"
    (tmp_path / "again.json").write_text(found.json)  # as it is stored with shards
    assert load(tmp_path / "again.json", source).fingerprint == found.fingerprint


@pytest.mark.parametrize(
    ("change", "what"), [(lambda source: source.write_text(WORDS), "changed"), (Path.unlink, "disappeared")]
)
def test_no_tokenizer_is_trained_on_a_source_that_changes_meanwhile(
    source: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], what: str
) -> None:
    sample = tokenizer_module.training_sample

    def slow(documents: Iterable[str]) -> list[str]:
        found = sample(documents)
        change(source)
        return found

    monkeypatch.setattr(tokenizer_module, "training_sample", slow)
    with pytest.raises(UserError, match=f"source.txt' {what} while it was read; start again"):
        load("train:280", source)
    assert not list((source.parent / "cache").rglob("*.json"))


def test_smallest_vocabulary_encodes_each_byte_alone(source: Path) -> None:
    tokenizer = load(f"train:{SMALLEST_VOCABULARY}", source)
    assert tokenizer.vocabulary == SMALLEST_VOCABULARY
    assert len(tokenizer.ids("the fox")) == len("the fox")


def test_trained_tokenizer_is_cached_by_the_contents_of_its_source(source: Path) -> None:
    reports: list[str] = []
    first = load("train:300", source, reports)
    assert len(reports) == 1
    assert reports[0].startswith("trained a tokenizer of 300 entries on 0.0 MB in ")
    assert load("train:300", source, reports).fingerprint == first.fingerprint
    assert len(reports) == 1  # from the cache
    assert load("train:301", source, reports).fingerprint != first.fingerprint
    source.write_text(WORDS[::-1] * 50, encoding="utf-8")
    assert load("train:300", source, reports).fingerprint != first.fingerprint
    assert len(reports) == 3
    assert all(path.suffix in (".json", ".xxh3") for path in (source.parent / "cache" / "tokenizers").iterdir())


def test_damaged_tokenizer_in_the_cache_is_trained_again(source: Path) -> None:
    first = load("train:300", source)
    (cached,) = (source.parent / "cache" / "tokenizers").glob("*.json")
    content = json.loads(cached.read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]  # sound JSON, other tokens
    for text in (cached.read_text()[:1000], json.dumps(content)):
        cached.write_text(text)
        reports: list[str] = []
        assert load("train:300", source, reports).fingerprint == first.fingerprint
        assert len(reports) == 2 and "is not as it was written; the tokenizer is trained again" in reports[0]
    cached.with_suffix(".xxh3").unlink()  # as older versions leave it
    assert load("train:300", source).fingerprint == first.fingerprint


def test_unwritable_cache_for_tokenizers_is_reported(source: Path) -> None:
    (source.parent / "cache").write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"data\.cache: cannot write .*; give another folder"):
        load("train:300", source)


def test_training_sample_is_bounded_and_does_not_depend_on_the_order() -> None:
    texts = [f"document {number} " * 10 for number in range(200)]
    assert sorted(training_sample(texts)) == sorted(texts)
    sample = training_sample(texts, characters=2000)
    assert 1500 < sum(map(len, sample)) <= 2000
    assert sample == training_sample(reversed(texts), characters=2000)
    others = set(texts) - set(sample)
    assert min(map(document_hash, sample)) > max(map(document_hash, others))  # none is held out
    assert training_sample(["longer than asked for"], characters=3) == ["longer than asked for"]


@pytest.mark.slow
def test_forked_child_can_tokenize_without_a_warning(source: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from recipes.data.text.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer('train:300', sources=[sys.argv[1]], text_field='text', cache=Path(sys.argv[2]), "
        "log=lambda line: None)\n"
        "if os.fork() == 0:\n"
        "    os._exit(len(list(tokenizer.encode_batch(['x'] * 100))))\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 100"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(source.parent / "cache")],
        cwd=Path(tokenizer_module.__file__).parents[3],
        env={name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


# -------------------------------------------------------------------------------------------------------------- files


def test_tokenizer_loads_from_its_file_or_the_folder_of_the_file(tmp_path: Path, source: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["<unk>", "a", "b"], ["</s>"])
    for spec in (path, tmp_path):
        tokenizer = load(spec, source)
        assert (tokenizer.vocabulary, tokenizer.end_of_document) == (4, 3)
        assert tokenizer.ids("a b a zzz") == [1, 2, 1, 0]
        assert tokenizer_problem(str(spec), 4) is None


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (["</s>", "<|end_of_text|>", "<|im_end|>"], "<|end_of_text|>"),
        (["</s>", "<|endoftext|>"], "<|endoftext|>"),
        (["<|im_end|>", "</s>"], "</s>"),
        (["<|im_end|>"], "<|im_end|>"),
    ],
)
def test_end_of_document_token_is_found_in_order_of_preference(
    tmp_path: Path, source: Path, special: list[str], expected: str
) -> None:
    tokenizer = load(write_tokenizer(tmp_path / "tokenizer.json", ["<unk>"], special), source)
    assert tokenizer.end_of_document == 1 + special.index(expected)


def test_unigram_vocabulary_is_read_as_a_list(tmp_path: Path, source: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0), ("</s>", -2.0)], unk_id=0))
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path, source)
    assert (tokenizer.vocabulary, tokenizer.end_of_document) == (3, 2)


# ----------------------------------------------------------------------------------------------------------- problems


def test_trained_tokenizer_must_fit_the_vocabulary() -> None:
    assert tokenizer_problem("train:4096", 4096) is None
    assert tokenizer_problem("train:4096", 4095) == (
        "'train:4096' produces ids up to 4095, but model.vocabulary is 4095; write 'train:4095' or less, "
        "or raise model.vocabulary to 4096 or more"
    )


def test_trained_tokenizer_needs_at_least_257_entries() -> None:
    assert tokenizer_problem("train:257", 257) is None
    assert "is too small: 256 bytes and <|endoftext|> make 257; write 'train:257'" in str(
        tokenizer_problem("train:256", 4096)
    )


@pytest.mark.parametrize("spec", ["train:", "train:4k", "train:-1", "train: 512", "train:1e3"])
def test_malformed_size_of_a_trained_tokenizer_is_refused(spec: str) -> None:
    problem = tokenizer_problem(spec, 4096)
    assert problem == f"{spec!r}: write a whole number of entries after 'train:', as in 'train:4096'"


def test_tokenizer_with_ids_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["<unk>", "a", "b"], ["</s>"])
    assert tokenizer_problem(str(tmp_path), 3) == (
        f"'{path}' has ids up to 3, but model.vocabulary is 3; raise model.vocabulary to 4 or more, "
        "or give a smaller tokenizer"
    )


def test_two_tokens_with_the_same_id_are_refused_by_name(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["<unk>", "a", "b"], ["</s>"])
    content = json.loads(path.read_text())
    content["model"]["vocab"]["b"] = content["model"]["vocab"]["a"]
    path.write_text(json.dumps(content))
    expected = f"'{path}' gives ['a', 'b'] the same id, 1; give another tokenizer"
    assert tokenizer_problem(str(path), 4096) == expected


def test_path_without_a_tokenizer_is_refused(tmp_path: Path, source: Path) -> None:
    assert "does not exist; write the path of a tokenizer.json" in str(tokenizer_problem("gpt2", 4096))
    assert "has no tokenizer.json; give one that has, or 'train:N'" in str(tokenizer_problem(str(tmp_path), 4096))
    with pytest.raises(UserError, match=r"data\.tokenizer: 'gpt2' does not exist"):
        load("gpt2", source)


def test_file_that_is_not_a_tokenizer_is_refused_without_the_library(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in ('{"model": ', "[]", "{}", '{"model": {"vocab": {}}}', '{"model": {"vocab": [1]}}', '{"model": 1}'):
        path.write_text(content)
        assert "is not a tokenizer.json as Hugging Face tokenizers writes it" in str(tokenizer_problem(str(path), 4096))
    path.write_bytes(b"\xff\xff")
    assert f"cannot read '{path}'" in str(tokenizer_problem(str(path), 4096))


def test_file_that_the_library_rejects_is_refused(tmp_path: Path, source: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": {"</s>": 0}}}))  # no merges: only the library sees it
    with pytest.raises(UserError, match="the tokenizers library rejects"):
        load(path, source)


def test_tokenizer_without_an_end_of_document_token_is_refused(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["<unk>", "a"], ["<s>"])
    problem = tokenizer_problem(str(path), 4096)
    assert problem == (
        f"'{path}' has no token that ends a document; looked for <|endoftext|>, <|end_of_text|>, </s>, <|im_end|>; "
        "add one of them, or give another tokenizer"
    )
