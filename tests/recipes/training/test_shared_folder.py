"""Two users who share a run's folder by their group."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.files.lock import LOCK, FolderLock
from recipes.recipe.schema import Recipe, RunConfig
from recipes.training.run_folder import check_output_folder
from tests.recipes.files.test_lock import holder

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")]

GROUP, OTHER = 3000, 2002


@pytest.fixture
def folder() -> Iterator[Path]:
    """A run's folder that the group may write to, where others may look."""
    place = Path(tempfile.mkdtemp())
    (place / "run").mkdir()
    place.chmod(0o755)
    os.chown(place / "run", 0, GROUP)
    (place / "run").chmod(0o2775)
    yield place / "run"
    shutil.rmtree(place)


def error_of_other(work: Callable[[], object]) -> str:
    """The UserError that another user of the group gets, or ""."""
    reader, writer = os.pipe()
    if (process := os.fork()) == 0:
        os.setgroups([])
        os.setgid(GROUP)
        os.setuid(OTHER)
        try:
            work()
            said = ""
        except UserError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(process, 0)
    with os.fdopen(reader) as words:
        return words.read()


def take(folder: Path) -> None:
    FolderLock().take(folder, log=print, here=0.0, elsewhere=0.0)


@pytest.mark.parametrize("mode", [None, 0o644])
def test_another_user_sees_the_lock_whatever_the_umask_is(mode: int | None, folder: Path) -> None:
    before = os.umask(0o022)
    try:
        with holder(folder):
            if mode is None:
                assert (folder / LOCK).stat().st_mode & 0o777 == 0o664
            else:  # as older versions left it
                (folder / LOCK).chmod(mode)
            assert "is in use: process " in error_of_other(lambda: take(folder))
        assert error_of_other(lambda: take(folder)) == ""
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["", "checkpoints", "metrics.jsonl", "log.txt"])
def test_what_another_user_may_not_write_to_is_refused_with_the_command_that_allows_it(name: str, folder: Path) -> None:
    recipe = Recipe(run=RunConfig(name="run", output=str(folder.parent)))
    (folder / "checkpoints").mkdir()
    for file in ("metrics.jsonl", "log.txt"):
        (folder / file).touch()
    for place in (folder / "checkpoints", folder / "metrics.jsonl", folder / "log.txt"):
        os.chown(place, 0, GROUP)
        place.chmod(0o775)
    (folder / name).chmod(0o755)
    said = error_of_other(lambda: check_output_folder(recipe))
    assert f"{folder / name} may not be written to by this user" in said
    assert f"chmod -R g+rwX {folder} lets the group go on" in said
    (folder / name).chmod(0o775)
    assert "may not be written" not in error_of_other(lambda: check_output_folder(recipe))
