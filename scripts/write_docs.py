"""Write docs/recipes.md from the schema: `python scripts/write_docs.py`. Imports no torch."""

import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from models.sizes import SIZES  # noqa: E402
from recipes.fields import describe, field_docs, field_types, sections, toml  # noqa: E402

PAGE = ROOT / "docs" / "recipes.md"
HEAD = """\
# What a recipe can say

Written by `python scripts/write_docs.py` from `recipes/schema.py`, `models/config.py` and `parallel/config.py`; a test
keeps it fresh.

A recipe is a TOML file. Its values come from these layers, the first that says something wins:

1. the command line: `--section.field value`, lists as several words (`--optimizer.betas 0.9 0.98`), switches as
   `--compile.enabled true`;
2. the file;
3. the file that it names above its first section, `base = "other.toml"` (relative to itself), then that one's base, and
   so on;
4. for `[model]`, the size that `model.name` picks;
5. the defaults below.

`python train.py RECIPE --check` prints the result, or everything that is wrong with it. Values are strict: `1` is a
fine number, but `1e3` is no integer, `"3e-4"` no number, and an unknown key is an error.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_section(name, cls) for name, cls in sections().items()), _sizes()])


def _section(section: str, cls: type) -> str:
    docs = field_docs(cls)
    rows = [
        f"| `{field.name}` | {describe(field_types()[f'{section}.{field.name}'])} | {_default(section, field)} "
        f"| {docs[field.name]} |"
        for field in fields(cls)
    ]
    return "\n".join(
        [
            f"## [{section}]",
            "",
            f"{cls.__doc__}",
            "",
            "| Key | Value | Default | Meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _default(section: str, field: Field) -> str:
    if section == "model":
        return {"name": "required", "weights": '`""`'}.get(field.name, "from the size")
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return f"`{toml(default)}`"


def _sizes() -> str:
    rows = [f"| `{name}` | {size.num_params():,} |" for name, size in SIZES.items()]
    return "\n".join(["## Model sizes", "", "| `model.name` | Parameters |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
