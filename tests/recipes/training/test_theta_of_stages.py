"""A stage that raises rope_theta: what forks of its checkpoints and resumed runs train with."""

import shutil
import time
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.files.layout import step_folder
from recipes.recipe.load import load_run, to_toml
from recipes.recipe.schema import Recipe
from recipes.training import run
from recipes.training.fork import find_trunk
from recipes.training.run_folder import check_output_folder
from tests.processes import run_processes
from tests.training import change

pytestmark = pytest.mark.slow

USUAL, RAISED = 2e6, 9e6
STAGES = '[[stages]]\nname = "short"\nuntil = 2\n[[stages]]\nname = "long"\nuntil = 4\nmodel.rope_theta = 9e6\n'
STAGES += '[[stages]]\nname = "end"\n'


def write_recipe(
    recipe: Recipe, name: str, folder: Path, *, replaced: tuple[str, str] = ("", ""), end: str = ""
) -> Path:
    """The file of this recipe under another name, which omits the model's constants."""
    text = to_toml(change(recipe, run={"name": name})).partition("[[stages]]")[0].replace(*replaced)
    file = folder / f"{name}.toml"
    file.write_text("".join(line for line in text.splitlines(True) if not line.startswith("rope_theta")) + end)
    return file


@pytest.fixture(scope="module")
def trunk(small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A run of three stages, of which the second has another rope_theta."""
    recipe = change(small, run={"steps": 6}, checkpoint={"keep": 9})
    file = write_recipe(recipe, "trunk", tmp_path_factory.mktemp("trunk"), end=STAGES)
    assert run_processes(1, trained, file) == [0]
    return load_run(file).recipe


def trained(file: Path, *arguments: str) -> int:
    """Train as train.py does; the exit code."""
    return run.train(load_run(file, arguments), began=time.monotonic())


def theta_of(checkpoint: Path) -> float:
    from recipes.weights.description import read_description

    return read_description(checkpoint)[0].rope_theta


def test_each_checkpoint_says_what_it_was_trained_with(trunk: Recipe) -> None:
    assert [theta_of(step_folder(trunk.run.folder / "checkpoints", step)) for step in (2, 4, 6)] == [
        USUAL,
        RAISED,
        USUAL,
    ]


def look(file: Path, trunk: Recipe, step: int, *arguments: str) -> list[str]:
    """What is said of a fork of a step of the trunk with this recipe."""
    said: list[str] = []
    loaded = load_run(file, [f"--run.continue_from={trunk.run.folder}@{step}", *arguments])
    find_trunk(loaded.recipe, log=said.append, origins=loaded.origins)
    return said


def test_a_fork_does_not_silently_drop_what_a_stage_raised(trunk: Recipe, small: Recipe, tmp_path: Path) -> None:
    file = write_recipe(change(small, run={"steps": 6}), "fork", tmp_path)
    with pytest.raises(UserError) as caught:
        look(file, trunk, 4)
    assert "model.rope_theta: 9000000.0 in " in str(caught.value)
    assert "2000000.0 now, which the fork does not write itself; write 9000000.0 to go on" in str(caught.value)
    assert look(file, trunk, 2) == look(file, trunk, 4, "--model.rope_theta=9e6") == []


def test_a_file_that_repeats_what_the_trunk_has_elsewhere_does_not_choose_it(
    trunk: Recipe, small: Recipe, tmp_path: Path
) -> None:
    file = write_recipe(small, "same", tmp_path, replaced=("[model]", "[model]\n# HERE"))
    text = file.read_text().replace("# HERE", "rope_theta = 2e6")
    file.write_text(text)
    with pytest.raises(UserError, match=r"9000000.0 in .*, 2000000.0 now"):
        look(file, trunk, 4)


@pytest.mark.parametrize("step", [2, 4])
def test_a_fork_that_writes_its_own_value_trains_with_it_and_says_both(
    step: int, trunk: Recipe, small: Recipe, tmp_path: Path
) -> None:
    file = write_recipe(change(small, run={"steps": 6}), "own", tmp_path)
    then = RAISED if step == 4 else USUAL
    [line] = look(file, trunk, step, "--model.rope_theta=3e6")
    assert line.startswith("model.rope_theta is 3000000.0 from here on; ") and line.endswith(f"trained with {then}")
    if step == 4:
        assert look(file, trunk, 4, "--model.rope_theta=2e6")[0].startswith("model.rope_theta is 2000000.0 from here")


def test_a_fork_with_the_stages_of_its_trunk_takes_the_next_one_at_their_border(trunk: Recipe, tmp_path: Path) -> None:
    file = write_recipe(trunk, "staged", tmp_path, end=STAGES)
    [line] = look(file, trunk, 2)
    assert line.startswith("model.rope_theta is 9000000.0 from here on; ")


def test_a_fork_whose_file_lacks_the_trunks_softcap_is_refused(trunk: Recipe, small: Recipe, tmp_path: Path) -> None:
    file, arguments = write_recipe(small, "capped", tmp_path), ("--model.logit_softcap=30", "--run.steps=2")
    assert run_processes(1, trained, file, *arguments) == [0]
    capped = load_run(file, arguments).recipe
    text = to_toml(change(small, run={"name": "plain"}))
    file = tmp_path / "plain.toml"
    file.write_text("".join(line for line in text.splitlines(True) if not line.startswith("logit_softcap")))
    with pytest.raises(UserError, match=r"model.logit_softcap: 30.0 in .*, 0.0 now"):
        look(file, capped, 2)
    [line] = look(file, capped, 2, "--model.logit_softcap=20")
    assert line.startswith("model.logit_softcap is 20.0 from here on")


@pytest.mark.parametrize("name", ["from_weights", "smollm3_debug"])
@pytest.mark.parametrize("newest", [4, 2])
def test_a_run_from_weights_resumes_in_and_after_a_stage_that_raised_theta(
    newest: int, name: str, trunk: Recipe, tmp_path: Path
) -> None:
    start = step_folder(trunk.run.folder / "checkpoints", 2)
    whole = change(
        trunk, run={"name": f"tuned_{name}"}, model={"weights": str(start)}, data={"tokenizer": "from_weights"}
    )
    replaced = ('name = "smollm3_debug"', f'name = "{name}"')
    file = write_recipe(whole, whole.run.name, tmp_path, replaced=replaced, end=STAGES)
    if name == "from_weights":
        shape = file.read_text().partition("[model]")[2].partition("[data]")[0]
        kept = "".join(line for line in shape.splitlines(True) if line.startswith(("name", "weights")))
        file.write_text(file.read_text().replace(shape, f"\n{kept}\n"))
    recipe = load_run(file).recipe
    shutil.rmtree(recipe.run.folder, ignore_errors=True)
    assert run_processes(1, trained, file) == [0]
    for step in range(newest + 2, 8, 2):
        shutil.rmtree(step_folder(recipe.run.folder / "checkpoints", step))
    again = load_run(file).recipe
    check_output_folder(again)
    assert again == recipe and again.model.rope_theta == USUAL
