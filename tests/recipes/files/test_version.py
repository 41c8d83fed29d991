"""Which Shardwright this is: `train.py --version`, and CHANGELOG.md."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from recipes.files.version import ROOT, commit, version

pytestmark = pytest.mark.slow

NUMBER = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_version_is_printed_without_a_recipe() -> None:
    done = subprocess.run([sys.executable, ROOT / "train.py", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{version()}\n"
    assert re.fullmatch(rf"shardwright {re.escape(NUMBER)}( \(commit [0-9a-f]{{12}}(, with .*)?\))?\n", done.stdout)


def test_checkout_without_git_has_a_version(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert version(tmp_path) == f"shardwright {NUMBER}"


def test_changed_files_are_mentioned(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    git = ["git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "pyproject.toml"], ["commit", "-qm", "First"]):
        subprocess.run([*git, *words], check=True)
    assert re.fullmatch(rf"shardwright {NUMBER} \(commit [0-9a-f]{{12}}\)", version(tmp_path))
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "{NUMBER}"\n')
    assert version(tmp_path).endswith(", with uncommitted changes)")


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder outside of any repository."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


def git(checkout: Path, *words: str) -> str:
    settings = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.check_output(["git", "-C", checkout, *settings, *words], text=True).strip()


def facts(checkout: Path) -> tuple[str | None, bool | None]:
    found = commit(checkout)
    return found["git_commit"], found["git_uncommitted_changes"]


def test_a_copy_that_is_not_a_clone_has_no_commit(checkout: Path) -> None:
    assert facts(checkout) == (None, None)


def test_a_clone_has_its_commit_and_whether_files_were_changed(checkout: Path) -> None:
    git(checkout, "init", "--quiet")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "first")
    assert facts(checkout) == (git(checkout, "rev-parse", "HEAD"), False)
    (checkout / "new.py").touch()
    assert facts(checkout) == (git(checkout, "rev-parse", "HEAD"), True)


def test_a_clone_has_no_commit_where_git_is_not_installed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(checkout, "init", "--quiet")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "first")
    monkeypatch.setenv("PATH", str(checkout))
    assert facts(checkout) == (None, None)


def test_changelog_begins_with_this_version_or_the_next() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in headings if name != "Next") == NUMBER
    assert "Next" not in headings[1:]
