"""Tokenizing in a separate process while the model trains, a bounded amount ahead of it. The process communicates only
through its files and a few shared numbers, so that every process on every node can follow. Imports no torch."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from parallel.errors import TemporaryError, UserError
from recipes.data.tokens.shards import INDEX, PROBLEMS, Shards, problem_path, write_problem
from recipes.data.tokens.workspace import Preparation
from recipes.files.exit_codes import REFUSED, TEMPORARY, leave
from recipes.files.reading import cache_fault, may_pass
from recipes.files.screen import say
from recipes.files.units import counted

SECONDS_BETWEEN_LOOKS = 0.02
SECONDS_BEFORE_TRIES = (1.0, 5.0, 20.0)
"""How long to wait before a process that died is started again; only whole shards begin this anew."""
SECONDS_TO_END = 5.0
EVERYTHING = 2**62
# Problem files that are older belong to runs that ended long ago.
SECONDS_TO_KEEP_PROBLEMS = 86400
REASON_BYTES = 4096
PREFERRED_VICTIM = "500"
"""Oom_score_adj: when memory runs out, the kernel kills this process, which is started again, before the training."""


class Background:
    """Writes the shards of one source as far as they are wanted, until it is stopped or its parent is gone."""

    def __init__(self, folder: Path, work: Preparation, *, run: str, log: Callable[[str], None] = say) -> None:
        """folder: must exist. run: id of this start of a run, among all that share the folder. log: receives one line
        of text per message, from any thread."""
        self.folder, self._log = folder, log
        self._problem = problem_path(folder, run)
        with suppress(OSError):
            for problem in folder.glob(PROBLEMS):
                if time.time() - problem.stat().st_mtime > SECONDS_TO_KEEP_PROBLEMS:
                    problem.unlink()
        # spawn, because a forked child of a process with threads, such as torch's, may deadlock.
        self._context = multiprocessing.get_context("spawn")
        self._work = work
        self._wanted = self._context.Value("q", 0, lock=False)
        self._shards = self._context.Value("q", 0, lock=False)  # written by all processes together
        self._tokens = self._context.Value("q", 0, lock=False)  # by this process, in unfinished shards too
        self._reason = self._context.Array("c", REASON_BYTES, lock=False)
        self._looking = threading.Lock()
        self._stopped = False
        self._deaths, self._shards_then = 0, 0
        self._again_at: float | None = None
        self._start()

    def report(self, source: str, *, waited: float) -> None:
        """Log that the run has waited so many seconds for tokens of this source, and what the process does."""
        self._log(
            f"waiting for the tokens of {source} for {waited:.0f} s; process {self._process.pid} has made"
            f" {counted(self._tokens.value)} tokens"
        )

    def _start(self) -> None:
        self._again_at = None
        self._reason.value = b""
        self._tokens.value = 0
        shared = (self._wanted, self._shards, self._tokens, self._reason)
        self._process = self._context.Process(target=_work, args=(self.folder, self._work, *shared), daemon=True)
        try:
            self._process.start()
        except OSError as error:  # no memory for another process, or too many of them
            self._reason.value = f"it cannot be started: {error}".encode()[: REASON_BYTES - 1]

    def want(self, tokens: int | None) -> None:
        """Continue until there are so many training tokens; None = all of the source."""
        self._wanted.value = max(self._wanted.value, EVERYTHING if tokens is None else tokens)

    def check(self, *, needed: bool = True) -> None:
        """Start the process again, after a pause, if it died: of too little memory, or of the signal that a scheduler
        sends to every process although training finishes its step first. needed: training waits for its tokens now;
        then raise UserError if the source or the cache is at fault, and TemporaryError after the last try."""
        with self._looking:
            if self._stopped or self._process.is_alive() or (self._again_at is None and self._is_done(needed=needed)):
                return
            if self._process.exitcode == REFUSED:
                if needed:
                    self._refuse(UserError(self._why()))
                return
            if self._again_at is None:
                self._note_death()
            if needed and self._deaths > len(SECONDS_BEFORE_TRIES):
                self._refuse(TemporaryError(self._message()))
            if self._again_at is not None and time.monotonic() >= self._again_at:
                self._start()

    def _is_done(self, *, needed: bool) -> bool:
        """Whether the process ended because the source did. If tokens are lacking then, somebody removed them."""
        return self._process.exitcode == 0 and not (needed and not os.path.exists(self.folder / INDEX))

    def _note_death(self) -> None:
        if self._shards.value > self._shards_then:
            self._deaths, self._shards_then = 0, self._shards.value
        pause = SECONDS_BEFORE_TRIES[min(self._deaths, len(SECONDS_BEFORE_TRIES) - 1)]
        self._deaths += 1
        self._again_at = time.monotonic() + pause
        if self._deaths <= len(SECONDS_BEFORE_TRIES):
            self._log(
                f"the process that tokenizes {self._work.source!r} ended early: {self._why()}; it is started again"
                f" in {pause:g} s and continues after the last whole shard"
            )

    def _why(self) -> str:
        """Why the process ended, in words."""
        code = self._process.exitcode
        if reason := self._reason.value.decode(errors="replace"):
            return reason
        if code is None or code >= 0:
            return f"exit code {code}" if code else f"the files in '{self.folder}' are gone"
        with suppress(ValueError):
            name = signal.Signals(-code).name
            return f"{name}, probably because memory ran out" if -code == signal.SIGKILL else name
        return f"signal {-code}"

    def _message(self) -> str:
        source, fields, tokenizer = self._work.source, self._work.text_field, self.folder / "tokenizer.json"
        options = f"--text-field {fields}" if isinstance(fields, str) else fields.options
        return (
            f"data.source: the process that tokenizes {source!r} ended early {self._deaths} times, the last time with:"
            f" {self._why()}. What it wrote is kept, and the same command continues; if it ends again, give the run"
            f" more memory, or tokenize beforehand: python scripts/prepare_data.py '{source}' FOLDER --tokenizer"
            f" '{tokenizer}' {options} --validation-fraction"
            f' {self._work.validation_fraction}, then data.source = "FOLDER"'
        )

    def _refuse(self, error: UserError) -> None:
        with suppress(OSError):  # processes that follow end with this one
            write_problem(self._problem, error)
        raise error

    def stop(self) -> None:
        with self._looking:
            self._stopped = True
            if self._process.pid is None:
                return
            self._process.terminate()
            self._process.join(SECONDS_TO_END)
            if self._process.is_alive():  # frozen by SIGSTOP, or waiting for a disk
                self._process.kill()
                self._process.join(SECONDS_TO_END)


def _work(folder: Path, work: Preparation, wanted: Any, shards_there: Any, tokens_made: Any, reason: Any) -> None:
    # Ctrl-C and a scheduler's signals are for the parent, which may have to finish a step and then ends this process.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(5)  # on a machine without GPUs, training needs the same cores
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(PREFERRED_VICTIM)
    from recipes.data.tokens.prepare import write_shards

    def progress(tokens: int) -> None:
        tokens_made.value = tokens

    tokens, at_the_end = 0, False
    try:
        for load in work.plugins:
            load()
        tokens = Shards(folder).tokens
        shards = write_shards(folder, work, progress=progress)
        while True:
            while tokens >= wanted.value and not at_the_end:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            if (shard := next(shards, None)) is None:
                return
            tokens, at_the_end = tokens + shard.train, shard.last
            shards_there.value += 1
    except TemporaryError as error:
        _end(TEMPORARY, reason, str(error))
    except UserError as error:
        _end(REFUSED, reason, str(error))
    except MemoryError:
        _end(TEMPORARY, reason, "memory ran out")
    except OSError as error:
        if may_pass(error) or isinstance(error, FileNotFoundError):  # somebody removed the folder: it is made again
            _end(TEMPORARY, reason, f"data.cache: cannot write below '{folder}': {error}")
        _end(REFUSED, reason, str(cache_fault(folder, error)))


def _end(code: int, reason: Any, text: str) -> None:
    """End this process, and tell its parent why."""
    reason.value = text.encode()[: REASON_BYTES - 1]
    leave(code)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
