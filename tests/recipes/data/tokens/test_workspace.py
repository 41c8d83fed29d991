"""Which processes may write to a folder of shards. Locks decide, and they end with their process."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.data.tokens.prepare import write_shards
from recipes.data.tokens.shards import OWNER, TOKENIZER, problem_path
from recipes.data.tokens.workspace import claimed, remove_left, unclaim
from tests.recipes.data.texts import contents, shards_in, tokenizer_for, work_on, write_rows

ROOT = Path(__file__).resolve().parents[4]
HOLD = (
    "import sys; sys.path.insert(0, '.'); from pathlib import Path; from recipes.data.tokens.workspace import claimed\n"
    "import platform; platform.node = lambda: sys.argv[2]\n"
    "with claimed(Path(sys.argv[1]), fingerprint='ours', tokenizer='T') as part:\n"
    "    (part / 'train').write_text('half of it'); print(part, flush=True); sys.stdin.read()\n"
)


def hold(folder: Path, host: str = "n1") -> tuple[subprocess.Popen[str], Path]:
    """A process that works in the folder, and its own folder in there."""
    command = [sys.executable, "-c", HOLD, str(folder), host]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
def test_only_the_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Whatever hosts and containers are called: where names begin alike, a name does not tell the process id."""
    (tmp_path / ".part-n1-4-left").mkdir()  # as an older version made them
    (tmp_path / ".part-n1-b-4-left").mkdir()
    one, part = hold(tmp_path, "n1")
    other, another = hold(tmp_path, "n1-b")
    try:
        remove_left(tmp_path)
        assert sorted(tmp_path.glob(".part-*")) == sorted([part, another])
    finally:
        end(one)
    assert (part / "train").exists()
    remove_left(tmp_path)
    assert list(tmp_path.glob(".part-*")) == [another]
    end(other)
    with claimed(tmp_path, fingerprint="ours", tokenizer="T") as own:
        assert list(tmp_path.glob(".part-*")) == [own]
    assert not list(tmp_path.glob(".part-*"))


@pytest.mark.slow
def test_folder_is_for_one_kind_of_tokens_while_a_process_works_there(tmp_path: Path) -> None:
    process, _ = hold(tmp_path)
    with claimed(tmp_path, fingerprint="ours", tokenizer="T"):  # the same work at once
        pass
    with (
        pytest.raises(UserError, match="another process is making tokens of another source, tokenizer"),
        claimed(tmp_path, fingerprint="others", tokenizer="U"),
    ):
        pass
    assert ((tmp_path / OWNER).read_text(), (tmp_path / TOKENIZER).read_text()) == ("ours", "T")
    end(process)


@pytest.mark.slow
def test_folder_of_a_killed_process_passes_to_other_tokens_if_none_were_made(tmp_path: Path) -> None:
    process, _ = hold(tmp_path)
    end(process)
    problem_path(tmp_path, "some run").write_text("data.source: whatever")
    with claimed(tmp_path, fingerprint="others", tokenizer="U"):
        assert ((tmp_path / OWNER).read_text(), (tmp_path / TOKENIZER).read_text()) == ("others", "U")


def test_folder_with_tokens_is_refused_for_others(tmp_path: Path) -> None:
    with claimed(tmp_path, fingerprint="others", tokenizer="U"):
        pass
    (tmp_path / "00000.json").write_text("{}")
    with (
        pytest.raises(UserError, match="holds tokens of another source, tokenizer or held-out share"),
        claimed(tmp_path, fingerprint="ours", tokenizer="T"),
    ):
        pass


def test_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"), claimed(tmp_path, fingerprint="o", tokenizer="T"):
        pass
    unclaim(tmp_path, remove=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_tokenizer_file_is_the_one_that_made_the_tokens(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 50)
    first, second = (tokenizer_for(tmp_path / "rows.jsonl", entries=entries) for entries in (300, 310))
    with claimed(tmp_path / "out", fingerprint="of the first", tokenizer=first.json):
        pass  # makes no tokens
    shards_in(tmp_path / "out", work_on(tmp_path / "rows.jsonl", tokenizer=second))
    assert (tmp_path / "out" / TOKENIZER).read_text() == second.json


def test_two_writers_of_the_same_tokens_write_the_same_files(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 400)
    work = work_on(tmp_path / "rows.jsonl")
    shards_in(tmp_path / "whole", work)
    one, other = write_shards(tmp_path / "out", work), write_shards(tmp_path / "out", work)
    next(one)
    list(other)
    list(one)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("remove", [True, False])
def test_unclaim_leaves_nothing_once_no_process_works_there(remove: bool, tmp_path: Path) -> None:
    with claimed(tmp_path / "out", fingerprint="ours", tokenizer="T"):
        unclaim(tmp_path / "out", remove=remove)
        assert (tmp_path / "out" / OWNER).exists()
    unclaim(tmp_path / "out", remove=remove)
    assert (tmp_path / "out").exists() != remove
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EACCES])
def test_nothing_is_removed_where_locks_are_not_supported_or_denied(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A security policy denies with EACCES, which for a lock that is not waited for means that another has it."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claimed(tmp_path, fingerprint="ours", tokenizer="T") as part:
        remove_left(tmp_path)
        assert part.is_dir()
        with claimed(tmp_path, fingerprint="ours", tokenizer="T") as other:
            assert part.is_dir() and other.is_dir()
