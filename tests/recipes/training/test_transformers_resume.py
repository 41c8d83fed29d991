"""Runs of models of transformers that stop and resume, bit-equal with dropout too, or on more processes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from recipes.training.run_folder import check_output_folder
from tests.families import FAMILIES
from tests.processes import run_processes
from tests.recipes.training.test_resume import RESHARDING_TOLERANCE, folder_of, run_and_copy
from tests.training import change, curve, largest_gap, run_all, small_recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
HALF, STEPS = 2, 4
MODELS = ("gpt2", "t5")


def recipe_for(model: str, folder: Path, corpus: Path) -> Recipe:
    """As the small recipe; a T5 learns the pairs of its debug recipe."""
    config = folder / f"{model}.json"
    config.write_text(json.dumps(FAMILIES[model] | {"vocab_size": 512, "pad_token_id": 0}))
    file = folder / f"{model}.toml"
    file.write_text(f'base = "{ROOT}/configs/{model}_debug.toml"\n[model]\nconfig = "{config}"\n')
    small, theirs = small_recipe(corpus, folder), load(file, rules=False)
    data = replace(theirs.data, tokenizer="train:512", cache=small.data.cache)
    data = replace(data, source=str(ROOT / data.source) if data.prompt_field else small.data.source)
    return change(replace(small, model=theirs.model, data=data), run={"steps": STEPS, "device": "cpu"})


@pytest.fixture(scope="module")
def continued(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recipe]:
    """Of each model a whole run with dropout and one without, and copies of their first halves that went on: with
    dropout on one process, and without on two."""
    folder = tmp_path_factory.mktemp("transformers")
    recipes, first, copies, same, two = {}, [], [], [], []
    for model in MODELS:
        for dropout in (False, True):
            name = f"{model}-dropout" if dropout else model
            recipe = change(recipe_for(model, folder, corpus), run={"name": name}, model={"dropout": dropout})
            half = change(recipe, run={"name": f"{name}-half", "steps": HALF})
            first += [recipe, half]
            again = change(recipe, run={"name": f"{name}-{'same' if dropout else 'two'}"})
            copies.append((folder_of(recipe, half.run.name), folder_of(recipe, again.run.name)))
            (same if dropout else two).append(again)
            recipes[again.run.name] = again
            recipes[name] = recipe
    assert set(run_and_copy(first, copies, same)) == {0}
    assert run_processes(2, run_all, two) == [[0] * len(two)] * 2
    return recipes


@pytest.mark.parametrize("model", MODELS)
def test_a_continued_run_is_bit_equal_with_dropout_too(model: str, continued: dict[str, Recipe]) -> None:
    whole, same = continued[f"{model}-dropout"], continued[f"{model}-dropout-same"]
    assert len(curve(whole)) == STEPS and curve(same) == curve(whole)
    shard = f"checkpoints/step-{STEPS:08d}/shard-00000-of-00001.safetensors"
    assert (same.run.folder / shard).read_bytes() == (whole.run.folder / shard).read_bytes()


@pytest.mark.parametrize("model", MODELS)
def test_dropout_changes_what_is_learned(model: str, continued: dict[str, Recipe]) -> None:
    assert curve(continued[model]) != curve(continued[f"{model}-dropout"])


@pytest.mark.parametrize("model", MODELS)
def test_a_run_continued_on_two_processes_repeats_the_rest_of_the_curve(
    model: str, continued: dict[str, Recipe]
) -> None:
    assert largest_gap(curve(continued[f"{model}-two"]), curve(continued[model])) < RESHARDING_TOLERANCE


def test_a_run_resumes_without_its_config_json_and_refuses_another(
    continued: dict[str, Recipe], tmp_path: Path
) -> None:
    recipe = continued["gpt2"]
    file = tmp_path / "r.toml"
    shutil.copy(recipe.run.folder / "recipe.toml", file)
    here = ["--run.steps", "9"]
    assert load(file, [*here, "--model.config", str(tmp_path / "gone.json")]).model.layers == recipe.model.layers
    other = tmp_path / "moved.json"
    definition = json.loads(Path(recipe.model.config).read_text())
    other.write_text(json.dumps(definition))
    check_output_folder(load(file, [*here, "--model.config", str(other)]))
    other.write_text(json.dumps(definition | {"n_layer": 3, "n_head": 2}))
    with pytest.raises(UserError) as error:
        load(file, [*here, "--model.config", str(other)])
    assert "were trained with n_layer = 2, n_head = 4; restore that" in " ".join(str(error.value).split())
