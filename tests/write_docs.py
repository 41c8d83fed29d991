"""Writes what the pages take from the code, `python -m tests.write_docs`: fields, memory, what was combined, plans.

docs/recipes.md and docs/recipe.schema.json come from the schema, docs/benchmarks/memory.md from configs/, the table of
docs/parallelism.md from its tests, the examples of docs/plan.md from the command. Imports no torch.
"""

import json
import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import chdir, redirect_stdout
from dataclasses import MISSING, Field, fields
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import wrap
from typing import Any

from pydantic import TypeAdapter

from models.sizes import SIZES
from recipes.files.markdown import between, markdown_table
from recipes.files.screen import say
from recipes.lab.plan.command import answer
from recipes.metrics.hardware import Hardware, hardware_of
from recipes.plan.memory import CUDA, FULL, NCCL, NCCL_PAIR, RESERVED, Prediction, predict
from recipes.recipe.fields import describe, field_docs, field_types, sections, toml
from recipes.recipe.load import CONFIGS, load
from recipes.recipe.schema import Recipe
from recipes.recipe.stage_tables import FIELDS, REASONS, SECTIONS, Until
from tests.parallel import combinations

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes.md"
SCHEMA = ROOT / "docs" / "recipe.schema.json"
PARALLELISM = ROOT / "docs" / "parallelism.md"
MEMORY = ROOT / "docs" / "benchmarks" / "memory.md"
PLAN = ROOT / "docs" / "plan.md"
COLUMNS = combinations.COLUMNS + combinations.STAGED + combinations.EXPERT
BEGIN, END = "<!-- Written by tests/write_docs.py. -->\n", "<!-- Written by tests/write_docs.py: end. -->\n"
STAGE_NAME = "^[A-Za-z][A-Za-z0-9_]*$"


def schema_text() -> str:
    """The JSON schema of a recipe's file. What spans several fields it cannot say: `train.py RECIPE --check` does."""
    keys = field_types()
    of_stages = {key for key in keys if (key.partition(".")[0] in SECTIONS or key in FIELDS) and key not in REASONS}
    stage = _object(
        "A part of the run: what differs in it from the rest of the recipe.",
        {
            "name": {"type": "string", "pattern": STAGE_NAME, "description": "Letters, digits and _."},
            "until": _of(Until)
            | {"description": "Its last step, or a share of run.steps; the last stage ends the run."},
            **_schema_tables(of_stages),
        },
    )
    stages = {"type": "array", "items": stage | {"required": ["name"]}, "description": "In the order of the run."}
    base = {"type": "string", "description": "File whose values this one overrides, relative to this one."}
    recipe = _object("One run.", {"base": base, **_schema_tables(set(keys)), "stages": stages})
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Shardwright recipe"}
    return json.dumps(about | recipe, indent=1) + "\n"


def _schema_tables(keys: set[str]) -> dict[str, Any]:
    """The sections of a recipe with those of their fields that are among these dotted keys."""
    found = {}
    for section, cls in sections().items():
        docs = field_docs(cls)
        of_section = {
            field.name: _of(field_types()[key]) | {"description": docs[field.name]} | _if_unset(section, field)
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


def _if_unset(section: str, field: Field) -> dict[str, Any]:
    """What the field is if no layer sets it; that of [model] comes from the size."""
    if section == "model":
        return {}
    value = _default_value(field)
    return {"default": list(value) if isinstance(value, tuple) else value}


def _default_value(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def with_fields(text: str) -> str:
    """The page about recipes with all sections between its marks."""
    return between(text, BEGIN, END, "\n".join(["", *(_section(*one) for one in sections().items()), _sizes(), ""]))


def _section(section: str, cls: type) -> str:
    docs = field_docs(cls)
    lines = [
        f"- `{field.name}{_default(section, field)}`{_allowed(section, field)}: {docs[field.name]}"
        for field in fields(cls)
    ]
    return "\n".join([f"## [{section}]", "", f"{cls.__doc__}", "", *lines, ""])


def _default(section: str, field: Field) -> str:
    """What follows the name of a field; nothing if the size has its value, or there is no default."""
    if section == "model" and field.name != "weights":
        return ""
    return f" = {toml(_default_value(field))}"


def _allowed(section: str, field: Field) -> str:
    """The type and range in brackets, unless the default shows them."""
    words = describe(field_types()[f"{section}.{field.name}"])
    if words in ("a string", "true or false") and _default(section, field):
        return ""
    words = re.sub("^(a|an|one of) ", "", words)
    return f" ({words}, required)" if (section, field.name) == ("model", "name") else f" ({words})"


def _sizes() -> str:
    lines = [f"- `{name}`: {size.num_params():,}" for name, size in SIZES.items()]
    return "\n".join(["## Model sizes", "", "Values of `model.name` and their parameters:", "", *lines, ""])


def with_combinations(text: str) -> str:
    """The page about parallelism with a new table between its marks."""
    return between(text, BEGIN, END, _combinations())


MEMORY_FACTS = """\
No recipe needs more than {full:.0%} of its GPU (a test). CUDA is assumed to take {cuda} GB and, on several processes,
each group of NCCL {pair:.2f} or {more:.2f} GB. The rest is for the {reserved:.0%} that the allocator reserves.
"""
MEMORY_COLUMNS = ("recipe", "GB", "of", "fullest at")
GROUPS = {
    "state": ("parameters", "moments", "parameters of experts", "moments of experts"),
    "gradients": ("accumulated gradients", "reduced gradients", "new gradients", "reduction"),
    "weights": ("gathered weights", "gathering"),
    "activations": ("activations",),
}


def predictions() -> dict[str, tuple[Recipe, Hardware, Prediction]]:
    """Predictions by path, for every recipe for GPUs with our decoder, on the hardware of its name or on eight H100."""
    by_path = {}
    for path in [*sorted(CONFIGS.glob("*.toml")), *sorted((CONFIGS / "benchmarks").glob("*.toml"))]:
        sizes = [size for size in SIZES if path.stem.startswith(size)]
        if not sizes:
            continue
        # Weights of others are not here.
        recipe = load(path, [f"--model.name={max(sizes, key=len)}", "--model.weights="], rules=False)
        if recipe.run.device == "cuda":
            hardware = hardware_of(path.stem) or Hardware("H100", processes=8)
            degrees = recipe.mesh.fit(hardware.processes, nodes=hardware.nodes)
            by_path[path.relative_to(CONFIGS).as_posix()] = recipe, hardware, predict(recipe, degrees)
    return by_path


def with_memory(text: str) -> str:
    """The page about memory with a new table between its marks."""
    facts = MEMORY_FACTS.format(full=FULL, cuda=CUDA / 1e9, pair=NCCL_PAIR / 1e9, more=NCCL / 1e9, reserved=RESERVED)
    columns = (*MEMORY_COLUMNS, *GROUPS, "other")
    rows = [_memory(name, hardware, prediction) for name, (_, hardware, prediction) in predictions().items()]
    table = markdown_table(columns, rows, align="lrrl" + "r" * (len(GROUPS) + 1))
    return between(text, BEGIN, END, "\n".join(["", facts, *table, "", ""]))


def _memory(name: str, hardware: Hardware, prediction: Prediction) -> list[str]:
    groups = [sum(prediction.pieces.get(piece, 0) for piece in pieces) for pieces in GROUPS.values()]
    return [
        f"`{name.removesuffix('.toml')}`",
        *(f"{size / 1e9:.1f}" for size in (prediction.peak, hardware.memory)),
        prediction.fullest.removeprefix("the backward pass of ").removeprefix("the gradient of the "),
        *(f"{size / 1e9:.1f}" for size in (*groups, prediction.peak - sum(groups))),
    ]


PRICED = ["configs/llama3_70b_32x8h100.toml", "--plan", "--tokens", "15T", "--price", "2.5"]
PLANS = {
    "one plan": PRICED,
    "several plans": [*PRICED, "--processes", "64,256,1024,4096"],
    "a search": ["configs/smollm3_3b_8xh100.toml", "--plan", "--search"],
}
"""Example of docs/plan.md -> the arguments of train.py."""


def with_plans(text: str) -> str:
    """The page about plans with new examples between its marks."""
    for example, arguments in PLANS.items():
        begin = f"<!-- Written by tests/write_docs.py: {example}. -->\n"
        with TemporaryFile("w+", encoding="utf-8") as screen, redirect_stdout(screen), chdir(ROOT):
            answer(arguments)
            screen.seek(0)
            lines = [f"    {line}".rstrip() for line in screen.read().splitlines()]
        text = between(text, begin, END, "\n".join(["", *lines, "", ""]))
    return text


def _combinations() -> str:
    """What each feature was tested with, as a table: rows are features, columns are axes."""
    parts = (combinations.CASES, combinations.PIPELINES, combinations.EXPERTS)
    cases = [case for some in parts for of in some.values() for case in of]
    rows = [(feature, *(_cell(feature, column, cases) for column in COLUMNS)) for feature in combinations.FEATURES]
    lines = markdown_table(("", *COLUMNS), rows, align="l" * (len(COLUMNS) + 1))
    meshes = {case.partition(":")[0] for case in cases}
    compiled, generated = [case for case in cases if "compile" in combinations.options_of(case)], combinations.GENERATED
    last = (
        f"{len(cases)} cases on {len(meshes)} meshes (tests/parallel/combinations.py). scripts/test.sh --all proves"
        f" {len(combinations.COVERING)} of them, at least one for each cell. Of the {len(compiled)} compiled cases, it"
        f" runs the generated code of {len(generated)} and the graphs of the others. pytest -m exhaustive proves all,"
        " and runs the code of all."
    )
    return "\n".join(["", *lines, "", *wrap(last, 120), ""])


def _cell(feature: str, column: str, cases: list[str]) -> str:
    axes = {"tensor"} & {*column.split()}
    if any((feature, axis) in combinations.REFUSED for axis in axes):
        return "refused"
    needed = {*combinations.FEATURES[feature]}
    matching = [
        case for case in cases if needed <= combinations.features_of(case) and column in combinations.columns_of(case)
    ]
    if not matching:
        of_others = needed <= combinations.OF_STAGES and column not in combinations.STAGED
        of_others |= needed <= combinations.OF_EXPERTS and column not in combinations.EXPERT
        return "" if of_others else "-"
    return min(map(combinations.precision_of, matching), key=combinations.PRECISIONS.index)


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    SCHEMA.write_text(schema_text())
    pages = {PAGE: with_fields, PARALLELISM: with_combinations, MEMORY: with_memory, PLAN: with_plans}
    for path, renewed in pages.items():
        path.write_text(renewed(path.read_text()))
    say(f"wrote {PAGE}, {SCHEMA}, {MEMORY}, the table of {PARALLELISM} and the examples of {PLAN}")
