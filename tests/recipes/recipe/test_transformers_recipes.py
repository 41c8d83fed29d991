"""Recipes whose model a config.json defines: our decoder where it can, else transformers, or one clear error."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from models.config import TextFacts
from models.hf import config_to_hf
from models.hf_config import config_to_transformers
from models.sizes import SIZES
from models.transformers_config import TransformersConfig
from parallel.errors import UserError
from recipes.recipe.load import load, to_toml
from recipes.recipe.schema import Recipe
from recipes.weights.description import read_description
from tests.families import FAMILIES
from tests.training import DEBUG

SMALL = {"data.tokenizer": "train:300", "batch.sequence_length": "32", "data.source": "python-stdlib"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


OURS = ("qwen3", "mistral")
"""Families that our decoder computes."""


def write_config(name: str = "gpt2", file: str = "config.json", **changes: Any) -> None:
    Path(file).write_text(json.dumps(FAMILIES[name] | {"vocab_size": 512} | changes))


def recipe_of(*arguments: str, name: str = "from_config", **fields: str) -> Recipe:
    Path("r.toml").write_text(f'base = "{DEBUG}"\n[model]\nname = "{name}"\nconfig = "config.json"\n')
    given = [word for key, value in (SMALL | fields).items() for word in (f"--{key}", value)]
    return load("r.toml", [*given, *arguments])


def refused(*arguments: str, **fields: str) -> str:
    with pytest.raises(UserError) as error:
        recipe_of(*arguments, **fields)
    return " ".join(str(error.value).split())


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith(("t5", *OURS))])
def test_a_config_of_another_family_becomes_a_model_of_transformers(name: str) -> None:
    write_config(name)
    model = recipe_of().model
    assert isinstance(model, TransformersConfig) and model.settings == json.loads(Path("config.json").read_text())
    assert (model.layers, model.width, model.heads, model.vocabulary) == (2, 64, 4, 512)
    assert f"model_type = '{FAMILIES[name]['model_type']}'" in model.computed_by


def test_a_config_alone_is_trained_by_our_decoder_where_it_supports_all_of_it() -> None:
    from tests.recipes.weights.test_hf_folder import FACTS

    size = SIZES["llama3_debug"]
    Path("config.json").write_text(json.dumps(config_to_hf(size, FACTS)))
    model = recipe_of(**{"data.tokenizer": "train:4096"}).model
    assert model == replace(size, name="from_config", config="config.json") and "our decoder" in model.computed_by


def test_a_llama_with_biases_goes_to_transformers_with_the_reason() -> None:
    write_config("mistral", model_type="llama", attention_bias=True)
    model = recipe_of().model
    assert isinstance(model, TransformersConfig)
    assert "attention_bias = True: biases in the attention projections is not supported" in model.computed_by


def test_a_folder_is_as_good_as_its_config_json() -> None:
    write_config()
    assert recipe_of("--model.config", ".").model == replace(recipe_of().model, config=".")


def test_a_config_with_the_family_alone_has_the_defaults_of_transformers() -> None:
    Path("config.json").write_text('{"model_type": "gpt2"}')
    model = recipe_of().model
    assert (model.layers, model.width, model.heads, model.vocabulary) == (12, 768, 12, 50257)
    assert model.num_params() == 124_439_808


def test_the_resolved_recipe_holds_no_shape_and_loads_back() -> None:
    write_config()
    recipe = recipe_of("--model.dropout", "true")
    text = to_toml(recipe)
    assert '[model]\nname = "from_config"\nweights = ""\nconfig = "config.json"\ndropout = true\n' in text
    Path("resolved.toml").write_text(text)
    assert load("resolved.toml") == recipe


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "shape": (("--model.layers", "3"), "model.layers = 3 (command line) belongs to config.json for a model of"),
    "size": (("--model.name", "smollm3_debug"), 'has no effect with name = "smollm3_debug"; remove it'),
    "weights": (("--model.weights", "."), "has no effect with model.weights"),
    "no config": (("--model.config", ""), 'model.config (command line) is missing; name = "from_config" takes its'),
    "nowhere": (("--model.config", "x"), "x does not exist; write the path of a config.json, or of a folder with one"),
    "hub": (("--model.config", "openai-community/gpt2"), "hf download openai-community/gpt2 config.json"),
    "misspelled": (("--model.name", "from_confg"), 'did you mean "from_config"?'),
    "positions": (("--batch.sequence_length", "128"), "exceeds the 64 positions of the model; write at most that"),
    "kernel": (("--attention.backend", "flash3"), 'cannot use "flash3"'),
    "tokenizer": (("--data.tokenizer", "train:600"), "but vocab_size in config.json is 512"),
    "blocks": (("--activation_checkpointing.mode", "full", "--activation_checkpointing.blocks", "3"), "the 2 blocks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_model_of_transformers_cannot_be_asked_for_is_refused(case: str) -> None:
    write_config()
    arguments, said = WRONG[case]
    assert said in refused(*arguments)


def test_our_decoder_has_no_dropout() -> None:
    write_config()
    said = refused("--model.name", "smollm3_debug", "--model.config", "", "--model.dropout", "true")
    assert "our decoder has no dropout; write dropout = false" in said


def test_a_family_that_transformers_lacks_is_refused_with_its_version() -> None:
    write_config(model_type="gpt9")
    assert "model_type = 'gpt9': transformers 5" in refused()


def test_missing_transformers_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    write_config()
    monkeypatch.delitem(sys.modules, "models.transformers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert 'transformers 5 or later is not installed; pip install "transformers>=5"' in refused()


@pytest.mark.parametrize("definition", ["{", "[]", '{"model_type": "gpt9"}', '{"vocab_size": 3}'])
def test_a_checkpoint_whose_definition_is_damaged_or_unknown_is_refused(definition: str) -> None:
    write_config()
    content = {"model": asdict(replace(recipe_of().model, definition=definition)), "text": asdict(TextFacts(8))}
    Path("model.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"model\.json does not describe a model of this version"):
        read_description(Path())


@pytest.mark.parametrize("name", ["from_weights", "from_config"])
def test_an_export_keeps_the_tokens_of_the_weights_and_forgets_those_of_a_config_alone(
    name: str,
) -> None:
    write_config(dtype="bfloat16", pad_token_id=0)
    definition = json.loads(Path("config.json").read_text())
    model = recipe_of().model
    assert isinstance(model, TransformersConfig)
    trained = config_to_transformers(replace(model, name=name), TextFacts(32, eos_token_id=2), dtype="float32")
    changed = {"architectures": ["GPT2LMHeadModel"], "dtype": "float32"}
    lost = {} if name == "from_weights" else {"bos_token_id": None, "pad_token_id": None}
    assert trained == definition | changed | lost
