"""Silent faults: what `train.py RECIPE --prove` must notice, each planted alone into a copy of this code.

Tests of this code run on this code, so a fault that its authors did not think of is in none of them. Each of these
was made by somebody, in this or another training stack, and trained there without an error. They are data:
tests/mutants_mesh.py has those of the mesh. Imports no torch.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

from tests.processes import ROOT

NEEDED = ("configs", "models", "parallel", "recipes", "scripts", "tests", "train.py", "pyproject.toml")
"""What a copy of this code needs to train a recipe and to be tested."""


class Mutant(NamedTuple):
    """A fault with which a run ends well: its losses are finite, and nothing is raised."""

    name: str
    """What is wrong, as a sentence."""
    source: str
    """A published thread about a fault of this kind, or "own"."""
    file: str
    """Where it is planted, from the root of the checkout."""
    old: str
    """Text that occurs once in this file."""
    new: str
    """What stands there instead."""
    case: str
    """The smallest case that shows it, as in tests/parallel/combinations.py."""
    says: str = ""
    """A regular expression that the first line of the verdict matches."""


def plant(mutant: Mutant, folder: Path) -> Path:
    """Make the new `folder` a checkout that has the fault, by links to all other folders of this one. Returns it.

    Files are copied: Python looks for the modules of a script where a link leads to.
    """
    *parents, _ = Path(mutant.file).parts
    for depth in range(len(parents) + 1):
        here, there = ROOT.joinpath(*parents[:depth]), folder.joinpath(*parents[:depth])
        there.mkdir()
        for entry in here.iterdir():
            if entry.name == "__pycache__" or (depth == 0 and entry.name not in NEEDED):
                continue
            if entry.is_file():
                shutil.copy(entry, there)
            elif entry.name not in parents[depth : depth + 1]:
                (there / entry.name).symlink_to(entry)
    (folder / mutant.file).write_text(with_fault(mutant), encoding="utf-8")
    return folder


def with_fault(mutant: Mutant) -> str:
    """The text of the file with the fault. Raises AssertionError where the file has changed, so that the table must."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    count = text.count(mutant.old)
    assert count == 1, f"{mutant.name}: {mutant.file} has {count} times the text {mutant.old!r}; correct its entry"
    return text.replace(mutant.old, mutant.new)
