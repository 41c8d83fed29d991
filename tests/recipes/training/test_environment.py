"""What environment.json records."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.training import environment as module
from recipes.training.environment import PACKAGES, environment

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]


# environment.json


def test_environment_names_what_made_the_numbers() -> None:
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
    ]
    assert list(found["packages"]) == list(PACKAGES)
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["wandb"]
    assert (found["device"], found["world_size"]) == ("cpu", 3)
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    assert json.loads(json.dumps(found)) == found


def test_environment_in_a_clone_and_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / "recipes" / "training").mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(clone / "recipes" / "training" / "environment.py"))

    def git_facts() -> SimpleNamespace:
        found = environment(world_size=1, device=CPU)
        return SimpleNamespace(commit=found["git_commit"], changes=found["git_uncommitted_changes"])

    def git(*arguments: str) -> str:
        settings = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", "-C", clone, *settings, *arguments], text=True).strip()

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert git_facts() == SimpleNamespace(commit=None, changes=None)  # a copy, not a clone
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "first")
    assert git_facts() == SimpleNamespace(commit=git("rev-parse", "HEAD"), changes=False)
    (clone / "new.py").touch()
    assert git_facts() == SimpleNamespace(commit=git("rev-parse", "HEAD"), changes=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_facts() == SimpleNamespace(commit=None, changes=None)  # no git at all
