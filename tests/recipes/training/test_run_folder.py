"""Kills while a run claims its folder, and two runs that claim the same one."""

import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest

from recipes.files.exit_codes import REFUSED
from recipes.recipe.load import to_toml
from tests.processes import run_processes
from tests.training import change, small_recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
# Killed right before the n-th change of a file, for n = 0, 1, ... until there are no more; then it starts again.
KILLED = """
import os, sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from recipes.recipe.load import load
from recipes.training.run_folder import check_output_folder, claim_run_folder
from recipes.files.lock import FolderLock
from recipes.recipe.schema import Recipe, RunConfig

output, kind = Path(sys.argv[1]), sys.argv[2]
CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.truncate"}

def claim(recipe, done, kill_at=None):
    # In a child process; returns its exit code.
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    left = kill_at
    def watch(event, arguments):
        nonlocal left
        if event not in CHANGES or (event == "open" and not isinstance(arguments[0], str | Path)):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if left == 0:
            os._exit(9)
        left -= 1
    if kill_at is not None:
        sys.addaudithook(watch)
    lock = FolderLock()
    lock.take(recipe.run.folder, log=print)
    claim_run_folder(recipe, done=done, environment={"steps": recipe.run.steps}, lock=lock)
    os._exit(0)

for number in count():
    recipe = Recipe(run=RunConfig(name=f"r{number}", output=str(output), steps=100))
    folder = recipe.run.folder
    if kind != "new":
        assert claim(recipe, 0) == 0
        (folder / "metrics.jsonl").write_text('{"step": 60}\\n{"step": 61}\\n')
    if kind == "longer":
        recipe = replace(recipe, run=replace(recipe.run, steps=200))
    done = 0 if kind == "new" else 60
    code = claim(recipe, done, number)
    assert code in (0, 9)
    check_output_folder(recipe)
    if kind != "new":  # which is there at every moment
        load(folder / "recipe.toml", rules=False)
    assert claim(recipe, done) == 0
    assert load(folder / "recipe.toml", rules=False) == recipe
    if kind == "longer":
        assert load(folder / "recipe-until-00000060.toml", rules=False).run.steps == 100
    if kind != "new":
        assert (folder / "metrics.jsonl").read_text() == '{"step": 60}\\n'
    if code == 0:
        break
print(number)
"""


def kills(tmp_path: Path, kind: str) -> int:
    """At how many moments the claim was killed."""
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, kind], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("kind, least", [("new", 5), ("same", 3), ("longer", 9)])
def test_a_run_starts_again_after_a_kill_at_any_moment_of_claiming_its_folder(
    kind: str, least: int, tmp_path: Path
) -> None:
    assert kills(tmp_path / kind, kind) >= least


def start_again(arguments: list[str]) -> tuple[int, str]:
    """What train.py does in this process: its exit code, and what it says."""
    import train

    with redirect_stdout(StringIO()) as said, mock.patch.object(train, "tell", print):
        return train.main(arguments), said.getvalue()


def test_a_second_start_is_refused_while_the_first_runs(corpus: Path, tmp_path: Path) -> None:
    def again(*more: str) -> tuple[int, str]:
        [answer] = run_processes(1, start_again, [str(file), *more])
        return answer

    recipe = small_recipe(corpus, tmp_path, steps=100_000)
    recipe = change(recipe, run={"name": "twice", "device": "cpu"}, checkpoint={"every": 0})
    file, folder = tmp_path / "twice.toml", recipe.run.folder
    file.write_text(to_toml(recipe))
    command = [sys.executable, ROOT / "train.py", file]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            while not first.stdout.readline().startswith("step      2"):
                assert first.poll() is None
            before = (folder / "recipe.toml").read_bytes()
            code, said = again()
            assert code == REFUSED and f"{folder} is in use: process {first.pid} on " in said
            assert first.poll() is None and (folder / "recipe.toml").read_bytes() == before
            assert [path.name for path in folder.parent.iterdir()] == ["twice"]  # it was not moved aside
            assert again("--check")[0] == 0
        finally:
            first.kill()
    code, said = again("--run.steps", "2")
    assert code == 0 and f"they are in {folder}.1 now" in said and "is in use" not in said
