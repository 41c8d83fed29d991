"""A model with a softcap stays in its checkpoints: no Hugging Face format of its family can say it."""

from pathlib import Path

import pytest

from models.config import TextFacts
from models.hf import config_to_hf
from parallel.dist import start, stop
from parallel.errors import UserError
from recipes.recipe.load import load, to_toml
from recipes.recipe.schema import Recipe
from recipes.weights.convert import export_checkpoint
from recipes.weights.locate import find_weights
from tests.recipes.weights.test_hf_folder import write_random
from tests.training import DEBUG, change, train


@pytest.fixture(scope="module")
def capped(small: Recipe) -> Recipe:
    """A run that is finished."""
    recipe = change(small, run={"name": "capped", "steps": 2}, model={"logit_softcap": 4.0})
    world = start("cpu", seed=0)
    assert train(recipe, world) == 0
    stop()
    return recipe


@pytest.mark.slow
def test_a_checkpoint_keeps_the_softcap(capped: Recipe) -> None:
    assert find_weights(capped.run.folder).model.logit_softcap == 4.0


@pytest.mark.slow
def test_the_export_of_a_checkpoint_is_refused_and_leaves_nothing(capped: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"logit_softcap = 4\.0: a LlamaForCausalLM of transformers would ignore it"):
        export_checkpoint(capped.run.folder, tmp_path / "hf")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="would ignore"):
        config_to_hf(capped.model, TextFacts(32))


def test_a_run_that_would_be_exported_at_its_end_is_refused_at_its_start() -> None:
    with pytest.raises(UserError, match=r"cannot export model\.logit_softcap = 30\.0"):
        load(DEBUG, ["--checkpoint.export_hf=true", "--checkpoint.every=10", "--model.logit_softcap=30.0"])


def test_weights_trained_without_a_softcap_do_not_get_one(tmp_path: Path) -> None:
    write_random(tmp_path / "hf")
    text = '[model]\nname = "from_weights"\nweights = "hf"\nlogit_softcap = 30.0\n[data]\ntokenizer = "hf"\n'
    (tmp_path / "r.toml").write_text(text.replace('"hf"', f'"{tmp_path / "hf"}"'))
    with pytest.raises(UserError, match=r"logit_softcap = 30\.0(.|\n)*is 0\.0 in the weights"):
        load(tmp_path / "r.toml")


def test_recipes_of_older_versions_which_have_no_softcap_load(small: Recipe, tmp_path: Path) -> None:
    recipe = change(small, model={"name": "from_weights", "weights": "gone"})
    lines = to_toml(recipe).splitlines()
    (tmp_path / "recipe.toml").write_text("\n".join(line for line in lines if "logit_softcap" not in line))
    assert load(tmp_path / "recipe.toml", rules=False) == recipe
