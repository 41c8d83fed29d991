"""Proofs raise no false alarm: random recipes, and the small ones of configs/, are proved on two processes."""

from pathlib import Path

import pytest

from recipes.lab.prove.twin import twins_of
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from tests.processes import ROOT, run_processes
from tests.random_recipes import draw, prove_all
from tests.training import change

SEEDS = [0, 1, 2, 3, 4, 5]


def debug_recipes(folder: Path) -> list[Recipe]:
    """The small recipes, without those whose twins are twins of others."""
    seen, found = list[Recipe](), list[Recipe]()
    for path in sorted((ROOT / "configs").glob("*debug*.toml")):
        recipe = change(load(path, elsewhere=True), run={"output": str(folder)})
        twins = [*twins_of(recipe, folder, processes=2, nodes=1, on_gpu=False)]
        small = [change(twin.recipe, run={"name": ""}) for twin in twins]
        if any(twin not in seen for twin in small):
            found.append(recipe)
        seen += small
    return found


@pytest.mark.slow
def test_random_recipes_are_proved(tmp_path: Path) -> None:
    recipes = [change(draw(seed, 2), run={"output": str(tmp_path)}) for seed in SEEDS]
    lines, *_ = run_processes(2, prove_all, recipes)
    assert all("PROVED" in line for line in lines), lines


@pytest.mark.slow
def test_debug_recipes_are_proved(tmp_path: Path) -> None:
    lines, *_ = run_processes(2, prove_all, debug_recipes(tmp_path))
    assert all("PROVED" in line for line in lines), lines
