"""How a process of a run ends, and what asks it to; scripts/run.sh hands the code on. docs/running.md says more.

Imports no torch.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C, and what schedulers send before they take a machine away: the first stops a run after the step at hand."""
ECHO_SECONDS = 1.0
"""The same signal again within this time is an echo: sent to all processes, and handed on by their launcher."""

DIE_WITH_PARENT = ("setpriv", "--pdeathsig")  # util-linux >= 2.33: not on macOS, not on RHEL 8

FINISHED = 0
REFUSED = 2
"""Something that the user can mend; the message says how."""
NOT_MET = 69
"""The launchers of the nodes did not find each other. (EX_UNAVAILABLE)"""
CANNOT_WRITE = 74
"""All steps are done, and the disk does not take the last checkpoint. (EX_IOERR; of the process that tokenizes: it
cannot even write the reason why it ends.)"""
PREEMPTED = 75
"""A signal; the state is saved, and the same command goes on from there. (EX_TEMPFAIL: try again.)"""
POISONED = 76
"""run.max_skipped_steps in a row were skipped; the last checkpoint is as it was."""
HUNG = 77
"""No progress for run.hang_timeout; who held up the others is said."""


def is_there(process: int) -> bool:
    """Whether a process of this machine has this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def with_parent(command: Sequence[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """The command, as one that gets this signal when its parent is gone, where the system can do that."""
    bound = [*DIE_WITH_PARENT, number.name.removeprefix("SIG")]
    try:
        can = subprocess.run([*bound, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        can = False
    return [*bound, *command] if can else [*command]


def leave(code: int) -> NoReturn:
    """End this process, and not its interpreter: gloo's threads outlive the process group, and may abort that."""
    with suppress(OSError):  # of a screen that is a file on a full disk
        print(end="", flush=True)
    os._exit(code)


def ended_by(number: int) -> int:
    """The code, as shells have it, where signal `number` ended a run that saved nothing."""
    return 128 + number
