"""Validation on texts of their own, and runs that do not validate."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallel.dist import World
from parallel.errors import UserError
from recipes.data.open_data import Data
from recipes.data.order import SequenceOrder
from recipes.data.sequences import Source
from recipes.evaluation.config import ValidationConfig
from recipes.recipe.load import load, to_toml
from recipes.recipe.rules import violations
from recipes.recipe.schema import Recipe
from recipes.weights.locate import InitialWeights
from tests.recipes.data.test_open_data import opened
from tests.recipes.data.texts import END, shards_in, tokenizer_for, work_on, write_rows
from tests.training import change, curve, rows, train


@pytest.fixture
def text(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", 300)
    return tmp_path / "rows.jsonl"


def one_document(path: Path, words: int = 400) -> Path:
    path.write_text(json.dumps({"text": "one and only document " * words}) + "\n")
    return path


def opened_with(text: Path, validation: dict[str, str], **changes: Any) -> Data:
    return opened(text.parent / "cache", {str(text): 1.0}, validation=validation, **changes)


def documents_in(data: Data, name: str) -> set[str]:
    sequences = data.validation[name]
    read = [sequences.rows(number, 1)[0].tolist() for number in range(sequences.available)]
    return {document for row in read for document in data.tokenizer.decode(row).split(END)[1:-1]}


@pytest.mark.slow
def test_validation_sources_are_read_whole_and_not_trained_on(text: Path) -> None:
    names = {}
    for name in ("web", "code"):
        write_rows(text.with_name(f"{name}.jsonl"), 60, name=name)
        names[name] = str(text.with_name(f"{name}.jsonl"))
    data = opened_with(text, names, validation_fraction=0.0)
    for name in names:
        found = documents_in(data, name)
        assert len(found) > 10
        assert all(document.startswith(f"{name} number") for document in found)
    data.training.sources[0].require(10**6)
    assert sum(shard.documents for shard in data.training.sources[0].shards.shards) == 300  # nothing is held out
    follower = opened_with(text, names, validation_fraction=0.0, writes=False, resumed_data_state=data.data_state)
    assert follower.data_state == data.data_state
    assert documents_in(follower, "web") == documents_in(data, "web")
    data.training.close()


@pytest.mark.slow
def test_one_document_is_enough_for_a_run_that_does_not_validate(tmp_path: Path) -> None:
    for fraction in (0.0, 0.01):
        data = opened_with(one_document(tmp_path / "one.jsonl"), {}, validation_fraction=fraction)
        assert data.validation == {}
        assert data.training.rows(0, 2).shape == (2, 33)
        data.training.close()


@pytest.mark.slow
def test_one_document_cannot_be_split_and_every_remedy_works(tmp_path: Path) -> None:
    path = one_document(tmp_path / "one.jsonl")
    with pytest.raises(UserError, match=r"no two are different, .*; or validate on another text .*, or not at all"):
        opened_with(path, {"": ""})
    write_rows(tmp_path / "other.jsonl", 50)
    opened_with(path, {"": str(tmp_path / "other.jsonl")}).training.close()
    opened_with(path, {}).training.close()


@pytest.mark.parametrize(("share", "bound"), [(1e-9, "or more"), (0.99999, "or less")])
def test_prepared_text_without_a_split_gets_a_remedy_that_works(text: Path, share: float, bound: str) -> None:
    write_rows(text, 5)
    folder = text.with_name("prepared")
    tokenizer = tokenizer_for(text)
    shards_in(folder, work_on(text, fraction=share, tokenizer=tokenizer))
    options: dict[str, Any] = {"tokenizer": tokenizer, "sequence_length": 1}
    with pytest.raises(UserError, match=r"prepare it again, in another folder, with --validation-fraction") as caught:
        opened(text.parent / "cache", {str(folder): 1.0}, validation_fraction=share, **options)
    better = float(str(caught.value).split("--validation-fraction ")[1].split(f" {bound}")[0])
    shards_in(text.with_name("again"), work_on(text, fraction=better, tokenizer=tokenizer))
    data = opened(text.parent / "cache", {str(text.with_name("again")): 1.0}, validation_fraction=better, **options)
    assert data.validation[""].available


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": ""}\n', "validation.source: .* holds no text: every document is empty"),
        ('{"text": "too short"}\n', r"the validation text of .* tokens, but one sequence of 32 .* or give more text"),
    ],
)
def test_validation_source_without_a_sequence_is_refused(text: Path, content: str, message: str) -> None:
    path = text.with_name("validation.jsonl")
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        opened_with(text, {"": str(path)})


@pytest.mark.slow
def test_validation_source_of_another_tokenizer_is_refused(text: Path) -> None:
    write_rows(text.with_name("other.jsonl"), 100, name="other")
    work = work_on(text.with_name("other.jsonl"))
    shards_in(text.with_name("prepared"), work)
    with pytest.raises(UserError, match=r"validation.source: .*prepared' holds tokens of another tokenizer than the"):
        opened_with(text, {"": str(text.with_name("prepared"))})
    data = opened_with(text, {"": str(text.with_name("prepared"))}, tokenizer=work.tokenizer)
    assert data.validation[""].available
    data.training.close()


@pytest.mark.slow
def test_validation_on_text_that_is_trained_on_is_called_that(text: Path) -> None:
    work = work_on(text)
    shards_in(text.with_name("prepared"), work)
    for source in (text, text.parent / "r*.jsonl", text.with_name("prepared")):
        lines: list[str] = []
        opened_with(text, {"": str(source)}, log=lines.append, tokenizer=work.tokenizer).training.close()
        assert any("WARNING: the run also trains on the validation source" in line for line in lines)


@pytest.mark.slow
def test_named_validation_losses_have_rows_and_their_texts_may_change(
    small: Recipe, text: Path, alone: World, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(text.with_name("web.jsonl"), 60, name="web")
    recipe = change(
        small,
        run={"name": "named", "steps": 2, "output": str(text.parent)},
        data={"source": str(text), "tokenizer": "train:300", "validation_fraction": 0.0},
        validation={"every": 2, "batches": 1, "sources": {"web": str(text.with_name("web.jsonl")), "own": str(text)}},
    )
    assert train(recipe, alone, silent=False) == 0
    assert [set(row) - {"step", "tokens", "time"} for row in rows(recipe)[-2:]] == [
        {"validation_loss/web"},
        {"validation_loss/own"},
    ]
    said = capsys.readouterr().out
    assert "step      2  validation loss of web " in said
    assert ", validation loss web " in said and ", validation loss own " in said
    write_rows(text.with_name("web.jsonl"), 90, name="another web")
    changed = change(recipe, run={"steps": 4})
    assert train(changed, alone) == 0
    other = change(recipe, run={"steps": 6}, validation={"sources": {}, "source": str(text.with_name("web.jsonl"))})
    assert train(other, alone) == 0
    assert "validation_loss" in rows(other)[-1]


BIASES = {
    "model": {"experts": 4, "experts_per_token": 2, "expert_width": 32, "router_bias": True},
    "experts": {"balance": "bias", "bias_rate": 0.01},
}


@pytest.mark.slow
@pytest.mark.parametrize("sections", [{}, BIASES], ids=["dense", "biases of experts"])
def test_run_without_validation_trains_as_the_same_run_with_it(
    sections: dict[str, Any], small: Recipe, text: Path, alone: World
) -> None:
    """Of more steps than batches are read ahead."""
    without = change(
        small,
        **sections,
        run={"name": "without", "steps": 8, "output": str(text.parent)},
        data={"source": str(text), "tokenizer": "train:300", "validation_fraction": 0.0},
        checkpoint={"every": 0},
    )
    write_rows(text.with_name("web.jsonl"), 60, name="web")
    validation = {"every": 1, "batches": 1, "source": str(text.with_name("web.jsonl"))}
    both = change(without, run={"name": "both"}, validation=validation)
    for recipe in (without, both):
        assert train(recipe, alone) == 0
    assert [row["loss"] for row in rows(both) if "loss" in row] == curve(without)


def problems(recipe: Recipe) -> dict[str, str]:
    return dict(violations(recipe, InitialWeights("", recipe.run.folder)))


def test_validation_without_text_names_what_to_write_and_that_is_accepted(text: Path) -> None:
    recipe = change(Recipe(), data={"source": str(text), "validation_fraction": 0.0})
    assert not problems(recipe)
    asked = change(recipe, validation={"every": 10, "sample_tokens": 5})
    found = problems(asked)
    assert set(found) == {"validation.every", "validation.sample_tokens"}
    assert "data.validation_fraction = 0 holds none out; write 0, or give a text" in found["validation.every"]
    assert not problems(change(asked, validation={"source": str(text)}))
    assert not problems(change(asked, validation={"every": 0, "sample_tokens": 0}))


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ({"source": "nowhere.jsonl"}, "does not exist"),
        ({"sources": {"web": "nowhere.jsonl"}}, "does not exist"),
        ({"sources": {"a b": "TEXT"}}, "names a column of metrics.jsonl; write letters, digits, and any of"),
        ({"sources": {"a/b": "TEXT"}}, "names a column of metrics.jsonl; write letters, digits, and any of"),
    ],
)
def test_bad_validation_sources_are_found_before_the_run(text: Path, validation: dict[str, Any], message: str) -> None:
    if "sources" in validation:
        validation = {
            "sources": {
                name: str(text) if source == "TEXT" else source for name, source in validation["sources"].items()
            }
        }
    (found,) = problems(change(Recipe(), data={"source": str(text)}, validation={"every": 1, **validation})).values()
    assert message in found
    assert not problems(change(Recipe(), data={"source": str(text)}, validation={**validation}))  # never read


def test_one_validation_source_and_several_replace_each_other(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(text.parent)
    start = f'[model]\nname = "smollm3_debug"\n[data]\nsource = "{text}"\n'
    Path("base.toml").write_text(f'{start}[validation]\nevery = 5\nsource = "{text}"\n')
    Path("child.toml").write_text(f'base = "base.toml"\n[validation.sources]\nweb = "{text}"\n')
    assert load("base.toml").validation == ValidationConfig(every=5, source=str(text))
    child = load("child.toml")
    assert child.validation == ValidationConfig(every=5, sources={"web": str(text)})
    assert load("child.toml", ["--validation.source", str(text)]).validation.texts == {"": str(text)}
    Path("again.toml").write_text(to_toml(child))
    assert load("again.toml") == child
    Path("both.toml").write_text(f'{start}[validation]\nsource = "{text}"\nsources = {{web = "{text}"}}\n')
    with pytest.raises(UserError, match=r"cannot be given together with validation\.source in the same place"):
        load("both.toml")


@pytest.mark.parametrize("tokens", [9, 16, 17, 23, 24, 25])
def test_a_text_that_is_read_once_is_cut_to_whole_sequences_with_their_last_target(tokens: int, tmp_path: Path) -> None:
    shards: Any = SimpleNamespace(tokens=tokens, complete=True, folder=tmp_path)
    cut = Source("held out", shards, SequenceOrder(8, 0, None), read_once=True).tokens
    assert cut is not None and cut % 8 == 0
    assert cut + 1 <= tokens < cut + 8 + 1  # the target of the last token exists, and no further sequence does
