"""When a run begins anew: only if it never had a checkpoint, or its folder was moved away."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.dist import World
from parallel.errors import TemporaryError, UserError
from recipes.files import reading
from recipes.files.layout import SAVED
from recipes.recipe.load import to_toml
from recipes.recipe.schema import Recipe
from recipes.training.run_folder import check_output_folder
from tests.recipes.checkpoint.test_faults import break_calls
from tests.training import change, rows, run_all, small_recipe, train

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", (0, 0))


@pytest.fixture(scope="module")
def four_steps(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a run that has checkpoints of steps 2 and 4."""
    recipe = small_recipe(corpus, tmp_path_factory.mktemp("trained"), steps=4)
    assert run_all([recipe]) == [0]
    return Path(recipe.run.output)


@pytest.fixture
def trained(four_steps: Path, corpus: Path, tmp_path: Path, alone: World) -> Recipe:
    """The recipe of a copy of this run, to be trained to step 6."""
    shutil.copytree(four_steps, tmp_path / "runs")
    return small_recipe(corpus, tmp_path, steps=6)


def state(folder: Path) -> dict[str, bytes]:
    """The contents of all files, except the lock and the log, which a refused start may write."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".lock", "log.txt")
    }


def goes_on(recipe: Recipe, world: World) -> None:
    """The run resumes at step 4 and ends at step 6."""
    assert train(recipe, world) == 0
    assert [row["step"] for row in rows(recipe)] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in recipe.run.folder.parent.iterdir()] == [recipe.run.name]


def test_a_run_without_its_recipe_goes_on_with_what_the_error_says(
    trained: Recipe, tmp_path: Path, alone: World, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trained.run.folder / "recipe.toml"
    file.unlink()
    with pytest.raises(UserError) as caught:
        check_output_folder(trained)
    assert str(caught.value).endswith(
        f"python train.py RECIPE [--section.field value ...] --run.name OTHER --check > {file}"
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(trained))
    words = [sys.executable, "train.py", str(recipe), "--run.name", "OTHER", "--check"]
    with file.open("wb") as out:
        subprocess.run(words, cwd=Path(__file__).resolve().parents[3], stdout=out, check=True)
    goes_on(trained, alone)


@pytest.mark.parametrize(
    ("call", "on", "number"),
    [
        ("preadv", "/shard", errno.EIO),
        ("preadv", "/manifest", errno.ESTALE),
        ("open", "/data.json", errno.ESTALE),
        ("listdir", "checkpoints", errno.EACCES),
        ("listdir", "runs/", errno.EIO),
        ("stat", "step-", errno.ETIMEDOUT),
    ],
)
def test_a_fault_at_resume_ends_the_start_as_temporary_and_the_next_start_resumes(
    call: str, on: str, number: int, trained: Recipe, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(trained.run.folder)
    with monkeypatch.context() as patch:
        break_calls(patch, call, number, on=on)
        if call == "listdir":
            break_calls(patch, "scandir", number, on=on)
        for _ in range(2):
            with pytest.raises(TemporaryError, match=os.strerror(number)):
                train(trained, alone)
    assert state(trained.run.folder) == before
    goes_on(trained, alone)


@pytest.mark.parametrize("gone", ["all", "steps", "link"])
def test_a_run_whose_checkpoints_are_gone_is_refused_until_they_are_back(
    gone: str, trained: Recipe, alone: World, tmp_path: Path
) -> None:
    folder, safe = trained.run.folder / "checkpoints", tmp_path / "safe"
    shutil.move(folder, safe)
    if gone == "steps":
        folder.mkdir()
    elif gone == "link":
        folder.symlink_to(tmp_path / "not-mounted")
    before = state(trained.run.folder)
    what = "not-mounted, which does not exist" if gone == "link" else r"the newest was of step 4.*begin anew remove or"
    for _ in range(2):
        with pytest.raises(UserError, match=what):
            train(trained, alone)
    assert state(trained.run.folder) == before
    if gone != "all":
        folder.unlink() if gone == "link" else folder.rmdir()
    shutil.move(safe, folder)
    goes_on(trained, alone)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_begins_anew_in_another_folder(
    trained: Recipe, alone: World
) -> None:
    for shard in trained.run.folder.rglob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"is damaged: .*\n.*to begin anew remove or rename .*/smollm3_debug, or wr"
        ):
            train(trained, alone)
    assert len([*trained.run.folder.glob("checkpoints/*step-*")]) == 2
    trained.run.folder.rename(trained.run.folder.with_name("old"))
    assert train(trained, alone) == 0
    assert rows(trained)[0]["step"] == 1


def test_a_run_that_never_saved_begins_anew_and_keeps_its_results(corpus: Path, tmp_path: Path, alone: World) -> None:
    recipe = change(small_recipe(corpus, tmp_path, steps=3), checkpoint={"every": 0})
    assert train(recipe, alone) == 0
    (recipe.run.folder / "checkpoints" / ".partial-00000002").mkdir(parents=True)  # a kill in the first save
    assert train(change(recipe, checkpoint={"every": 2}), alone) == 0
    kept = recipe.run.folder.with_name(f"{recipe.run.name}.1")
    assert (kept / "metrics.jsonl").is_file() and (kept / "checkpoints" / ".partial-00000002").is_dir()


def test_a_run_folder_that_links_to_a_place_that_is_still_to_be_made_is_made_there(
    corpus: Path, tmp_path: Path, alone: World
) -> None:
    recipe = small_recipe(corpus, tmp_path, steps=2)
    recipe.run.folder.parent.mkdir()
    recipe.run.folder.symlink_to(tmp_path / "disk")
    assert train(recipe, alone) == 0
    assert (tmp_path / "disk" / "checkpoints" / "step-00000002").is_dir()


@pytest.mark.parametrize(("noted", "told"), [(b"2", False), (b"6", True), (b"", False), (b"\xff\x00", False)])
def test_only_a_newest_step_that_is_gone_is_told(
    noted: bytes, told: bool, trained: Recipe, alone: World, capfd: pytest.CaptureFixture[str]
) -> None:
    (trained.run.folder / SAVED).write_bytes(noted)  # "2": killed after the checkpoint of step 4, before this file
    assert train(trained, alone, silent=False) == 0
    out = capfd.readouterr().out
    assert ("the newest checkpoint was of step 6; the newest intact one now is of step 4" in out) == told
    assert out.count("the newest checkpoint was") == told
