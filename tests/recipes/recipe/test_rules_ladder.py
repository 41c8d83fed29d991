"""Ladders that say nothing of a recipe."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from models.transformers_config import TransformersConfig
from parallel.errors import UserError
from recipes.recipe.load import load
from recipes.recipe.rules_ladder import conditions_of, ladder_for
from recipes.recipe.schema import Recipe
from tests.ladders import write_ladder
from tests.training import DEBUG, change

STAGES = """
[[stages]]
name = "first"
until = 0.5
[[stages]]
name = "last"
optimizer.lr = 1e-3
"""


@pytest.fixture
def recipe() -> Recipe:
    return load(DEBUG)


@pytest.fixture
def file(recipe: Recipe, tmp_path: Path) -> str:
    return write_ladder(tmp_path / "ladder.json", recipe)


def refused(file: str, *arguments: str) -> str:
    with pytest.raises(UserError) as error:
        load(DEBUG, [f"--validation.ladder={file}", *arguments])
    return " ".join(str(error.value).split())


def test_a_ladder_of_the_same_recipe_breaks_no_rule(file: str) -> None:
    other = ["--run.steps=7", "--optimizer.lr=1", "--model.layers=3", "--batch.global_batch_size=8"]
    assert load(DEBUG, [f"--validation.ladder={file}", *other]).validation.ladder == file


@pytest.mark.parametrize(
    ("argument", "difference"),
    [
        ("--data.tokenizer=train:512", 'data.tokenizer = "train:4096", but this recipe has "train:512"'),
        ("--data.document_mask=true", "data.document_mask = false, but this recipe has true"),
        ("--data.validation_fraction=0.1", "data.validation_fraction = 0.02, but this recipe has 0.1"),
        ("--batch.sequence_length=128", "batch.sequence_length = 256, but this recipe has 128"),
        ("--model.vocabulary=8192", "model.vocabulary = 4096, but this recipe has 8192"),
        ("--data.source=python-stdlib/json", 'data.mixture = [["python-stdlib", 1.0]], but this recipe has [["python-'),
        ("--validation.source=python-stdlib/json", 'validation.sources = {"" = ""}, but this recipe has {"" = "python'),
    ],
)
def test_a_ladder_of_other_data_is_refused(file: str, argument: str, difference: str) -> None:
    message = refused(file, argument)
    assert f"{file} predicts runs with {difference}" in message
    assert 'write the ladder.json of a ladder of this recipe, or ""' in message


def test_a_ladder_without_validations_is_refused(file: str) -> None:
    assert "is compared at each validation; write every = 1000" in refused(file, "--validation.every=0")


def test_a_file_that_is_no_ladder_is_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file or directory; write the ladder.json" in refused(str(tmp_path / "gone.json"))
    (tmp_path / "other.json").write_text(json.dumps({"recipe": 1}))
    assert "is not a ladder.json of scripts/ladder.py (recipe: " in refused(str(tmp_path / "other.json"))


def test_a_recipe_with_stages_is_refused(file: str, recipe: Recipe, tmp_path: Path) -> None:
    staged = tmp_path / "staged.toml"
    staged.write_text(f'base = "{DEBUG}"\nvalidation.ladder = "{file}"\n{STAGES}')
    with pytest.raises(
        UserError, match=r"predicts runs of one text and length, but this recipe has stages; write \"\""
    ):
        load(staged)
    with pytest.raises(UserError, match=r"trained in one stage, but this recipe has stages"):
        ladder_for(load(staged, rules=False), file)


def test_a_model_of_transformers_is_refused(file: str, recipe: Recipe) -> None:
    shape = TransformersConfig(**asdict(replace(recipe.model, name="from_config")))
    with pytest.raises(UserError, match="but this recipe has a model of transformers"):
        ladder_for(replace(recipe, model=shape), file)


def test_a_ladder_lies_beside_the_recipe_that_names_it(file: str, tmp_path: Path) -> None:
    (tmp_path / "large.toml").write_text(f'base = "{DEBUG}"\nvalidation.ladder = "ladder.json"\n')
    assert Path(load(tmp_path / "large.toml").validation.ladder).resolve() == Path(file)


def test_data_that_moved_are_the_same_and_shares_are_relative(recipe: Recipe) -> None:
    def found(*mixture: tuple[str, float]) -> dict[str, object]:
        validation = {"source": "/data/held/out.jsonl"}
        return conditions_of(change(recipe, data={"mixture": dict(mixture)}, validation=validation))

    here = found(("/data/web/train/*.parquet", 3.0), ("hf:org/web/train/name", 1.0))
    assert here["data.mixture"] == [["web/train/*.parquet", 0.75], ["hf:org/web/train/name", 0.25]]
    assert here["validation.sources"] == {"": "data/held/out.jsonl"}
    assert here == found(("/scratch/web/train/*.parquet", 0.75), ("hf:org/web/train/name", 0.25))
    assert here != found(("/data/code/train/*.parquet", 0.75), ("hf:org/web/train/name", 0.25))


def test_a_path_is_the_same_from_every_folder(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = conditions_of(change(recipe, data={"source": str(tmp_path / "text.txt")}))
    monkeypatch.chdir(tmp_path)
    assert conditions_of(change(recipe, data={"source": "text.txt"})) == there


def test_sources_of_the_same_last_names_keep_their_shares(recipe: Recipe) -> None:
    mixture = {"/a/web/train/x.txt": 0.7, "/b/web/train/x.txt": 0.3}
    assert conditions_of(change(recipe, data={"mixture": mixture}))["data.mixture"] == [
        ["web/train/x.txt", 0.7],
        ["web/train/x.txt", 0.3],
    ]


def test_a_ladder_without_conditions_says_nothing_of_a_recipe(file: str, recipe: Recipe) -> None:
    written = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps(written | {"conditions": {}}))
    with pytest.raises(
        UserError,
        match=r"is of another version, which differs in data\.mixture; run scripts/ladder\.py",
    ):
        ladder_for(recipe, file)


@pytest.mark.parametrize("option", ["--schedule.decay_steps=0", "--schedule.min_lr_ratio=1"])
def test_a_run_that_does_not_decay_has_another_ladder(file: str, option: str) -> None:
    assert "predicts runs with schedule.min_lr_ratio = 0.0, but this recipe has 1.0" in refused(file, option)


@pytest.mark.parametrize("option", ["--schedule.kind=cosine", "--optimizer.name=muon"])
def test_another_schedule_or_optimizer_has_another_ladder(file: str, option: str) -> None:
    with pytest.raises(UserError, match=f"predicts runs with {option[2:].partition('=')[0]} = "):
        ladder_for(load(DEBUG, [option, "--schedule.decay_steps=0"]), file)
