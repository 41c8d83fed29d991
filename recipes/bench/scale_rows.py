"""One cell of the table of docs/scale.md, with how it was got. Imports no torch."""

import time
from collections.abc import Callable
from statistics import median
from typing import Literal, NamedTuple


class Row(NamedTuple):
    """A number for one size of cluster."""

    what: str
    value: float
    unit: str
    how: Literal["run", "simulated", "counted"]
    """run: real processes, as many or extrapolated by a fitted slope; simulated: our own code with so many ranks'
    inputs in one process; counted: from the code's formula."""


def median_seconds(work: Callable[[], object], *, repeats: int = 5) -> float:
    """Of several calls."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return median(found)
