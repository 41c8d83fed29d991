"""With which code a process of a run ends; scripts/run.sh hands it on. docs/running.md says more. Imports no torch."""

FINISHED = 0
REFUSED = 2
"""Something that the user can mend; the message says how."""
PREEMPTED = 75
"""A signal; the state is saved, and the same command goes on from there. (EX_TEMPFAIL: try again.)"""
POISONED = 76
"""run.max_skipped_steps in a row were skipped; the last checkpoint is as it was."""

# Reserved, and returned by nothing yet: 74 for a full disk (EX_IOERR), 77 for processes that wait for ever.


def ended_by(signal: int) -> int:
    """A signal ended the run without a save: at start-up, where nothing is saved, or the second one. As shells say."""
    return 128 + signal
