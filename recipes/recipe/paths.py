"""The paths in a recipe: which fields hold them, and where a relative one is looked for. Imports no torch."""

import glob
import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from models.config import FROM_CONFIG, FROM_WEIGHTS
from recipes.files.reading import is_remote, path_problem, shorten, user_path
from recipes.recipe.fields import Problem, Written, toml

ROOT = Path(__file__).resolve().parents[2]
MODULES = "plugins.modules"
READ = (
    *("model.weights", "model.config", "data.source", "data.mixture", "data.tokenizer", "data.chat_template"),
    *(
        MODULES,
        "validation.source",
        "validation.sources",
        "validation.tasks",
        "validation.ladder",
        "metrics.calibrated_by",
    ),
)
"""Fields whose paths are read."""
WRITTEN = {"run.output": 600, "data.cache": 600, "run.name": 0, "run.continue_from": 0}
"""Fields whose paths are relative to the current folder, as runs are -> the bytes that names inside it need."""
NO_PATHS = ("hf:", "train:", "python-stdlib", FROM_WEIGHTS, FROM_CONFIG)
"""What else these fields may say, by its beginning."""


def settle_paths(written: Written) -> list[Problem]:
    """Replace the relative paths to read among its values by where they are; returns what is wrong with others, which
    are left out."""
    problems = []
    for key in [key for key in (*READ, *WRITTEN) if key in written.values]:
        value, origin = written.values[key], written.origins[key]
        texts = [value] if isinstance(value, str) else value.values() if key == "validation.sources" else value
        paths = [text for text in texts if is_path(text, key)]
        wrong = next(filter(None, (path_problem(path, inside=WRITTEN.get(key, 0)) for path in paths)), "")
        # Here, because commands that ask no rules write there too.
        if key == "run.name" and ("/" in value or value in (".", "..")):
            wrong = 'is the name of the run folder inside run.output; write a name without "/"'
        if wrong:
            problems.append(Problem(written.prefix + key, wrong, shorten(toml(value)), origin))
            written.remove(key)
        elif key in READ:
            found = module_at if key == MODULES else lambda path, origin: located(path, beside(origin))
            written.values[key] = _replaced(value, {path: found(path, origin) for path in paths})
    return problems


def beside(origin: str) -> Path:
    """The folder of what wrote a value: a file, a table of one, or the command line."""
    return Path(origin.rpartition(".toml")[0]).parent if ".toml" in origin else ROOT


def module_at(module: str, origin: str) -> str:
    """A module of a plug-in as all programs find it: a file with its whole path. origin: what wrote it."""
    return str(user_path(located(module, beside(origin))).absolute()) if module.endswith(".py") else module


def is_path(text: str, key: str) -> bool:
    """Whether this value of this field may be the path of a file or folder."""
    if key == MODULES:
        return text.endswith(".py")
    if key == "validation.tasks":
        return "/" in text or text.endswith((".yaml", ".yml"))
    if key in ("run.output", "data.cache"):  # an address will not do
        return True
    return not is_remote(text) and not text.startswith(NO_PATHS)


def _replaced(value: Any, found: Mapping[str, str]) -> Any:
    """A text, a tuple of them, or a table with them as its keys or its values, with others for some of them."""
    if isinstance(value, dict):
        new = {found.get(key, key): found.get(item, item) for key, item in value.items()}
        return new if len(new) == len(value) else value
    return found.get(value, value) if isinstance(value, str) else tuple(found.get(item, item) for item in value)


def located(text: str, beside: Path) -> str:
    """A relative path to read: where it is in the current folder, else beside the file that names it, else in the
    checkout; unchanged if it is in none. Of a glob, a match decides, or the part before "**"."""
    stated, name = re.fullmatch(r"(u?int\d+:)?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if stated:  # the type of the tokens of a file
        return f"{stated}{located(name, beside)}"
    pattern = Path(*takewhile(lambda part: part != "**", Path(text).parts))

    def is_in(folder: Path) -> bool:
        return os.path.lexists(folder / text) or any(glob.iglob(str(pattern), root_dir=folder))

    if text.startswith("~") or is_in(Path()):
        return text
    for folder in (beside, ROOT):
        if is_in(folder):
            relative = os.path.relpath(folder / text)
            return os.path.normpath(folder / text) if relative.startswith("..") else relative
    return text
