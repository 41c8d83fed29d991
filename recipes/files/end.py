"""What killed a run: end.json in its folder, of the process that failed first. Imports no torch."""

import json
import platform
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.files.atomic import utc_now, write_whole
from recipes.files.exit_codes import ended_by
from recipes.files.layout import END, RECIPE
from recipes.files.reading import read_whole

LONGEST = 300
"""Characters of an error."""


@dataclass(frozen=True)
class End:
    """How the first process that failed ended. Its start removes what an earlier one left."""

    rank: int
    node: str
    code: int
    """Exit code; 128 + n for signal n."""
    signal: str
    """Its name; "" = none killed the process."""
    error: str
    time: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}{' ' if self.signal else ': '}{self.error}"


def words_of(code: int) -> str:
    """How a process with this exit code, -n after signal n, ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def write_end(folder: Path, rank: int, code: int, error: str = "", *, node: str = platform.node()) -> End | None:
    """Note this end, unless there is one. Returns it if it is noted. code: -n after signal n. Nothing is raised."""
    line = next(filter(str.strip, error.splitlines()), "") or words_of(code)
    line = "".join(letter if letter.isprintable() else " " for letter in line)[:LONGEST]
    name = signal.Signals(-code).name if code < 0 else ""
    end = End(rank, node, code if code >= 0 else ended_by(-code), name, line, utc_now())
    with suppress(OSError):
        if (folder / RECIPE).is_file() and not (folder / END).exists():
            write_whole(folder / END, json.dumps(asdict(end)) + "\n")
            return end
    return None


def read_end(folder: Path) -> End | None:
    """What killed the run; None if nothing did, or that is not known."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        end = End(**json.loads(read_whole(folder / END, most=100 * LONGEST)))
        return end if [*map(type, vars(end).values())] == [int, str, int, str, str, str] else None
    return None
