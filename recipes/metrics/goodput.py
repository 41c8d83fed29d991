"""The share of a run's wall time that trained the model, and where the rest went. Imports no torch."""

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipes.metrics.clock import RunClock

USEFUL, SKIPPED, RESTARTS = "step", "skipped", "restarts"


class Goodput:
    """Divides the wall time since the start of a run's first process into parts, which add up to it.

    A checkpoint stores the parts as of its step. When a run resumes from it, the time since then was spent on lost
    steps, on waits in a queue and on attempts that saved nothing: all of that counts as "restarts".
    """

    def __init__(self, clock: "RunClock", before: Mapping[str, Any]) -> None:
        """before: what state() stored in the checkpoint that the run resumes from, if any."""
        self._clock = clock
        then = before.get("goodput", {})
        self._earlier: dict[str, float] = defaultdict(float, then.get("seconds", {}))
        if then and not then["finished"]:  # a finished run that gets more steps lost no time
            gap = time.time() - (time.monotonic() - clock.began) - then["at"]
            self._earlier[RESTARTS] += max(0.0, gap)  # the clocks of two nodes may differ a little

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move up to this many seconds, as far as the source has them, from one part to another."""
        seconds = min(seconds, self.parts().get(source, 0.0))
        self._earlier[source] -= seconds
        self._earlier[target] += seconds

    def parts(self) -> dict[str, float]:
        """Seconds by part, without empty parts."""
        sums = defaultdict(float, self._earlier)
        for phase, seconds in self._clock.elapsed().items():
            sums[phase] += seconds
        return {part: seconds for part, seconds in sums.items() if seconds > 0}

    def row(self) -> dict[str, Any]:
        """The columns for metrics.jsonl."""
        parts = self.parts()
        rounded = {part: round(seconds, 3) for part, seconds in parts.items() if seconds >= 0.0005}
        return {"goodput": round(share(parts), 4), "wall_seconds": rounded}

    def state(self, *, finished: bool) -> dict[str, Any]:
        """What a checkpoint stores, as plain JSON. finished: the run has no more steps to do."""
        return {"goodput": {"seconds": self.parts(), "at": time.time(), "finished": finished}}

    def line(self) -> str:
        """One line for the log with all parts, longest first."""
        parts = self.parts()
        total = sum(parts.values())
        ranked = sorted(parts.items(), key=lambda item: -item[1])
        rest = ", ".join(f"{part} {seconds / total:.1%}" for part, seconds in ranked if part != USEFUL)
        return f"goodput {share(parts):.1%} of {total:.1f} s; {rest}"


def share(parts: Mapping[str, float]) -> float:
    """The useful share of all seconds."""
    return parts.get(USEFUL, 0.0) / sum(parts.values())
