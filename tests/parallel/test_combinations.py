"""Every combination of the mesh's axes trains to the numbers of one process: the short proof of each case's twin."""

from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.recipe.load import load
from tests import write_docs
from tests.parallel.combinations import (
    CASES,
    EXPERTS,
    FEATURES,
    PIPELINES,
    REFUSED,
    options_of,
    processes_of,
    sections_of,
)
from tests.processes import run_processes
from tests.training import DEBUG
from tests.twins import Compared, compare_cases, each_case, require_proved


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return Compared(CASES, tmp_path_factory.mktemp("twins"))


@pytest.mark.slow
@pytest.mark.parametrize("case", each_case(CASES))
def test_a_mesh_trains_to_the_numbers_of_one_process(case: str, compared: Compared) -> None:
    require_proved(compared[case])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [c for some in (CASES, PIPELINES, EXPERTS) for cases in some.values() for c in cases if "compile" in options_of(c)],
)
def test_generated_code_of_a_mesh_trains_to_the_numbers_of_one_process(case: str, tmp_path: Path) -> None:
    [comparison], *_ = run_processes(processes_of(case), compare_cases, [case], tmp_path, [case])
    require_proved(comparison)


@pytest.mark.parametrize(("feature", "axis"), REFUSED)
def test_what_the_table_of_the_page_calls_refused_is_refused(feature: str, axis: str) -> None:
    options = ",".join(FEATURES[feature])
    float8 = sections_of(f"1.1.1.1:{options}")["float8"]
    arguments = [word for name, value in float8.items() for word in (f"--float8.{name}", str(value).lower())]
    with pytest.raises(UserError, match=rf"(?s){REFUSED[feature, axis]}.*mesh.{axis} > 1"):
        load(DEBUG, [f"--mesh.{axis}", "2", *arguments])


def test_the_table_of_the_page_is_up_to_date() -> None:
    text = write_docs.PARALLELISM.read_text(encoding="utf-8")
    assert text == write_docs.with_combinations(text), "run python -m tests.write_docs"
