"""The version and the commit of this Shardwright. Imports no torch."""

import hashlib
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def version(root: Path = ROOT) -> str:
    """The version of the checkout, and its commit where git can tell: "shardwright 0.2.0 (commit 0123456789ab)"."""
    number = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if not (about := commit(root, "--untracked-files=no"))["git_commit"]:
        return f"shardwright {number}"
    changed = ", with uncommitted changes" if about["git_uncommitted_changes"] else ""
    return f"shardwright {number} (commit {about['git_commit'][:12]}{changed})"


def commit(root: Path = ROOT, *options: str) -> dict[str, Any]:
    """The commit of the checkout and whether files have changed since (options: of git status); None without git."""
    changes = _git(root, "status", "--porcelain", *options)
    return {
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_uncommitted_changes": None if changes is None else bool(changes),
    }


def hash_of_sources(root: Path = ROOT) -> str:
    """A hash of all Python files that a run may load, so that uncommitted changes count and git is not needed."""
    digest = hashlib.sha256()
    files = (file for package in ("models", "parallel", "recipes") for file in (root / package).rglob("*.py"))
    for file in sorted([root / "train.py", *files]):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def _git(root: Path, *words: str) -> str | None:
    """What git says of the checkout; None if it cannot."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def of_package(name: str) -> str | None:
    """The version of a package that is installed; None if it is not."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
