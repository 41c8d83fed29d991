"""Which slow tests `scripts/test.sh --changed` runs."""

import pytest

from tests.changes import changed_since, distances
from tests.sources import ROOT

pytestmark = pytest.mark.slow  # asks git


def slow_files() -> set[str]:
    return {file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("models/decoder.py", "tests/parallel/test_combinations.py"),
        ("parallel/passes.py", "tests/parallel/test_passes.py"),
        ("recipes/data/text/hub.py", "tests/recipes/training/test_trainer.py"),
        ("recipes/cluster/slurm.py", "tests/scripts/test_slurm.py"),
        ("recipes/evaluation/generate.py", "tests/scripts/test_generate.py"),
        ("scripts/run.sh", "tests/test_run.py"),
        ("scripts/setup.sh", "tests/test_run.py"),
        ("train.py", "tests/test_signals.py"),
        ("configs/smollm3_debug.toml", "tests/recipes/training/test_trainer.py"),
        ("tests/ill_train.py", "tests/test_hangs.py"),
        ("tests/preload.py", "tests/parallel/test_mesh.py"),
    ],
)
def test_a_change_reaches_what_imports_starts_or_reads_the_file(changed: str, reached: str) -> None:
    assert reached in distances([changed])


@pytest.mark.parametrize(
    ("changed", "spared"),
    [
        ("recipes/lab/sweep/grid.py", "tests/models/test_parity.py"),
        ("recipes/cluster/slurm.py", "tests/recipes/training/test_resume.py"),
        ("docs/data.md", "tests/recipes/data/test_training.py"),
        ("tests/scripts/test_generate.py", "tests/scripts/test_evaluate.py"),
    ],
)
def test_a_change_spares_what_does_not_use_the_file(changed: str, spared: str) -> None:
    assert spared not in distances([changed])


def test_a_changed_test_and_the_test_of_a_changed_files_name_come_before_all_others() -> None:
    found = distances(["tests/recipes/training/test_resume.py", "models/decoder.py"])
    assert found["tests/recipes/training/test_resume.py"] == found["tests/models/test_decoder.py"] == 0
    assert found["tests/models/test_parity.py"] > 0


@pytest.mark.parametrize("changed", ["pyproject.toml", "requirements.lock", "tests/conftest.py"])
def test_what_all_tests_depend_on_reaches_every_test(changed: str) -> None:
    assert slow_files() <= distances([changed]).keys()


def test_a_commit_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="no-such-commit"):
        changed_since("no-such-commit")
