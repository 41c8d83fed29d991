"""The one error class for mistakes of the user, and enumerations for its messages. Imports no torch."""

from collections.abc import Iterable, Sequence


class UserError(Exception):
    """What the user asked for is not possible. The message says what, where, and what to write instead.

    train.py prints the text without a traceback and exits with code 2.
    """


class TemporaryError(UserError):
    """What the user asked for failed for a reason that may pass: a file system or another process had a fault.

    train.py exits with code 71, so that RESTARTS and SLURM start the run again.
    """


class CorruptState(Exception):
    """The weights or moments in memory are NaN, or differ between replicas. The text says which, and where."""


def listed(items: Iterable[object], *, last: str = "and") -> str:
    """Comma-separated, with a word before the last item, as in "a, b and c"."""
    *most, final = map(str, items)
    return f"{', '.join(most)} {last} {final}" if most else final


def some(items: Sequence[object], most: int = 5) -> str:
    """The first of these, and how many more there are, as in "a, b and 3 more"."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
