"""How a process of a run ends, and what asks it to; scripts/run.sh hands the code on. docs/running.md says more.

Imports no torch.
"""

import os
import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C, and what schedulers send before they take a machine away: the first stops a run after the step at hand."""
ECHO_SECONDS = 1.0
"""The same signal again within this time is an echo: sent to all processes, and handed on by their launcher."""

FINISHED = 0
REFUSED = 2
"""Something that the user can mend; the message says how."""
PREEMPTED = 75
"""A signal; the state is saved, and the same command goes on from there. (EX_TEMPFAIL: try again.)"""
POISONED = 76
"""run.max_skipped_steps in a row were skipped; the last checkpoint is as it was."""
HUNG = 77
"""No progress for run.hang_timeout; who held up the others is said."""

# Reserved, and returned by nothing yet: 74 for a full disk (EX_IOERR).


def is_there(process: int) -> bool:
    """Whether a process of this machine has this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def ended_by(number: int) -> int:
    """The code, as shells have it, where signal `number` ended a run that saved nothing."""
    return 128 + number
