"""Checkpoints of every version of the format must always load, bit for bit."""

import json

import pytest

from models.hf import parameter_shapes
from recipes.checkpoint.files import verify
from recipes.checkpoint.parameters import StoredParameters
from tests.recipes.checkpoint.golden import GOLDEN, PROGRESS, fingerprints
from tests.recipes.checkpoint.small import SMALL, build, checkpoints_in, snapshot, step

EXPECTED = json.loads((GOLDEN / "fingerprints.json").read_text())


pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(
    ("name", "moments"), [("sharded", "float32"), ("bfloat16", "bfloat16"), ("version2", "float32")]
)
def test_golden_run_loads(name: str, moments: str) -> None:
    checkpoints = checkpoints_in(GOLDEN / name, keep=1)
    assert checkpoints.steps() == [2]
    run = build(seed=3, moments=moments)
    assert checkpoints.load(*run, step=2) == PROGRESS
    assert fingerprints(snapshot(*run)) == EXPECTED[name]
    assert step(*run, seed=2) < 4


def test_golden_imported_parameters_load() -> None:
    stored = StoredParameters(GOLDEN / "imported", SMALL)
    found = {name: stored.read(name) for name, _ in parameter_shapes(SMALL)}
    assert fingerprints(found) == EXPECTED["imported"]


@pytest.mark.parametrize(
    "name", ["imported", "sharded/step-00000002", "bfloat16/step-00000002", "version2/step-00000002"]
)
def test_golden_checkpoint_is_intact(name: str) -> None:
    verify(GOLDEN / name)
