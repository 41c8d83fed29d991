"""Tokenizing while the model trains: a process of its own that stays a bounded amount ahead. Imports no torch.

What it makes is told through the files alone, so that every process on every node can follow.
"""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.data.tokens.prepare import Preparation, write_shards
from recipes.data.tokens.shards import PROBLEMS, Shards, problem_path
from recipes.files.atomic import write_whole
from recipes.files.exit_codes import CANNOT_WRITE

SECONDS_BETWEEN_LOOKS = 0.02
EVERYTHING = 2**62
# Reasons that are older are of runs that ended long ago.
SECONDS_TO_KEEP_REASONS = 86400


class Background:
    """Writes the shards of one source as far as `want` says, until it is stopped or its parent is gone."""

    def __init__(self, folder: Path, work: Preparation, *, run: str) -> None:
        """folder: one that is there. run: names this start of a run among all that share the folder."""
        self.folder = folder
        self._problem = problem_path(folder, run)
        with suppress(OSError):
            for reason in folder.glob(PROBLEMS):
                if time.time() - reason.stat().st_mtime > SECONDS_TO_KEEP_REASONS:
                    reason.unlink()
        # spawn: a forked child of a process with threads, as torch's are, may wait for ever.
        self._context = multiprocessing.get_context("spawn")
        self._work = work
        self._wanted = self._context.Value("q", 0, lock=False)
        self._stopped = False
        self._start()

    def _start(self) -> None:
        arguments = (self.folder, self._work, self._wanted, self._problem)
        self._process = self._context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()

    def want(self, tokens: int) -> None:
        """Go on until there are so many training tokens."""
        self._wanted.value = max(self._wanted.value, tokens)

    def check(self) -> None:
        """Raises UserError when the process has come to an end before its time."""
        code = self._process.exitcode
        if code is None:
            return
        if code == -signal.SIGTERM and not self._stopped:
            # A scheduler that wants the machine back tells every process, and the training has a step to finish.
            self._start()
            return
        with suppress(FileNotFoundError):
            raise UserError(self._problem.read_text(encoding="utf-8"))
        if code == CANNOT_WRITE:
            raise UserError(f"data.cache: cannot write below '{self.folder}'; make room or give another folder")
        if code:
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            text = f"data.source: the process that tokenizes ended with {reason}; what it wrote is kept, start again"
            with suppress(OSError):
                write_whole(self._problem, text)
            raise UserError(text)

    def stop(self) -> None:
        self._stopped = True
        self._process.terminate()
        self._process.join()


def _work(folder: Path, work: Preparation, wanted: Any, problem: Path) -> None:
    # Ctrl-C and a scheduler's signals are for the parent, which may have steps to finish and ends this one.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(5)  # on a machine without GPUs it shares the cores with the training
    there, at_the_end = Shards(folder).tokens, False
    try:
        shards = write_shards(folder, work)
        while True:
            while there >= wanted.value and not at_the_end:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            if (shard := next(shards, None)) is None:
                return
            there, at_the_end = there + shard.train, shard.last
    except UserError as error:
        _tell(problem, str(error))
    except OSError as error:
        _tell(problem, f"data.cache: cannot write below '{folder}': {error}; make room or give another folder")


def _tell(problem: Path, text: str) -> None:
    """Tell all processes why this one ends."""
    try:
        write_whole(problem, text)
    except OSError:
        os._exit(CANNOT_WRITE)  # not even the reason


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
