"""What a change can reach: the files that import, start or read a changed file, directly or through others."""

import ast
import re
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from tests.sources import ROOT, imports, nodes

REACH_EVERYTHING = {"pyproject.toml", "requirements.lock", "tests/conftest.py"}
STARTERS = ("tests/", "scripts/", "configs/", "recipes/lab/", ".ci/")
"""Where a file's name stands in the code because the file is started or read; elsewhere it is mostly for messages."""
FILE_NAME = re.compile(r"[\w./*-]*\.(?:py|sh|sbatch|toml|json|csv|txt|lock)\b")


def changed_since(commit: str) -> list[str]:
    """Paths of the files that differ from those of a commit, and of new ones. Raises ValueError for no such commit."""
    found = _git("diff", "--name-only", "--no-renames", commit, "--") + _git(
        "ls-files", "--others", "--exclude-standard"
    )
    return sorted(set(found))


def newest_change() -> str:
    """The commit to compare with when none is named: HEAD, or the one before if nothing is uncommitted."""
    return "HEAD" if changed_since("HEAD") else "HEAD~1"


def distances(changed: Sequence[str]) -> dict[str, int]:
    """Every file that the changed files can reach, with the number of imports between them.

    It is 0 for a changed file, and for the test that has its name.
    """
    users = _users()
    mirrors = [Path("tests", file).with_name(f"test_{Path(file).name}").as_posix() for file in changed]
    found = dict.fromkeys([*changed, *(file for file in mirrors if (ROOT / file).is_file())], 0)
    if not found.keys().isdisjoint(REACH_EVERYTHING):
        found |= {file: 1 for file in _files() if file.startswith("tests/")}
    queue = deque(found)
    while queue:
        file = queue.popleft()
        for user in users.get(file, ()):
            if user not in found:
                found[user] = found[file] + 1
                queue.append(user)
    return found


@cache
def _users() -> dict[str, set[str]]:
    """File -> the files that import it or name it in a string."""
    files = _files()
    modules = {file.removesuffix(".py").replace("/", "."): file for file in files if file.endswith(".py")}
    users: dict[str, set[str]] = {}
    for file in files:
        used = {modules[module] for module in _modules(file) if module in modules}
        for text in _strings(file) if file.startswith(STARTERS) else ():
            used |= {modules[text]} if "." in text and text in modules else set()
            if FILE_NAME.fullmatch(text) and not text.endswith("*.py"):
                used |= _named(text, tuple(files))
        for other in used - {file}:
            users.setdefault(other, set()).add(file)
    return users


def _files() -> list[str]:
    files = _git("ls-files", "--cached", "--others", "--exclude-standard")
    return [file for file in files if (ROOT / file).is_file()]


def _modules(file: str) -> set[str]:
    return imports(ROOT / file) if file.endswith(".py") else set()


def _strings(file: str) -> Iterator[str]:
    """The strings of a Python file; the file names in a script or recipe, outside comments."""
    if file.endswith(".py"):
        constants = (node.value for node in nodes(ROOT / file) if isinstance(node, ast.Constant))
        yield from (value for value in constants if isinstance(value, str))
    elif file.endswith((".sh", ".sbatch", ".toml")) or file == ".ci/run":
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            yield from FILE_NAME.findall(line.partition("#")[0])


@cache
def _named(name: str, files: tuple[str, ...]) -> set[str]:
    """The file of this path below any folder; else those that match it as a pattern, or the only one of this name."""
    if "*" in name:
        return {file for file in files if fnmatch(file, f"*/{name}")}
    parts = Path(name).parts
    for first in range(len(parts)):
        if (path := "/".join(parts[first:])) in files:
            return {path}
    found = {file for file in files if file.endswith(f"/{parts[-1]}")}
    return found if len(found) == 1 else set()


def _git(*words: str) -> list[str]:
    try:
        done = subprocess.run(["git", "-c", "core.quotePath=off", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"git cannot be started: {error}") from None
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return done.stdout.splitlines()
