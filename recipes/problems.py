"""One thing wrong in a recipe, and the message that lists all of them. Imports no torch."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.errors import UserError

SCREEN = 100


@dataclass(frozen=True)
class Problem:
    """A key, what is wrong with it and what to write instead."""

    key: str
    """Dotted, such as "batch.micro_batch_size", or a section."""
    message: str
    """The rule and the remedy."""
    written: str = ""
    """The value as it is written; empty when it says nothing."""
    origin: str = ""
    """The file it comes from, or "command line"."""

    def __str__(self) -> str:
        head = self.key
        if self.written:
            head += f" = {self.written}"
        if self.origin:
            head += f"   ({self.origin})"
        body = textwrap.fill(self.message, SCREEN - 4, break_long_words=False, break_on_hyphens=False)
        return textwrap.indent(head, "  ") + "\n" + textwrap.indent(body, "    ")


def one_line(error: UserError) -> str:
    """The text of an error that lists things line by line, as part of a sentence."""
    head, *lines = str(error).split("\n")
    return " ".join([head, "; ".join(line.strip() for line in lines)]).strip()


def refusal(problems: Sequence[Problem], *, where: str) -> UserError:
    """The error to raise for all of them at once."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return UserError("\n".join([f"{count} in {where}", *map(str, problems)]))
