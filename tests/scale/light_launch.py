"""scripts/launch.py whose workers are forks of it: 32 processes then take seconds to start, and some MB each.

`light_launch.py [torchrun options] train.py [arguments]`. All of the launcher is the real one, and so are the workers'
processes, signals, connections and exit codes; only that Python and torch start anew in each of them is left out.
SCALE_FAULT=RANK:FAULT gives one worker, or all:FAULT every one, a fault of FAULTS.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler  # noqa: E402

import tests.preload  # noqa: E402, F401  before any thread
from recipes.cluster.launcher import Workers, handle_stop_signals, launch  # noqa: E402
from recipes.files.exit_codes import SIGNALS, leave  # noqa: E402

PR_SET_PDEATHSIG = 1  # prctl(2)


def slow_worker() -> None:
    """Every step takes 0.2 s of this process's time more."""
    from recipes.training.trainer import Trainer

    step = Trainer.take_step

    def slow(self: Trainer) -> Any:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return step(self)

    Trainer.take_step = slow  # type: ignore[method-assign]


def wait_before_joining() -> None:
    """This process never joins the others."""
    import torch.distributed as dist

    dist.init_process_group = lambda *_, **__: threading.Event().wait()  # type: ignore[assignment]


def late_messages() -> None:
    """One message in 100 of those between hosts leaves a second later."""
    import random

    from parallel.messages import Messages

    send, draw = Messages._send, random.Random(os.environ["RANK"])

    def late(messages: Messages, *words: Any, **options: Any) -> Any:
        time.sleep(draw.random() < 0.01)
        return send(messages, *words, **options)

    Messages._send = late  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {"slow": slow_worker, "absent": wait_before_joining, "late": late_messages}


def start_forked(args: Sequence[str], env: dict[str, str], **options: Any) -> "subprocess.Popen[bytes]":
    """As subprocess.Popen, without a new interpreter: the child runs train.py between fork and exec, and ends there."""
    return subprocess.Popen(args, preexec_fn=partial(work, list(args), env), **options)


def work(args: list[str], env: dict[str, str]) -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the launcher's store and connections end with it
    signal.set_wakeup_fd(-1)
    for number in (*SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    name = next((word for before, word in pairwise(args) if before in ("--pdeathsig", "-p")), "TERM")
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, getattr(signal, f"SIG{name}"))
    Path("/proc/self/comm").write_text(f"rank {env['RANK']}")  # /proc shows the launcher's variables and command line
    os.environ.clear()
    os.environ.update(env)
    script = next(place for place, word in enumerate(args) if Path(word).name == "train.py")
    sys.argv = args[script:]
    code = 1
    try:
        import train  # unblocks the signals that the launcher blocks

        rank, _, fault = env.get("SCALE_FAULT", "").partition(":")
        if rank in (env["RANK"], "all"):
            FAULTS[fault]()
        code = train.main(sys.argv[1:])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)


def main() -> int:
    subprocess_handler.Popen = start_forked  # type: ignore[assignment, misc]
    workers = Workers()
    handle_stop_signals(workers.stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return launch(sys.argv[1:], workers)


if __name__ == "__main__":
    leave(main())
