"""The border to code that is not ours: libraries, chat templates, tasks, plug-ins. Whatever it raises, even to end the
program, becomes one sentence. Imports no torch."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from typing import Any

from parallel.errors import TemporaryError, UserError
from recipes.files.reading import may_pass

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / name}/" for name in ("models", "parallel", "recipes"))
LONGEST_REASON = 500
"""Characters."""
PLAIN = (OSError, ValueError, NotImplementedError, EOFError, zlib.error)
"""Errors of broken files and wrong values, whose texts say enough without their names."""
PASSED_ON = (UserError, KeyboardInterrupt, GeneratorExit, MemoryError)
"""What says more than a sentence about foreign code: our own errors, Ctrl-C, and memory, which is not that code's."""


class ForeignError(UserError):
    """What foreign code raised, which is the cause of this error, as a sentence."""


@contextmanager
def foreign(what: str, remedy: str | Callable[[BaseException], str] = "", but: Any = None) -> Iterator[None]:
    """Inside, what foreign code raises becomes ForeignError "WHAT: REASON; REMEDY", and TemporaryError for a fault of
    the system that may pass. What our code raises when it is called back is passed on as it is.

    what: the code, and what it was doing, with row and file. remedy: what to do instead.
    but: errors to pass on instead of those.
    """
    try:
        yield
    except PASSED_ON:
        raise
    except BaseException as error:
        frames = [frame.f_code.co_filename.startswith(OURS) for frame, _ in walk_tb(error.__traceback__)]
        if (False, True) in pairwise(frames) if but is None else isinstance(error, but):  # foreign code has called ours
            raise
        kind = TemporaryError if isinstance(error, OSError) and may_pass(error) else ForeignError
        advice = remedy if isinstance(remedy, str) else remedy(error)
        raise kind(f"{what}: {named(error)}{advice and '; '}{advice}") from error


def reason(error: BaseException) -> str:
    """The error as one short line, without the path that errors of the operating system repeat."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, MemoryError):
        text = f"not enough memory {text}"
    return _line(text) or type(error).__name__ if isinstance(error, (*PLAIN, MemoryError)) else named(error)


def named(error: BaseException) -> str:
    """The error as one short line that begins with its class."""
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({error.code})"
    return _line(f"{type(error).__name__}: {error}".removeprefix("Exception: ")) or "Exception"


def _line(text: str) -> str:
    return " ".join(text.split())[:LONGEST_REASON].rstrip(": ")
