"""Starts the processes of a node again where that helps: `RESTARTS=N scripts/run.sh RECIPE ...` runs this.

supervise.py LAUNCHER [options] train.py RECIPE [--section.field value ...]

Each node decides alone, and all alike: by the exit code and the newest checkpoint, both the same everywhere.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # first: other distributions install a top-level `recipes` too

from parallel.errors import UserError  # noqa: E402
from recipes.cluster.restarts import Attempt, End, end_of, newest_step, number_of_restarts, reason_to_stop  # noqa: E402
from recipes.files.exit_codes import NOT_MET, REFUSED, SIGNALS, ended_by, with_parent  # noqa: E402
from recipes.load import load  # noqa: E402

PAUSE_SECONDS = 2
"""Before another start: ports and devices are free by then."""


def say(text: str) -> None:
    os.write(2, f"supervise: {text}\n".encode())  # unbuffered: a signal handler may interrupt a print


class Launcher:
    """The process that starts the workers, and the signals on their way to it."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.signal = 0
        """The one that came first."""

    def run(self) -> int:
        """Start it, and wait. Returns its exit code, as shells have it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # it lets them in when it can tell other nodes
        self._process = subprocess.Popen(self._command)
        if self.signal:
            self._process.send_signal(self.signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = self._process.wait()
        return code if code >= 0 else ended_by(-code)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Between two starts the next one gets it: launchers of other nodes must hear of it."""
        self.signal = self.signal or number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def supervise(launcher: Launcher, folder: Path, *, steps: int, restarts: int) -> int:
    """Start the launcher until the run is done or another start would not help. Returns the exit code.

    folder: the run's. steps: that it is to take.
    """
    attempts: list[Attempt] = []
    while True:
        attempts.append(Attempt(newest_step(folder)))
        code = launcher.run()
        end = End.UNSTARTED if code == NOT_MET else end_of([code])[0]
        attempts[-1] = Attempt(attempts[-1].step, end)
        if launcher.signal or end in (End.DONE, End.FINAL, End.PREEMPTED):
            return code
        step = newest_step(folder)
        say(f"attempt {len(attempts)} {end.value}, exit code {code}; newest checkpoint: step {step}")
        if step >= steps:
            say("not started again: the last step is saved; the same command does what is left to do")
            return code
        if stop := reason_to_stop(attempts, step=step, restarts=restarts):
            say(f"stopped: {stop}")
            return code
        time.sleep(PAUSE_SECONDS)


def main(command: list[str]) -> int:
    try:
        recipe, *overrides = command[command.index(str(ROOT / "train.py")) + 1 :]
        run = load(recipe, overrides, rules=False).run
        restarts = number_of_restarts(os.environ["RESTARTS"])
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    launcher = Launcher(with_parent(command))
    for number in (*SIGNALS, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, launcher.stop)
    return supervise(launcher, run.folder, steps=run.steps, restarts=restarts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
