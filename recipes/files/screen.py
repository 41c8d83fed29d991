"""Standard output and standard error. They may be full, stuck or gone while a run goes on: what cannot be shown then is
lost, and neither ends the run nor holds it up. Imports no torch."""

import os
import re
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from errno import ETIMEDOUT
from math import inf
from threading import Thread
from typing import Any

PATIENCE = 2.0
"""How many seconds to wait for a reader, such as `less` or a terminal after Ctrl-S, before lines are lost."""
QUIET_SECONDS = 2.0
"""How long something is waited for without a word."""
SHOW_CURSOR = b"\x1b[?25h\n"
"""What shows a terminal's cursor, which the live line hides."""
ACTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What acts on a terminal or turns the direction of writing, and halves of surrogate pairs, which cannot be encoded."""
DIM, GREEN = "2", "32"
LONGEST_LINE, ITS_END = 4000, 1000
"""Characters of a line that is shown, and of its end, where remedies are, if its middle is left out."""
PIPE_BUF = 4096
"""A pipe that can be written takes as many bytes without blocking."""


def open_missing() -> None:
    """Open /dev/null in place of the standard streams that the caller has closed (`2>&-`).

    Otherwise the next file to be opened gets the number of one of them, and with it all that is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
            setattr(sys, name, open(number, "w", closefd=False) if number else None)  # noqa: SIM115


def put(number: int, content: bytes, *, patience: float = PATIENCE) -> OSError | None:
    """Write to a descriptor, waiting at most `patience` seconds for its reader. Returns why not all is written."""
    left = memoryview(content)
    try:
        while left:
            if not select.select([], [number], [], patience)[1]:
                return TimeoutError(ETIMEDOUT, "nobody reads it")
            left = left[os.write(number, left[:PIPE_BUF]) :]
    except OSError as error:
        return error
    return None


def safe(text: str, *, whole: bool = False) -> str:
    """The text for a screen or a log: what may be of a file, a model or a library cannot act on a terminal, and escapes
    are those of TOML and JSON. whole: do not leave out the middle of long lines."""
    shown = ACTIVE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return shown if whole or len(shown) <= LONGEST_LINE else "\n".join(map(_cut, shown.split("\n")))


def _cut(line: str) -> str:
    if (over := len(line) - LONGEST_LINE) <= 0:
        return line
    return f"{line[: LONGEST_LINE - ITS_END]} ... {over:,} characters ... {line[-ITS_END:]}"


def say(text: object = "", *, to: int = 1, end: str = "\n", whole: bool = False, style: str = "") -> None:
    """Print to standard output, or to standard error (2): what prints does it here, so that all of it is safe().

    whole: of JSON, TOML and tables of programs, and what a model writes. style: DIM or GREEN, on a terminal.
    """
    stream = sys.stderr if to == 2 else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = safe(str(text), whole=whole).encode(encoding, "backslashreplace").decode(encoding)
    if style and shown and stream.isatty():
        shown = f"\x1b[{style}m{shown}\x1b[0m"
    print(shown, end=end, file=stream, flush=True)


def tell(text: str, *, to: int = 2) -> None:
    """Write a line to standard error, or to standard output (1). Unbuffered: a signal handler may interrupt a print."""
    put(to, f"{safe(text)}\n".encode())


def join_aloud(
    thread: Thread, seconds: float, *, what: str, say: Callable[[str], None], stop: Callable[[], bool] = lambda: False
) -> bool:
    """Wait for a thread, for so long at most, and say so unless it is short. Returns whether it has ended.

    stop: whether to leave the wait."""
    begun, told = time.monotonic(), False
    while thread.is_alive() and (waited := time.monotonic() - begun) < seconds and not stop():
        if waited > QUIET_SECONDS and not told:
            say(f"waiting {f'up to {seconds:.0f} s ' if seconds < inf else ''}for {what}")
            told = True
        thread.join(0.1)
    return not thread.is_alive()


class Output:
    """Puts content to one place, and notes there how much is missing after it could not be written."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        """Why the last content could not be written."""
        self._lost = 0  # lines since then

    def put(self, number: int, content: bytes) -> None:
        head = f"\n({self._lost} lines are missing here, which could not be written)\n" if self._lost else ""
        self.error = put(number, head.encode() + content, patience=0 if self.error else PATIENCE)
        self._lost = self._lost + content.count(b"\n") if self.error else 0


class Screen(Output):
    """Standard output as a file for rich, whose own answer to a broken pipe is to exit."""

    def write(self, text: str) -> int:
        stream = self._stream
        try:
            number = stream.fileno()
        except (AttributeError, OSError, ValueError):  # not a file of the system, as in a notebook
            return stream.write(text) if stream else 0
        with suppress(OSError, ValueError):
            stream.flush()
        self.put(number, text.encode(stream.encoding or "utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    @property
    def _stream(self) -> Any:
        """Standard output as it is now, below the proxy that rich puts over it while there is a live line."""
        return getattr(sys.stdout, "rich_proxied_file", sys.stdout)

    def __getattr__(self, name: str) -> Any:  # isatty, fileno, encoding
        return getattr(self._stream, name)
