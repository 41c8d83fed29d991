"""torchrun with its manners mended: `python scripts/launch.py [torchrun options] train.py [arguments]`.

A worker's own error stays the last thing on the screen and its exit code becomes ours (128 + n for signal n), where
torchrun prints its log and a traceback of its own below and exits 1. A stop signal is handed to the workers, who have
as long as they need; a second one ends them at once. None is left behind. LOGLEVEL=INFO brings torchrun's log back.
"""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.files.exit_codes import (
    CANNOT_WRITE,
    ECHO_SECONDS,
    HUNG,
    NOT_MET,
    POISONED,
    PREEMPTED,
    REFUSED,
    SIGNALS,
    ended_by,
    is_there,
    with_parent,
)

if TYPE_CHECKING:
    from recipes.cluster.rendezvous import Launchers

EXPLAINED = {REFUSED, CANNOT_WRITE, PREEMPTED, POISONED, HUNG, *map(ended_by, SIGNALS)}
"""The worker has said why itself."""
FROZEN_SECONDS = 5
"""How long torchrun waits for a worker to stop, where another has ended because it does nothing any more."""


def say(text: str) -> None:
    os.write(2, f"launch: {text}\n".encode())  # unbuffered: a signal handler may interrupt a print


class OnlyKills(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Unable to shutdown process"):
            say("a worker did not stop in time and was killed")


class Workers:
    """The workers of this node, and the signals on their way to them.

    torchrun's own way with a signal, an exception through whatever it does, forgets the workers' exit codes, gives
    them 30 s (before torch 2.13 always) and abandons them on a second one. So it does not hear of signals at all.
    """

    def __init__(self) -> None:
        self.starting = False
        self.signal = 0
        """The one that came first."""
        self.ended_first: set[int] | None = None
        """Processes that ended by themselves, before torchrun ended the others."""
        self.killed = False
        self.others: Launchers | None = None
        """Where there are several nodes."""
        self._signal_at = 0.0
        self._context: Any = None

    def watch(self, script: str) -> None:
        """Have torchrun tell what it starts, and when it begins to end it. script: the workers'."""
        from torch.distributed.elastic.multiprocessing import PContext

        start, close = PContext.start, PContext.close
        # Python answers an early Ctrl-C with a traceback; train.py lets it in when it has said how to take it.
        later = [signal.SIGINT] if Path(script).name == "train.py" else []

        def watched_start(context: Any) -> None:
            self.starting = True
            signal.pthread_sigmask(signal.SIG_BLOCK, later)
            start(context)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, later)
            self._context = context
            if self.signal:
                self._send(self.signal)

        def watched_close(context: Any, *arguments: Any, **options: Any) -> None:
            if self.ended_first is None:
                self.ended_first = {process for process in context.pids().values() if not is_there(process)}
                if any(handler.proc.poll() == HUNG for handler in context.subprocess_handlers.values()):
                    options["timeout"] = FROZEN_SECONDS
            close(context, *arguments, **options)

        PContext.start = watched_start  # type: ignore[assignment, method-assign]
        PContext.close = watched_close  # type: ignore[assignment, method-assign]

    def kill(self) -> None:
        """End them and what they have started, now."""
        if self._context and all(handler.proc.poll() == 0 for handler in self._context.subprocess_handlers.values()):
            os._exit(0)  # all is done here; torchrun would wait for the other launchers for 5 minutes
        self.killed = True
        self._send(signal.SIGKILL, group=True)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if not self.starting:
            self._leave(number)
        if not self.signal:
            self.signal, self._signal_at = number, time.monotonic()
            say(f"{signal.Signals(number).name}: the workers finish the step and save; a second one ends them at once")
            self._send(number)
        elif number != self.signal or time.monotonic() - self._signal_at > ECHO_SECONDS:
            self.kill()
            self._leave(number)

    def heed_early_signals(self) -> None:
        """Also while torchrun waits for other nodes, where Python comes to no handler."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)

        def look() -> None:
            while number := os.read(read, 1):
                if not self.starting:
                    self._leave(number[0])

        threading.Thread(target=look, daemon=True, name="early signals").start()

    def _leave(self, number: int) -> NoReturn:
        if self.others:  # whose workers know nothing of it, and would wait for those here
            self.others.tell(ended_by(number), crashed=False)
        os._exit(ended_by(number))

    def _send(self, number: int, *, group: bool = False) -> None:
        if number not in (*SIGNALS, signal.SIGKILL):
            number = signal.SIGTERM  # a worker knows no others
        for process in self._context.pids().values() if self._context else ():
            try:
                (os.killpg if group else os.kill)(process, number)
            except ProcessLookupError:
                continue

    def blame(self, failure: Any) -> tuple[bool, int, int]:
        """Smallest for the one to name: who ended by itself, of those a killed one before the peers that lost it."""
        code = failure.exitcode
        ended_first = self.ended_first is None or failure.pid in self.ended_first
        return not ended_first, 0 if code in EXPLAINED else 1 if code < 0 else 2, failure.timestamp


def main() -> int:
    workers = Workers()
    for number in (*SIGNALS, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, workers.stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # scripts/supervise.py has them wait for the line above

    # Read at the import. A store that has gone, as node 0's does at the end, is no matter here; the workers may warn.
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch.distributed  # installs log handlers, so ours come after it; what follows already logs

    if quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]

    if "LOGLEVEL" not in os.environ:
        log = logging.getLogger("torch.distributed")
        log.handlers, log.propagate = [OnlyKills()], False
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    args = parse_args(sys.argv[1:])
    args.signals_to_handle = "SIGQUIT"  # torchrun would replace our handlers
    script = args.training_script
    several = args.nnodes.rpartition(":")[2] != "1"  # torchrun's default is "1:1"
    # Else they save, and so do those of the other nodes, which then do not start again as this one does.
    orphans = signal.SIGKILL if several and (os.environ.get("RESTARTS") or "0") != "0" else signal.SIGTERM
    command = with_parent([sys.executable, "-u", args.training_script, *args.training_script_args], orphans)
    args.no_python, args.training_script, args.training_script_args = True, command[0], command[1:]
    workers.watch(script)
    if several:
        from recipes.cluster.rendezvous import Launchers

        count = int(args.nnodes.rpartition(":")[2])
        nodes = Launchers(args.master_addr, args.master_port, node=args.node_rank, nodes=count, hung=HUNG, log=say)
        workers.others = nodes
        workers.heed_early_signals()
        nodes.join()
        nodes.await_all(lambda: workers.starting, give_up=lambda: os._exit(NOT_MET))
        nodes.watch(workers.kill, grace=2 * FROZEN_SECONDS)
    try:
        run(args)
    except SignalException as error:
        return ended_by(error.sigval)
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: workers.blame(item[1]))
        others = workers.others
        if others and (workers.killed or failure.exitcode not in EXPLAINED) and (cause := others.hear()):
            say(cause.words)
            return cause.code
        code = verdict(rank, failure.exitcode, told=workers.signal)
        if others and code != PREEMPTED:  # for that, all have saved together
            others.tell(code, crashed=code not in EXPLAINED)
        return code
    except (torch.distributed.DistError, RendezvousError) as error:
        say(f"the processes could not find each other: {error}")
        return NOT_MET
    return 0


def verdict(rank: int, code: int, *, told: int) -> int:
    """The exit code for that of the worker that failed first. told: the signal that was handed to it, if any."""
    if code < 0 and -code != told:
        hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
        say(f"rank {rank} was killed by {signal.Signals(-code).name}{hint}")
    elif code > 0 and code not in EXPLAINED:
        say(f"rank {rank} ended with exit code {code}")
    return code if code > 0 else ended_by(-code)


if __name__ == "__main__":
    sys.exit(main())
