"""Runs, forks and sweeps that are started twice at the same moment: one goes on undisturbed, the other is refused."""

import shutil
import sys
import time
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.files.layout import METRICS
from recipes.lab.sweep import loop
from recipes.recipe.load import load_run, to_toml
from recipes.recipe.schema import Recipe
from recipes.training import build_run, run
from tests.processes import process_context
from tests.training import change, rows

pytestmark = pytest.mark.slow

TRIES = 3


def start_together(file: Path, place: Path, number: int) -> None:
    """Train as train.py does, but look at the folder and open the data only when both have come so far."""
    open_loader = build_run.open_loader

    def wait(*arguments: object, **options: object) -> object:
        (place / f"here-{number}").touch()
        while len(list(place.glob("here-*"))) < 2:
            time.sleep(0.01)
        return open_loader(*arguments, **options)  # type: ignore[arg-type]

    build_run.open_loader = wait  # type: ignore[assignment]
    with (place / f"error-{number}").open("w") as said:
        try:
            code = run.train(load_run(file), began=time.monotonic())
        except UserError as error:
            said.write(str(error))
            code = 2
    sys.exit(code)


def codes_of_two(file: Path, place: Path) -> dict[int, str]:
    """Exit code -> what was said, of two starts."""
    place.mkdir()
    both = [process_context().Process(target=start_together, args=(file, place, number)) for number in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    return {process.exitcode: (place / f"error-{number}").read_text() for number, process in enumerate(both)}


def write(recipe: Recipe, folder: Path) -> Path:
    file = folder / f"{recipe.run.name}.toml"
    file.write_text(to_toml(recipe))
    return file


@pytest.mark.parametrize("kind", ["run", "unsaved run", "fork"])
def test_of_two_starts_of_a_new_run_one_is_refused_and_the_other_undisturbed(
    kind: str, small: Recipe, tmp_path: Path
) -> None:
    recipe = change(small, run={"name": "double", "output": str(tmp_path / "runs"), "steps": 4})
    first = 1
    if kind == "unsaved run":
        recipe = change(recipe, checkpoint={"every": 0, "export_hf": False})
    if kind == "fork":
        trunk = change(recipe, run={"name": "trunk", "steps": 2})
        assert run_alone(write(trunk, tmp_path)) == 0
        recipe, first = change(recipe, run={"continue_from": str(trunk.run.folder)}), 3
    for attempt in range(TRIES):
        said = codes_of_two(write(recipe, tmp_path), tmp_path / f"attempt-{attempt}")
        assert set(said) == {0, 2}, said
        assert "double is in use: another process began this run while this one started" in said[2]
        assert [row["step"] for row in rows(recipe)] == [*range(first, 5)]
        assert not list(recipe.run.folder.parent.glob("double.*"))
        shutil.rmtree(recipe.run.folder)


def run_alone(file: Path) -> int | None:
    process = process_context().Process(target=_end_with_code, args=(file,))
    process.start()
    process.join(120)
    return process.exitcode


def _end_with_code(file: Path) -> None:
    sys.exit(run.train(load_run(file), began=time.monotonic()))


def test_a_sweep_does_not_set_aside_a_run_that_goes_on(small: Recipe, tmp_path: Path) -> None:
    from tests.recipes.files.test_lock import holder

    folder = tmp_path / "row"
    folder.mkdir()
    (folder / METRICS).write_text('{"step": 1}\n')
    with holder(folder), pytest.raises(UserError, match="row is in use: process"):
        loop._set_aside(folder)
    assert (folder / METRICS).exists()
    loop._set_aside(folder)
    assert not folder.exists() and (tmp_path / "row.1" / METRICS).exists()
