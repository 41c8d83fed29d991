"""Silent faults that are planted into a copy of this code are noticed by `train.py RECIPE --prove`.

`pytest -m exhaustive tests/test_mutants.py` plants all of them, which takes two idle cores more than an hour.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import Mutant, plant, with_fault
from tests.mutants_mesh import MUTANTS as OF_MESH
from tests.mutants_training import MUTANTS as OF_TRAINING

MUTANTS = {mutant.name: mutant for mutant in (*OF_MESH, *OF_TRAINING)}


def test_every_silent_fault_can_be_planted() -> None:
    assert len(MUTANTS) == len(OF_MESH) + len(OF_TRAINING) >= 100
    for mutant in MUTANTS.values():
        with_fault(mutant)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MUTANTS)
def test_a_silent_fault_is_noticed(name: str, tmp_path: Path) -> None:
    require_noticed(MUTANTS[name], tmp_path / "planted")


def require_noticed(mutant: Mutant, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.proofs", mutant.case]
    said = subprocess.run(command, cwd=plant(mutant, folder), capture_output=True, text=True).stdout
    verdict = next((line for line in said.splitlines() if line.startswith(mutant.case)), said)
    assert "WRONG" in verdict and re.search(mutant.says, verdict), verdict
