"""The recipes of published pretrainings say where each value comes from, fit on one screen, and are accepted."""

import re
from pathlib import Path

import pytest

from recipes.lab.plan.plan import Asked, plan, world_of
from recipes.recipe.load import CONFIGS, load
from recipes.recipe.stages import stages_of

PUBLISHED = sorted((CONFIGS / "published").glob("*.toml"))
EACH = pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)


def test_there_are_published_recipes() -> None:
    assert len(PUBLISHED) >= 10


@EACH
def test_each_line_has_its_source(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert len(lines) <= 60
    head = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    values = [line for line in lines if re.match(r"\w+ = ", line)]
    own = re.compile(rf'(name = "(?:batch_\w+|{re.escape(file.stem)})"|shuffle_tokens|until|batch = )')
    for line in values:
        sources = re.findall(r"\[(\d)\]", line.partition("#")[2])
        assert own.match(line) or sources or re.search("# (ours|the default)", line), line
        assert all(f"[{number}]" in head for number in sources), line


@EACH
def test_recipe_fits_the_gpus_that_it_names(file: Path) -> None:
    recipe = load(file, elsewhere=True)
    assert recipe.run.hardware
    for stage in stages_of(recipe):
        assert plan(stage.recipe, world_of(stage.recipe, Asked(file.name))).fits
