"""scripts/checkpoint.py as users run it."""

import os
import re
import shutil
from pathlib import Path

import pytest

from recipes.checkpoint import look
from recipes.checkpoint.files import AtHand
from recipes.checkpoint.manifest import Manifest
from recipes.files.layout import checkpoint_steps
from tests.commands import run_command
from tests.recipes.checkpoint.golden import GOLDEN

pytestmark = pytest.mark.slow

SHARD = "shard-00001-of-00002.safetensors"


def checkpoint(*arguments: str | Path) -> tuple[int, str, str]:
    return run_command("scripts/checkpoint.py", *arguments)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an intact checkpoint, one that is cut off, and one under a wrong name."""
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(GOLDEN / "sharded", folder)
    for name in ("step-00000000", "step-00000001"):
        shutil.copytree(folder / "step-00000002", folder / name)
    (folder / "step-00000000" / SHARD).write_bytes((folder / "step-00000000" / SHARD).read_bytes()[:-1])
    (folder / "damaged-step-00000007").mkdir()
    return folder.parent


def test_list_shows_visible_damage(run: Path) -> None:
    code, out, error = checkpoint("list", run)
    head, cut, renamed, intact, others = out.splitlines()
    assert (code, error) == (1, "") and head.split() == ["step", "written", "size", "files", "tensors", "state"]
    assert "cut off: " in cut and renamed.endswith("holds the checkpoint of another step: 2")
    assert intact.split()[0] == "2" and "41 kB" in intact and intact.endswith("48  complete")
    assert others == "also in this folder: damaged-step-00000007"


def test_verify_finds_a_changed_byte(run: Path) -> None:
    content = bytearray((GOLDEN / "sharded" / "step-00000002" / SHARD).read_bytes())
    content[-1] ^= 1
    (run / "checkpoints" / "step-00000000" / SHARD).write_bytes(content)
    code, out, _ = checkpoint("verify", run)
    assert code == 1 and "which belong to" in out.splitlines()[1] and out.splitlines()[3].endswith("intact")


@pytest.mark.parametrize("path", [GOLDEN / "sharded" / "step-00000002", GOLDEN / "imported"], ids=["run", "imported"])
def test_verify_reports_an_intact_checkpoint(path: Path) -> None:
    code, out, error = checkpoint("verify", path)
    assert (code, error) == (0, "") and out.splitlines()[1].endswith("intact")


def test_show_describes_the_newest_checkpoint(run: Path) -> None:
    code, out, error = checkpoint("show", run)
    assert (code, error) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("step-00000002: step 2, 41 kB") and lines[1] == "  tokens: 36"
    assert any(line.split() == ["model.embedding.weight", "F32", "[20,", "16]", "in", "2", "parts"] for line in lines)
    assert lines[-1].startswith("48 tensors, ")


@pytest.mark.parametrize("name", ["step-00000002", "damaged-step-00000002", "imported"])
def test_checkpoint_without_its_manifest_is_damaged(name: str, run: Path) -> None:
    """Whether it has its own name, is set aside, or has another name."""
    (run / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    path = (run / "checkpoints" / "step-00000002").rename(run / "checkpoints" / name)
    for command in ("list", "verify"):
        code, out, error = checkpoint(command, path)
        assert (code, error) == (1, "") and "manifest.json is missing" in out.splitlines()[1]


def test_show_of_a_checkpoint_without_its_manifest_is_an_error(run: Path) -> None:
    path = run / "checkpoints" / "step-00000002"
    (path / "manifest.json").unlink()
    code, out, error = checkpoint("show", path)
    assert (code, out) == (2, "") and error == f"{path / 'manifest.json'} is missing\n"


def test_error_names_the_checkpoints_that_are_set_aside_if_there_are_no_others(run: Path) -> None:
    for path in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    for path in (run, run / "checkpoints"):
        code, out, error = checkpoint("verify", path)
        assert (code, out) == (2, "") and error == f"{path} holds no checkpoint, only damaged-step-00000007\n"


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("file", ["manifest.json", SHARD])
def test_checkpoint_that_training_deletes_in_the_meantime_is_not_damaged(
    file: str, thorough: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run deletes it just before this file is opened. Only a file missing from an existing folder is damage."""
    folder, real = run / "checkpoints", os.open
    paths = [folder / "step-00000002"]

    def open_and_delete(path: str | Path, *arguments: int, **others: int | None) -> int:
        if os.fspath(path) == str(paths[0] / file):
            paths[0].rename(folder / ".partial-00000002")
        return real(path, *arguments, **others)

    monkeypatch.setattr(os, "open", open_and_delete)
    rows = list(look.table(paths, thorough=thorough))
    assert rows[1] == ("step-00000002  deleted in the meantime", 0)
    monkeypatch.undo()
    (folder / ".partial-00000002").rename(paths[0])
    (paths[0] / file).unlink()
    assert [code for _, code in look.table(paths, thorough=thorough)] == [0, 1]


def test_checkpoint_deleted_after_its_last_byte_was_read_is_not_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, verify = run / "checkpoints" / "step-00000002", look.verify

    def verify_and_delete(path: Path, at_hand: AtHand) -> Manifest:
        manifest = verify(path, at_hand)
        shutil.rmtree(path)
        return manifest

    monkeypatch.setattr(look, "verify", verify_and_delete)
    assert list(look.table([path], thorough=True))[1] == ("step-00000002  deleted in the meantime", 0)


def test_delete_lists_what_the_rules_do_not_keep_and_deletes_it_with_yes(run: Path) -> None:
    rules, folder = ("delete", run, "--keep", "1", "--keep-every", "2"), run / "checkpoints"
    before = sorted(path.name for path in folder.iterdir())
    code, out, error = checkpoint(*rules)
    said = r"step 1: (.* kB) to delete\n1 of 3 checkpoints, \1; --yes deletes them\n"
    assert (code, error) == (0, "") and re.fullmatch(said, out)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert checkpoint(*rules, "--keep-best", "validation_los")[0] == 2
    assert re.match(r"step 1: .* kB deleted\n1 of 3 checkpoints", checkpoint(*rules, "--yes")[1])
    assert sorted(path.name for path in folder.iterdir()) == [name for name in before if name != "step-00000001"]


def test_delete_spares_what_a_fork_needs_and_nothing_goes_while_what_stays_is_damaged(run: Path) -> None:
    fork = run.parent / "fork"
    fork.mkdir()
    (fork / "recipe.toml").write_text(f'[run]\ncontinue_from = "{run}@1"\n')
    code, said, _ = checkpoint("delete", run, "--keep", "1")
    assert code == 0 and "step 0: " in said and "step 1: " not in said
    shard = run / "checkpoints" / "step-00000002" / SHARD
    shard.write_bytes(shard.read_bytes()[:-1])
    code, said, error = checkpoint("delete", run, "--keep", "1", "--yes")
    assert (code, said) == (2, "") and f"{shard} is cut off" in error
    assert len(checkpoint_steps(run / "checkpoints")) == 3


def test_delete_without_a_rule_deletes_nothing(run: Path) -> None:
    for rules in ([], ["--keep", "0", "--keep-every", "5"], ["--keep", "-1"]):
        code, _, error = checkpoint("delete", run, "--yes", *rules)
        assert code == 2 and "delete, and nothing else, needs --keep N, at least 1" in error
    assert len([*(run / "checkpoints").glob("step-*")]) == 3


@pytest.mark.parametrize(("name", "reason"), [("empty", "holds no checkpoint"), ("x", "does not exist")])
def test_path_without_a_checkpoint_is_an_error(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, out, error = checkpoint("list", tmp_path / name)
    assert (code, out) == (2, "") and reason in error and "Traceback" not in error
