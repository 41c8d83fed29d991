"""docs/recipe.schema.json: it is up to date, accepts what loads, and refuses what does not."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from recipes.recipe.fields import field_docs, field_types, sections
from recipes.recipe.load import CONFIGS
from tests import write_docs

ROOT = Path(__file__).resolve().parents[3]
RECIPES = [*sorted(CONFIGS.glob("*.toml")), *sorted((CONFIGS / "benchmarks").glob("*.toml"))]
"""All of configs/ but configs/sweeps/, whose files name recipes."""


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="the schema is tested with the package jsonschema")
    schema = json.loads((ROOT / "docs" / "recipe.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_schema_is_up_to_date() -> None:
    assert write_docs.SCHEMA.read_text() == write_docs.schema_text(), "run python -m tests.write_docs"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_in_configs_follows_the_schema(validator: Any, path: Path) -> None:
    errors = [error.message for error in validator.iter_errors(tomllib.loads(path.read_text()))]
    assert not errors


def test_schema_describes_every_field(validator: Any) -> None:
    tables = validator.schema["properties"]
    for key in field_types():
        section, _, name = key.partition(".")
        assert tables[section]["properties"][name]["description"] == field_docs(sections()[section])[name]


@pytest.mark.parametrize(
    "text",
    [
        "optimiser = {}",
        "[optimizer]\nleraning_rate = 1e-3",
        '[optimizer]\nlr = "3e-4"',
        "[optimizer]\nlr = -1",
        "[optimizer]\nbetas = [0.9]",
        "[run]\nsteps = 0",
        "[run]\nsteps = 1.5",
        '[run]\nname = ""',
        '[compile]\nenabled = "yes"',
        '[fsdp]\nparam_dtype = "float16"',
        "[data]\nvalidation_fraction = 1.0",
        '[data.mixture]\n"web" = 0',
        "base = 3",
        "[[stages]]\nuntil = 10",
        '[[stages]]\nname = "a b"',
        '[[stages]]\nname = "a"\nuntil = 1.5',
        '[[stages]]\nname = "a"\nrun.seed = 3',
        '[[stages]]\nname = "a"\ndata.tokenizer = "other"',
    ],
)
def test_schema_refuses_what_would_not_load(validator: Any, text: str) -> None:
    assert not validator.is_valid(tomllib.loads(text))


def test_schema_accepts_stages(validator: Any) -> None:
    text = '[[stages]]\nname = "a"\nuntil = 0.5\n[[stages]]\nname = "b"\nbatch.sequence_length = 64\nmesh.context = 2'
    assert validator.is_valid(tomllib.loads(text))
