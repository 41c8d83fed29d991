"""Tokenizing in a separate process while the model trains, a bounded amount ahead of it. The process communicates only
through its files, so that every process on every node can follow. Imports no torch."""

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
from recipes.data.tokens.shards import PROBLEMS, Shards, problem_path
from recipes.data.tokens.workspace import Preparation
from recipes.files.atomic import write_whole
from recipes.files.exit_codes import CANNOT_WRITE

SECONDS_BETWEEN_LOOKS = 0.02
EVERYTHING = 2**62
# Problem files that are older belong to runs that ended long ago.
SECONDS_TO_KEEP_PROBLEMS = 86400


class Background:
    """Writes the shards of one source as far as they are wanted, until it is stopped or its parent is gone."""

    def __init__(self, folder: Path, work: Preparation, *, run: str) -> None:
        """folder: must exist. run: id of this start of a run, among all that share the folder."""
        self.folder = folder
        self._problem = problem_path(folder, run)
        with suppress(OSError):
            for problem in folder.glob(PROBLEMS):
                if time.time() - problem.stat().st_mtime > SECONDS_TO_KEEP_PROBLEMS:
                    problem.unlink()
        # spawn, because a forked child of a process with threads, such as torch's, may deadlock.
        self._context = multiprocessing.get_context("spawn")
        self._work = work
        self._wanted = self._context.Value("q", 0, lock=False)
        self._stopped = False
        self._start()

    def _start(self) -> None:
        arguments = (self.folder, self._work, self._wanted, self._problem)
        self._process = self._context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()

    def want(self, tokens: int | None) -> None:
        """Continue until there are so many training tokens; None = all of the source."""
        self._wanted.value = max(self._wanted.value, EVERYTHING if tokens is None else tokens)

    def check(self) -> None:
        """Raises UserError if the process ended too early."""
        code = self._process.exitcode
        if code is None:
            return
        if code == -signal.SIGTERM and not self._stopped:
            # A scheduler that takes the machine back signals every process, but training finishes its step first.
            self._start()
            return
        with suppress(FileNotFoundError):
            raise UserError(self._problem.read_text(encoding="utf-8"))
        if code == CANNOT_WRITE:
            raise UserError(f"data.cache: cannot write below '{self.folder}'; free some space or give another folder")
        if code:
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            text = f"data.source: the process that tokenizes ended with {reason}; what it wrote is kept; start again"
            with suppress(OSError):
                write_whole(self._problem, text)
            raise UserError(text)

    def stop(self) -> None:
        self._stopped = True
        self._process.terminate()
        self._process.join()


def _work(folder: Path, work: Preparation, wanted: Any, problem: Path) -> None:
    # Ctrl-C and a scheduler's signals are for the parent, which may have to finish a step and then ends this process.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(5)  # on a machine without GPUs, training needs the same cores
    from recipes.data.tokens.prepare import write_shards

    tokens, at_the_end = Shards(folder).tokens, False
    try:
        shards = write_shards(folder, work)
        while True:
            while tokens >= wanted.value and not at_the_end:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            if (shard := next(shards, None)) is None:
                return
            tokens, at_the_end = tokens + shard.train, shard.last
    except UserError as error:
        _report(problem, str(error))
    except OSError as error:
        _report(problem, f"data.cache: cannot write below '{folder}': {error}; free some space or give another folder")


def _report(problem: Path, text: str) -> None:
    """Write down for all processes why this one ends."""
    try:
        write_whole(problem, text)
    except OSError:
        os._exit(CANNOT_WRITE)  # not even the report can be written


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
