"""Checkpoints of every version of the format load for ever, to the bit."""

import json

import pytest

from models.hf import parameter_shapes
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.checkpoint.files import verify
from recipes.checkpoint.parameters import StoredParameters
from tests.recipes.checkpoint.golden import GOLDEN, PROGRESS, fingerprints
from tests.recipes.checkpoint.small import SMALL, build, snapshot, step

EXPECTED = json.loads((GOLDEN / "fingerprints.json").read_text())


pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(("name", "moments"), [("sharded", "float32"), ("bfloat16", "bfloat16")])
def test_a_run(name: str, moments: str) -> None:
    """Of two processes, and of one that keeps its moments in bfloat16."""
    checkpoints = Checkpoints(GOLDEN / name, keep=1)
    assert checkpoints.steps() == [2]
    run = build(seed=3, moments=moments)
    assert checkpoints.load(*run, step=2) == PROGRESS
    assert fingerprints(snapshot(*run)) == EXPECTED[name]
    assert step(*run, seed=2) < 4


def test_imported_parameters() -> None:
    stored = StoredParameters(GOLDEN / "imported", SMALL)
    found = {name: stored.read(name) for name, _ in parameter_shapes(SMALL)}
    assert fingerprints(found) == EXPECTED["imported"]


@pytest.mark.parametrize("name", ["imported", "sharded/step-00000002", "bfloat16/step-00000002"])
def test_they_are_intact(name: str) -> None:
    verify(GOLDEN / name)
