"""Four proofs of the quick tier, which together have every axis, biases of experts, bad steps and resumes.

They are its only tests that start processes: without them, a fault of meshes, resumes or skipped steps would be noticed
by slow tests alone.
"""

from typing import Any

import pytest

from parallel.axes import NAMES
from tests.meshes import mesh_degrees
from tests.parallel.combinations import processes_of
from tests.processes import run_processes
from tests.proofs import recipe_of, verdicts

CASES = {2: ("1.1.2.1:gather,documents", "1.1.1.1.2.2:sigmoid"), 4: ("1.2.2.1:", "2.2.1.1.1:untied")}
"""Number of processes -> its cases."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("proofs")
    of_all = {}
    for processes, cases in CASES.items():
        recipes = [recipe_of(case, folder) for case in cases]
        of_all |= dict(zip(cases, run_processes(processes, verdicts, recipes)[0], strict=True))
    return of_all


@pytest.mark.proof
@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_a_recipe_of_two_axes_is_proved(case: str, found: dict[str, Any]) -> None:
    verdict = found[case]
    assert verdict["verdict"] == "proved", verdict["line"]
    assert verdict["processes"] == processes_of(case)


def test_the_four_recipes_together_have_every_axis() -> None:
    meshes = [mesh_degrees(case.partition(":")[0]) for cases in CASES.values() for case in cases]
    assert all(any(getattr(mesh, axis) > 1 for mesh in meshes) for axis in (*NAMES, "expert"))
