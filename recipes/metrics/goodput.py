"""What share of a run's wall time trained the model, and where the rest went. Imports no torch."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

USEFUL, SKIPPED, RESTARTS = "step", "skipped", "restarts"


class Clock(Protocol):
    """What recipes.metrics.clock.RunClock knows of this attempt."""

    began: float

    def elapsed(self) -> dict[str, float]: ...


class Goodput:
    """The parts of the wall time from the start of a run's first process to now; they add up to it.

    A checkpoint keeps them as they were when it was made. So what a run that goes on from there finds missing, since
    then, are steps that were lost, waits in a queue, and attempts that came no further: all of that is "restarts".
    """

    def __init__(self, clock: Clock, before: Mapping[str, Any]) -> None:
        """before: what state() gave the checkpoint that the run goes on from, if there is one."""
        self._clock = clock
        then = before.get("goodput", {})
        self._earlier: dict[str, float] = dict(then.get("seconds", {}))
        if then and not then["finished"]:  # else it rested, and has more steps to do now
            gap = time.time() - (time.monotonic() - clock.began) - then["at"]
            self._move(RESTARTS, max(0.0, gap))  # clocks of two nodes may differ a little

    def move(self, source: str, target: str, seconds: float) -> None:
        """Take seconds of this attempt out of one part, as far as there are so many, and into another."""
        seconds = min(seconds, self.parts().get(source, 0.0))
        self._move(source, -seconds)
        self._move(target, seconds)

    def _move(self, part: str, seconds: float) -> None:
        self._earlier[part] = self._earlier.get(part, 0.0) + seconds

    def parts(self) -> dict[str, float]:
        """Seconds by part, those of no length left out."""
        sums = dict(self._earlier)
        for phase, seconds in self._clock.elapsed().items():
            sums[phase] = sums.get(phase, 0.0) + seconds
        return {part: seconds for part, seconds in sums.items() if seconds > 0}

    def row(self) -> dict[str, Any]:
        """The columns of metrics.jsonl."""
        parts = self.parts()
        rounded = {part: round(seconds, 3) for part, seconds in parts.items()}
        return {"goodput": round(share(parts), 4), "wall_seconds": rounded}

    def state(self, *, finished: bool) -> dict[str, Any]:
        """What a checkpoint keeps, plain JSON. finished: the run has no steps to do."""
        return {"goodput": {"seconds": self.parts(), "at": time.time(), "finished": finished}}

    def line(self) -> str:
        """All parts for people, the longest first."""
        parts = self.parts()
        total = sum(parts.values())
        ranked = sorted(parts.items(), key=lambda item: -item[1])
        rest = ", ".join(f"{part} {seconds / total:.1%}" for part, seconds in ranked if part != USEFUL)
        return f"goodput {share(parts):.1%} of {total:.1f} s; {rest}"


def share(parts: Mapping[str, float]) -> float:
    """Useful seconds over all."""
    return parts.get(USEFUL, 0.0) / sum(parts.values())
