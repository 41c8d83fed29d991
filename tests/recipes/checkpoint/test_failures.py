"""Full disks, damaged and misnamed checkpoints: what is lost, and what is logged."""

import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn
from torch.optim import Optimizer

from parallel.dist import World
from parallel.errors import UserError
from recipes.checkpoint import checkpoints as checkpoints_module
from recipes.checkpoint import folder as folders
from recipes.checkpoint.files import read_manifest
from recipes.checkpoint.folder import newest_whole
from recipes.checkpoint.manifest import Damage
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import matrices_of
from recipes.recipe.schema import Recipe
from tests.full_disk import files_of_at_most
from tests.processes import PATIENCE
from tests.recipes.checkpoint.small import all_contents, checkpoints_in, contents, names, spoil, trained
from tests.training import change, training

Run = tuple[nn.Module, Optimizer]


pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def run() -> Run:
    return trained(3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk_costs_only_the_checkpoint_being_saved(asynchronous: bool, run: Run, tmp_path: Path) -> None:
    logged: list[str] = []
    checkpoints = checkpoints_in(tmp_path, keep=1, asynchronous=asynchronous, log=logged.append)
    checkpoints.save(*run, step=3)
    assert checkpoints.finish() == 3
    before = contents(checkpoints.path(3))
    with files_of_at_most(1024):
        checkpoints.save(*run, step=6)
        assert checkpoints.finish() == 3
    of_file = r"step      6  NOT SAVED: File too large \(.*\.safetensors\); older checkpoints are unchanged"
    assert re.fullmatch(of_file, logged[-1])
    assert names(tmp_path) == ["step-00000003"] and contents(checkpoints.path(3)) == before
    checkpoints.save(*run, step=9)
    assert checkpoints.finish() == 9 and names(tmp_path) == ["step-00000009"]


def test_checkpoint_is_never_overwritten(run: Run, tmp_path: Path) -> None:
    logged: list[str] = []
    checkpoints = checkpoints_in(tmp_path, keep=2, log=logged.append)
    checkpoints.path(6).mkdir(parents=True)  # empty: rename() would silently replace it
    for number in (3, 3, 6):
        checkpoints.save(*run, step=number)
    checkpoints.report()
    assert ["NOT SAVED" in line for line in logged] == [False, True, True]
    assert "never overwritten" in logged[1]
    assert names(tmp_path) == ["step-00000003", "step-00000006"] and not any(checkpoints.path(6).iterdir())


def damage(path: Path) -> None:
    spoil(next(path.glob("*.safetensors")))


def test_resume_sets_damaged_checkpoints_aside_and_loads_the_next_older_one(run: Run, tmp_path: Path) -> None:
    logged: list[str] = []
    checkpoints = checkpoints_in(tmp_path, keep=3, log=logged.append)
    for number in (1, 2, 3):
        checkpoints.save(*run, step=number, progress={"tokens": number})
    for number in (2, 3):
        damage(checkpoints.path(number))
    checkpoints.finish()
    logged.clear()
    checked: list[Path] = []
    assert checkpoints.resume(*run, step=3, check=checked.append) == {"tokens": 1, "step": 1}
    assert checked == [checkpoints.path(number) for number in (3, 2, 1)]
    assert names(tmp_path) == ["damaged-step-00000002", "damaged-step-00000003", "step-00000001"]
    assert "which belong to" in logged[0] and logged[0].endswith("; it is set aside as damaged-step-00000003")
    assert logged[-1] == f"resumed from {checkpoints.path(1)}"


def test_run_whose_checkpoints_are_all_damaged_is_refused_at_every_start_and_keeps_the_last_in_place(
    run: Run, tmp_path: Path
) -> None:
    checkpoints = checkpoints_in(tmp_path, keep=3)
    (tmp_path / "damaged-step-00000002").mkdir()
    for number in (1, 2):
        checkpoints.save(*run, step=number)
        damage(checkpoints.path(number))
    for start in (2, 1):
        assert newest_whole(tmp_path, log=lambda line: None) == start
        with pytest.raises(UserError, match=r"step-00000001/shard.* is damaged: .*\nthis run had checkpoints .* none"):
            checkpoints.resume(*run, step=start, check=lambda path: None)
    assert names(tmp_path) == ["damaged-step-00000002", "damaged-step-00000002.1", "step-00000001"]


def test_run_whose_checkpoints_are_all_set_aside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "damaged-step-00000002").mkdir()
    with pytest.raises(UserError, match=r"this run had checkpoints \(damaged-step-00000002\), .* another run.name"):
        newest_whole(tmp_path, log=lambda line: None)


def test_checkpoint_under_the_name_of_another_step_is_refused(run: Run, tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep=2)
    checkpoints.save(*run, step=1)
    checkpoints.path(1).rename(checkpoints.path(2))
    with pytest.raises(Damage, match="holds the checkpoint of another step: 1"):
        checkpoints.load(*run, step=2)


def set_free_space(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=size, total=1 << 50))


def test_number_of_checkpoints_that_fit_is_logged(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    parameters = list(run[0].parameters())
    size = sum(12 * parameter.numel() + 4 for parameter in parameters)
    checkpoints = checkpoints_in(tmp_path / "not" / "there" / "yet", keep=2, log=logged.append)
    for free in (10 * size, 2 * size):
        set_free_space(monkeypatch, free)
        checkpoints.require_space(parameters, OptimizerConfig())
    assert logged[0].endswith("each, the disk has space for 10")
    assert logged[1].endswith("each, the disk has space for 2; checkpoint.keep = 2 needs 3")
    checkpoints.save(*run, step=1)
    shard = next(checkpoints.path(1).glob("*.safetensors"))
    assert size < shard.stat().st_size < 1.5 * size + 4000


def test_disk_without_space_for_one_checkpoint_is_an_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = list(run[0].parameters())
    set_free_space(monkeypatch, sum(12 * parameter.numel() + 4 for parameter in parameters) - 1)
    with pytest.raises(UserError, match=r"a checkpoint needs 31.3 kB, but the disk of .* has 31.3 kB free"):
        checkpoints_in(tmp_path / "not" / "there" / "yet", keep=2).require_space(parameters, OptimizerConfig())


def test_left_overs_of_a_kill_count_as_free_space(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save deletes them; until then they may belong to another process."""
    set_free_space(monkeypatch, 0)
    logged: list[str] = []
    checkpoints = checkpoints_in(tmp_path, keep=2, log=logged.append)
    (tmp_path / ".partial-00000004").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(bytes(1 << 20))
    (tmp_path / ".partial-00000005").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="has 0 B free"):
        checkpoints.require_space(run[0].parameters(), OptimizerConfig())
    (tmp_path / ".partial-00000004" / "shard").write_bytes(bytes(40_000))
    checkpoints.require_space(run[0].parameters(), OptimizerConfig())
    assert "the disk has space for 1" in logged[0] and (tmp_path / ".partial-00000004" / "shard").exists()


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_logged_size_is_that_of_the_tensors_and_the_small_files(
    moments: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest and the headers of shards come on top."""
    sizes: list[int] = []

    def note(folder: Path, *, checkpoint_bytes: int, keep: int) -> str:
        sizes.append(checkpoint_bytes)
        return ""

    monkeypatch.setattr(folders, "disk_space", note)
    model, optimizer = trained(1, moments=moments, name=name)
    checkpoints = checkpoints_in(tmp_path, keep=2, files={"tokenizer.json": "ä" * 10_000})
    config = OptimizerConfig(name=name, state_dtype=cast(Any, moments))
    checkpoints.require_space(model.parameters(), config, matrices=matrices_of(optimizer))
    checkpoints.save(model, optimizer, step=1)
    manifest = read_manifest(checkpoints.path(1))
    numbers = sum(chunk.bytes for _, contents in all_contents(manifest) for _, chunk in contents.chunks)
    assert sizes == [numbers + 20_000]


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves wait for this before they give a checkpoint its name."""
    event, commit = threading.Event(), folders.commit

    def commit_later(folder: Path, step: int) -> None:
        assert event.wait(PATIENCE)
        commit(folder, step)

    monkeypatch.setattr(folders, "commit", commit_later)
    return event


def test_a_process_that_fails_does_not_wait_long_for_a_save_that_hangs(
    goes_on: threading.Event, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints_module, "FAILED_SECONDS", 0.1)
    checkpoints = checkpoints_in(tmp_path, keep=1, asynchronous=True)
    checkpoints.save(*run, step=3)
    assert checkpoints.finish(failed=True) is None and checkpoints.steps() == []
    goes_on.set()
    assert checkpoints.finish() == 3 and checkpoints.steps() == [3]


@pytest.mark.slow
def test_a_run_that_fails_waits_for_its_save(
    goes_on: threading.Event, alone: World, small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = change(small, run={"name": "fails"}, checkpoint={"asynchronous": True})
    with training(recipe, alone) as trainer, pytest.raises(RuntimeError, match="the lights went out"):
        step = trainer.take_step

        def fail_after_two_steps() -> object:
            if trainer.step < 2:
                return step()
            threading.Timer(0.3, goes_on.set).start()
            raise RuntimeError("the lights went out")

        monkeypatch.setattr(trainer, "take_step", fail_after_two_steps)
        trainer.run()
    assert trainer.checkpoints.steps() == [2]


def test_a_lowered_keep_makes_room_on_a_full_disk_and_keeps_what_it_resumed_from(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = checkpoints_in(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(*run, step=step)
    checkpoints.finish()
    parameters = list(run[0].parameters())
    for free, left in ((1 << 40, [1, 2, 3]), (0, [3])):
        lowered = checkpoints_in(tmp_path, keep=1, log=lambda text: None)
        set_free_space(monkeypatch, free)
        lowered.resume(*run, step=3, check=lambda path: None)
        with suppress(UserError):  # the faked disk stays full
            lowered.require_space(parameters, OptimizerConfig())
        assert lowered.steps() == left
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0, total=0))
    said: list[str] = []
    checkpoints_in(tmp_path, keep=1, log=said.append).require_space(parameters, OptimizerConfig())
    assert said[0].endswith(" each; the disk does not say how much space it has")
