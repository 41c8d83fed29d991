"""A JSON schema of recipes, with which editors complete and check them while they are written. Imports no torch."""

from dataclasses import MISSING, fields
from typing import Any

from pydantic import TypeAdapter

from recipes.fields import field_docs, field_types, sections
from recipes.stage_tables import FIELDS, REASONS, SECTIONS, Until

STAGE_NAME = "^[A-Za-z][A-Za-z0-9_]*$"


def recipe_schema() -> dict[str, Any]:
    """The schema of a recipe's file. What spans several fields it cannot say: `train.py RECIPE --check` does."""
    keys = field_types()
    of_stages = {key for key in keys if (key.partition(".")[0] in SECTIONS or key in FIELDS) and key not in REASONS}
    stage = _object(
        "A part of the run: what differs in it from the rest of the recipe.",
        {
            "name": {"type": "string", "pattern": STAGE_NAME, "description": "Letters, digits and _."},
            "until": _of(Until)
            | {"description": "Its last step, or a share of run.steps; the last stage ends the run."},
            **_tables(of_stages),
        },
    )
    stages = {"type": "array", "items": stage | {"required": ["name"]}, "description": "In the order of the run."}
    base = {"type": "string", "description": "File whose values this one overrides, relative to this one."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Shardwright recipe",
        **_object("One run.", {"base": base, **_tables(set(keys)), "stages": stages}),
    }


def _tables(keys: set[str]) -> dict[str, Any]:
    """The sections of a recipe with those of their fields that are among these dotted keys."""
    found = {}
    for section, cls in sections().items():
        docs = field_docs(cls)
        of_section = {
            field.name: _of(field_types()[key]) | {"description": docs[field.name]} | _default(section, field)
            for field in fields(cls)
            if (key := f"{section}.{field.name}") in keys
        }
        if of_section:
            found[section] = _object(str(cls.__doc__), of_section)
    return found


def _object(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "additionalProperties": False,
    }


def _of(annotation: Any) -> dict[str, Any]:
    """Type and range of a field."""
    return TypeAdapter(annotation).json_schema()


def _default(section: str, field: Any) -> dict[str, Any]:
    """What the field is if no layer sets it; that of [model] comes from the size."""
    if section == "model":
        return {}
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return {"default": list(default) if isinstance(default, tuple) else default}
