"""The one error class for mistakes of the user, and enumerations for its messages. Imports no torch."""

from collections.abc import Iterable


class UserError(Exception):
    """What the user asked for is not possible. The message says what, where, and what to write instead.

    train.py prints the text without a traceback and exits with code 2.
    """


def listed(items: Iterable[object], *, last: str = "and") -> str:
    """Comma-separated, with a word before the last item, as in "a, b and c"."""
    *most, final = map(str, items)
    return f"{', '.join(most)} {last} {final}" if most else final
