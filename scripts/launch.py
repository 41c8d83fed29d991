"""torchrun with its manners mended: `python scripts/launch.py [torchrun options] train.py [arguments]`.

A worker's own error stays the last thing on the screen and its exit code becomes ours (128 + n for signal n), where
torchrun prints its log and a traceback of its own below and exits 1. A stop signal reaches the workers once and leaves
none behind. LOGLEVEL=INFO brings torchrun's log back.
"""

import logging
import os
import signal
import subprocess
import sys
from types import FrameType
from typing import Any

EXPLAINED = (2, 130)  # bad recipe, interrupted: the worker has said so itself
DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "TERM"]  # util-linux >= 2.33: not on macOS, not on RHEL 8


def say(text: str) -> None:
    os.write(2, f"launch: {text}\n".encode())  # unbuffered: a signal handler may interrupt a print


class OnlyKills(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Unable to shutdown process"):
            say("a worker did not stop within 30 s and was killed")


def blame(failure: Any) -> tuple[int, int]:
    """Earliest first; within torchrun's one-second clock, a killed worker before the peers that lost it."""
    code = failure.exitcode
    return failure.timestamp, 0 if code in EXPLAINED else 3 if code == -signal.SIGTERM else 1 if code < 0 else 2


def main() -> int:
    stopped_by, workers_may_run = 0, False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_by
        if not workers_may_run:
            os._exit(128 + number)
        if not stopped_by:  # on a second signal torchrun would abandon its workers
            stopped_by = number
            name = signal.Signals(number).name
            say(rf"{name}: workers have 30 s to finish the step and save (Ctrl-\ kills them at once)")
            # A worker needs to handle only these two, whatever the scheduler sends.
            raise SignalException(name, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, stop)

    import torch.distributed  # installs log handlers, so ours come after it; what follows already logs

    if "LOGLEVEL" not in os.environ:
        log = logging.getLogger("torch.distributed")
        log.handlers, log.propagate = [OnlyKills()], False
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    args = parse_args(sys.argv[1:])
    args.signals_to_handle = "SIGQUIT"  # torchrun would replace our handlers
    try:
        if subprocess.run([*DIE_WITH_PARENT, "true"], capture_output=True).returncode == 0:
            command = [*DIE_WITH_PARENT, sys.executable, "-u", args.training_script, *args.training_script_args]
            args.no_python, args.training_script, args.training_script_args = True, command[0], command[1:]
    except FileNotFoundError:
        pass
    workers_may_run = True
    try:
        run(args)
    except SignalException as error:
        return 128 + (stopped_by or error.sigval)
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: blame(item[1]))
        code = failure.exitcode
        if code < 0:
            hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
            say(f"rank {rank} was killed by {signal.Signals(-code).name}{hint}")
        elif code not in EXPLAINED:
            say(f"rank {rank} ended with exit code {code}")
        return code if code > 0 else 128 - code
    except (torch.distributed.DistError, RendezvousError) as error:
        say(f"the processes could not find each other: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
