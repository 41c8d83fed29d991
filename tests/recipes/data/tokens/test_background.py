"""The process that tokenizes beside training dies, freezes or loses its folder; the tokens stay the same."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.errors import TemporaryError, UserError
from recipes.data.order import SequenceOrder
from recipes.data.sequences import Source
from recipes.data.tokens import background as module
from recipes.data.tokens.background import EVERYTHING, Background
from recipes.data.tokens.shards import Shards, array_path, read_index, read_problem, shard_path
from recipes.data.tokens.workspace import Preparation, whole_shards
from recipes.files import reading
from tests.processes import PATIENCE
from tests.recipes.data.texts import contents, shards_in, work_on, write_rows

pytestmark = pytest.mark.slow

KILLS = 4


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Preparation:
    monkeypatch.setattr(module, "SECONDS_BEFORE_TRIES", (0.05, 0.05, 0.05))
    monkeypatch.setattr(reading, "PAUSES", (0.01,))
    write_rows(tmp_path / "rows.jsonl", 2000)
    return work_on(tmp_path / "rows.jsonl")


def started(folder: Path, work: Preparation, log: Callable[[str], None] = lambda line: None) -> Background:
    folder.mkdir(exist_ok=True)
    return Background(folder, work, run="this", log=log)


def wait_until(done: Callable[[], object]) -> None:
    """Look often: shards of a test are made in some milliseconds."""
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_tokens_are_the_same_however_often_the_process_is_killed(tmp_path: Path, work: Preparation) -> None:
    shards_in(tmp_path / "whole", work)
    background = started(tmp_path / "out", work)
    background.want(None)
    chance = random.Random(0)
    for _ in range(KILLS):
        shards = len(list((tmp_path / "out").glob("*-train.npy")))
        wait_until(
            lambda before=shards: (
                len(list((tmp_path / "out").glob("*-train.npy"))) > before or read_index(tmp_path / "out")
            )
        )
        time.sleep(chance.random() * 0.01)
        os.kill(background._process.pid or 0, chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]))
        background._process.join()
        wait_until(lambda: background.check(needed=False) or background._process.is_alive() or finished(background))
    wait_until(lambda: background.check() or finished(background))
    background.stop()
    assert not list((tmp_path / "out").glob("problem*"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def finished(background: Background) -> bool:
    return background._process.exitcode == 0


def test_process_that_dies_again_and_again_is_a_fault_that_may_pass(tmp_path: Path, work: Preparation) -> None:
    lines: list[str] = []
    background = started(tmp_path / "out", work, lines.append)
    with pytest.raises(TemporaryError) as caught:
        while True:
            if background._process.is_alive():
                background._process.kill()
            background._process.join()
            background.check()
            time.sleep(0.01)
    assert [line.partition("; it")[0] for line in lines] == [
        f"the process that tokenizes '{tmp_path / 'rows.jsonl'}' ended early: SIGKILL, probably because memory ran out"
    ] * 3
    said = str(caught.value)
    assert "ended early 4 times, the last time with: SIGKILL, probably because memory ran out. What it wrote" in said
    assert f"python scripts/prepare_data.py '{tmp_path / 'rows.jsonl'}' FOLDER" in said
    told = read_problem(tmp_path / "out" / "problem-this.txt")
    assert isinstance(told, TemporaryError) and str(told) == said  # what other processes of the run raise
    background.stop()


def test_dead_process_is_started_again_before_its_tokens_are_needed(tmp_path: Path, work: Preparation) -> None:
    background = started(tmp_path / "out", work)
    source = Source("rows", Shards(tmp_path / "out"), SequenceOrder(32, 0, None))
    source.background = background
    for _ in range(6):  # more often than while training waits
        first = background._process
        first.kill()
        first.join()
        wait_until(lambda dead=first: source._wait(0) or background._process is not dead)
    background.want(None)
    wait_until(lambda: background.check() or finished(background))
    assert whole_shards(tmp_path / "out")[-1].last
    background.stop()


def test_refusal_of_the_source_stays_a_refusal_and_waits_until_it_matters(tmp_path: Path, work: Preparation) -> None:
    background = started(tmp_path / "out", work)
    write_rows(tmp_path / "rows.jsonl", 10)
    background.want(EVERYTHING)
    wait_until(lambda: not background._process.is_alive())
    background.check(needed=False)
    with pytest.raises(UserError, match="changed while it was read; start again") as caught:
        background.check()
    assert not isinstance(caught.value, TemporaryError)
    background.stop()


def test_frozen_process_does_not_hold_up_the_end_of_the_run(
    tmp_path: Path, work: Preparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS_TO_END", 0.2)
    background = started(tmp_path / "out", work)
    process = background._process.pid or 0
    os.kill(process, signal.SIGSTOP)
    wait_until(lambda: " T " in Path(f"/proc/{process}/stat").read_text())
    background.stop()
    assert background._process.exitcode == -signal.SIGKILL


def test_folder_that_is_removed_meanwhile_is_made_again(tmp_path: Path, work: Preparation) -> None:
    shards_in(tmp_path / "whole", work)
    background = started(tmp_path / "out", work)
    background.want(5000)
    wait_until(lambda: shard_path(tmp_path / "out", 1).exists())
    shutil.rmtree(tmp_path / "out")
    background.want(None)
    wait_until(lambda: background.check() or (finished(background) and read_index(tmp_path / "out")))
    background.stop()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["00001.json", "00001-train.npy", "00001-documents.npy", "index.json"])
def test_file_that_cannot_be_read_for_a_while_is_not_tokenized_anew(
    tmp_path: Path, work: Preparation, name: str
) -> None:
    folder = tmp_path / "out"
    shards = shards_in(folder, work)
    before = contents(folder)
    (folder / name).rename(tmp_path / "aside")
    (folder / name).symlink_to("/proc/self/mem")  # reading it is an input/output error (EIO)
    with pytest.raises(TemporaryError, match=rf"data\.source: '.*{name}' cannot be read now: Input/output error"):
        whole_shards(folder)
    (folder / name).unlink()
    (tmp_path / "aside").rename(folder / name)
    assert contents(folder) == before
    assert whole_shards(folder) == shards
    assert array_path(folder, 1, "train").exists()
