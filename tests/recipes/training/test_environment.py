"""What environment.json records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes.training import environment as module
from recipes.training.environment import PACKAGES, environment

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]


def test_environment_names_the_commit_the_packages_and_the_machine() -> None:
    found = environment(world_size=3, device=CPU)
    assert list(found) == [
        "git_commit",
        "git_uncommitted_changes",
        "python",
        "packages",
        "cuda",
        "device",
        "host",
        "world_size",
        "allocator",
    ]
    assert list(found["packages"]) == list(PACKAGES)
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["wandb"]
    assert (found["device"], found["world_size"]) == ("cpu", 3)
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    assert json.loads(json.dumps(found)) == found


@pytest.fixture
def clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder outside of any repository, which the module takes for its checkout."""
    folder = tmp_path / "clone"
    (folder / "recipes" / "training").mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(folder / "recipes" / "training" / "environment.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    return folder


def git(clone: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.check_output(["git", "-C", clone, *settings, *arguments], text=True).strip()


def git_facts() -> tuple[str | None, bool | None]:
    """The commit, and whether there are uncommitted changes."""
    found = environment(world_size=1, device=CPU)
    return found["git_commit"], found["git_uncommitted_changes"]


def test_a_copy_that_is_not_a_clone_has_no_commit(clone: Path) -> None:
    assert git_facts() == (None, None)


def test_a_clone_has_its_commit_and_whether_files_were_changed(clone: Path) -> None:
    git(clone, "init", "--quiet")
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "first")
    assert git_facts() == (git(clone, "rev-parse", "HEAD"), False)
    (clone / "new.py").touch()
    assert git_facts() == (git(clone, "rev-parse", "HEAD"), True)


def test_a_clone_has_no_commit_where_git_is_not_installed(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(clone, "init", "--quiet")
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "first")
    monkeypatch.setenv("PATH", str(clone))
    assert git_facts() == (None, None)
