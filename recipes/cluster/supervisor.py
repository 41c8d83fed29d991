"""Starts the processes of one node again after a crash or a hang.

Each node decides by itself, by the exit code and the newest checkpoint. Both are the same on all nodes, so all decide
alike. Imports no torch.
"""

import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType

from recipes.cluster.restarts import Attempt, End, end_of, newest_step, reason_to_stop
from recipes.files.exit_codes import NOT_MET, SIGNALS, ended_by

PAUSE_SECONDS = 2
"""Before another start, so that ports and devices are free by then."""


def log(text: str) -> None:
    os.write(2, f"supervise: {text}\n".encode())  # unbuffered: a signal handler may interrupt a print


class Launcher:
    """The process that starts the workers, and the signals passed on to it."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.signal = 0
        """The first signal, 0 = none yet."""

    def run(self) -> int:
        """Start the launcher and wait. Returns its exit code, 128 + n for signal n."""
        # The launcher unblocks them once it can notify the other nodes.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._process = subprocess.Popen(self._command)
        if self.signal:
            self._process.send_signal(self.signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = self._process.wait()
        return code if code >= 0 else ended_by(-code)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Between two starts, the next launcher gets it, so that other nodes are notified."""
        self.signal = self.signal or number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def supervise(launcher: Launcher, folder: Path, *, steps: int, restarts: int) -> int:
    """Start the launcher until the run is done or another start would not help. Returns the exit code.

    folder: of the run. steps: the length of the run. restarts: how many crashes may be followed by a restart.
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
        log(f"attempt {len(attempts)} {end.value}, exit code {code}; newest checkpoint: step {step}")
        if step >= steps:
            log("not started again: the last step is saved; the same command does the rest")
            return code
        if stop := reason_to_stop(attempts, step=step, restarts=restarts):
            log(f"stopped: {stop}")
            return code
        time.sleep(PAUSE_SECONDS)
