"""What a run says about itself that its user would rather know before it ends."""

from pathlib import Path

import pytest

from parallel.dist import World, start, stop
from recipes.recipe.schema import Recipe
from tests.processes import run_processes, untimed
from tests.training import change, train

pytestmark = pytest.mark.slow

NOTHING_IS_SAVED = "nothing is saved: checkpoint.every = 0"


def run_aloud(recipe: Recipe) -> int:
    """Run a recipe in this process and print, as rank 0 of a run does; the exit code."""
    world: World = start("cpu", seed=0)
    code = train(recipe, world, silent=False)
    stop()
    return code


def log_of(recipe: Recipe) -> list[str]:
    assert run_processes(1, run_aloud, recipe) == [0]
    return [line.strip() for line in untimed(Path(recipe.run.folder / "log.txt").read_text()).splitlines()]


@pytest.fixture(scope="module")
def careless(small: Recipe) -> list[str]:
    """The log of a run without checkpoints whose tokenizer fills half of the vocabulary."""
    return log_of(
        change(small, run={"name": "careless", "steps": 2}, checkpoint={"every": 0}, model={"vocabulary": 1024})
    )


def test_a_run_without_checkpoints_says_so_before_its_first_step_and_at_its_end(careless: list[str]) -> None:
    said = [number for number, line in enumerate(careless) if line.startswith(NOTHING_IS_SAVED)]
    steps = [number for number, line in enumerate(careless) if line.startswith("step ")]
    assert len(said) == 2
    assert said[0] < steps[0] < steps[-1] < said[1]


def test_a_tokenizer_smaller_than_the_vocabulary_is_told(careless: list[str]) -> None:
    line = "the tokenizer has 512 entries, the model's vocabulary 1,024: 50% of the embedding is never trained"
    assert line in careless
