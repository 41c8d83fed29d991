"""torchrun, with the exit codes, signals and screen output that scripts/launch.py promises."""

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from parallel.errors import UserError
from parallel.nodes import raise_limit, require_store
from recipes.cluster.quiet import import_torch_distributed
from recipes.cluster.restarts import EXPLAINED, rank_of_code
from recipes.files.atomic import Lines
from recipes.files.end import words_of, write_end
from recipes.files.exit_codes import (
    ECHO_SECONDS,
    HUNG,
    NOT_MET,
    PREEMPTED,
    REFUSED,
    SIGNALS,
    ended_by,
    exit_code,
    is_there,
    with_parent,
)
from recipes.files.layout import LOG_FILE
from recipes.files.lock import LOCK
from recipes.files.screen import tell

if TYPE_CHECKING:
    from recipes.cluster.proof import Proof
    from recipes.cluster.rendezvous import Launchers
    from recipes.cluster.spares import Numbers
    from recipes.cluster.store import Served

PROVE = "--prove"
FROZEN_SECONDS = 5
"""How long torchrun waits for a worker to stop after another one ended because of a hang."""


def log(text: str) -> None:
    tell(f"launch: {text}")


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Install the handler for the signals that stop a run, and for SIGHUP unless nohup ignores it."""
    for number in (*SIGNALS, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class Workers:
    """The workers of this node, and the signals passed on to them.

    torchrun turns a signal into an exception wherever it is: it loses the workers' exit codes, gives them 30 s (before
    torch 2.13 always), and abandons them on a second signal. So torchrun handles no signals here.
    """

    def __init__(
        self, run_folder: Path | None = None, *, node_timeout: float = 10.0, numbers: "Numbers | None" = None
    ) -> None:
        """run_folder: of the run that they train, if they do. node_timeout: of its recipe. numbers: None = of all."""
        self._run_folder, self.node_timeout, self.numbers = run_folder, node_timeout, numbers
        self.starting = False
        self.signal = 0  # the first signal, 0 = none yet
        self.ended_first: set[int] | None = None  # processes that ended by themselves, before torchrun ended the others
        self.killed = False
        self.others: Launchers | None = None  # of the other nodes, if there are several
        self._signal_at = 0.0
        self._context: Any = None

    def watch(self, script: str) -> None:
        """Patch torchrun to learn which workers it starts, and when it begins to end them. script: the workers'."""
        from torch.distributed.elastic.multiprocessing import PContext

        start, close = PContext.start, PContext.close

        def watched_start(context: Any) -> None:
            self.starting = True
            with _without_early_interrupt(script):
                start(context)
            self._context = context
            if self.signal:
                self._send(self.signal)

        def watched_close(context: Any, *arguments: Any, **options: Any) -> None:
            if self.ended_first is None:
                self.ended_first = {process for process in context.pids().values() if not is_there(process)}
                if any(handler.proc.poll() == HUNG for handler in context.subprocess_handlers.values()):
                    options["timeout"] = FROZEN_SECONDS
                self._note_first()  # before the others get a signal, which they would take for the cause
            close(context, *arguments, **options)

        PContext.start = watched_start  # type: ignore[assignment, method-assign]
        PContext.close = watched_close  # type: ignore[assignment, method-assign]

    def run_one(self, command: list[str]) -> int:
        """Run the only process of a run without torchrun, whose import of torch takes as long as the worker's own."""
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        self.starting = True
        with _without_early_interrupt(command[0]):
            bound = with_parent([sys.executable, "-u", *command])
            process = subprocess.Popen(bound, env=os.environ | alone, start_new_session=True)
        handlers = {0: SimpleNamespace(proc=process)}
        self._context = SimpleNamespace(pids=lambda: {0: process.pid}, subprocess_handlers=handlers)
        if self.signal:
            self._send(self.signal)
        code = process.wait()
        self._note_first()
        return exit_code_of(0, code, sent=self.signal) if code else 0

    def forget(self) -> None:
        """They are done, and the launcher is not: it ends now if a signal has come."""
        self._context = None
        if self.signal:
            self._leave(self.signal)

    def kill(self) -> None:
        """Kill the workers and the processes they have started."""
        if self.others and self.others.is_spare():
            return  # launch() ends
        if self._context and all(handler.proc.poll() == 0 for handler in self._context.subprocess_handlers.values()):
            self._exit(0)  # this node is done; torchrun would wait for the other launchers for 5 minutes
        if not self.starting and self.others and self.others.cause:  # torchrun still waits for the other nodes
            log(self.others.cause.message)
            self._exit(self.others.cause.code)
        self.killed = True
        self._send(signal.SIGKILL, group=True)

    def stop(self, number: int, frame: FrameType | None) -> None:
        if not self.starting:
            self._leave(number)
        if not self.signal:
            self.signal, self._signal_at = number, time.monotonic()
            what = "the workers finish their step and save it, or end at once if none has begun"
            log(f"{signal.Signals(number).name}: {what}; a second one ends them at once")
            self._send(number)
        elif number != self.signal or time.monotonic() - self._signal_at > ECHO_SECONDS:
            self.kill()
            self._leave(number)

    def exit_on_early_signals(self) -> None:
        """Handle signals also while torchrun waits for other nodes, where Python runs no signal handler."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)

        def look() -> None:
            while number := os.read(read, 1):
                if not self.starting:
                    self._leave(number[0])

        threading.Thread(target=look, daemon=True, name="early signals").start()

    def _leave(self, number: int) -> NoReturn:
        if self.others and not self.others.is_spare():  # their workers do not notice, and would wait for the ones here
            self.others.announce_end(ended_by(number), crashed=False)
        self._exit(ended_by(number))

    def _exit(self, code: int) -> NoReturn:
        self.take_leave()
        os._exit(code)

    def take_leave(self) -> None:
        """Before this launcher ends: other nodes are told that it is no loss."""
        if self.others:
            self.others.leave()

    def _send(self, number: int, *, group: bool = False) -> None:
        if number not in (*SIGNALS, signal.SIGKILL):
            number = signal.SIGTERM  # workers handle no other signals
        for process in self._context.pids().values() if self._context else ():
            try:
                (os.killpg if group else os.kill)(process, number)
            except ProcessLookupError:
                continue

    def blame_order(self, failure: Any) -> tuple[bool, int, int]:
        """Sort key, smallest for the worker to name: one that ended by itself; of those, a killed one before its peers,
        which only lost their connection.
        """
        code = failure.exitcode
        ended_first = self.ended_first is None or failure.pid in self.ended_first
        return not ended_first, rank_of_code(code), failure.timestamp

    def _note_first(self) -> None:
        """Note in the run's folder which worker has failed first, unless that worker did."""
        codes = {rank: handler.proc.poll() for rank, handler in self._context.subprocess_handlers.items()}
        failed = [(rank, code) for rank, code in codes.items() if code]
        if failed and not self.killed:
            rank, code = min(failed, key=lambda item: rank_of_code(item[1]))
            if code not in EXPLAINED and -code != self.signal:
                self.note(rank, code)

    def note(self, rank: int, code: int, node: str = platform.node()) -> None:
        """Note the end of a worker in the run's folder and log, if rank 0 is a worker here and has locked the folder:
        local ranks are those of the run then."""
        with suppress(OSError, UserError):
            folder, mine = self._run_folder, f"process {self._context.pids()[0]} on {platform.node()}\n"
            if folder and (folder / LOCK).read_text(encoding="utf-8") == mine:
                end = write_end(folder, rank, code, node=node)
                Lines(folder / LOG_FILE, log=log).append(*([f"{end.time} launch: {end}"] if end else []))


def launch(arguments: list[str], workers: Workers, proof: "Proof | None" = None) -> int:
    """Run torchrun with these arguments. Returns the exit code. `workers` must handle signals already.

    proof: what the workers prove first unless that was done; then this process starts itself again, to train.
    """
    if arguments[:2] == ["--standalone", "--nproc-per-node=1"]:  # as scripts/run.sh writes it
        option = _option(proof, per_node="1")
        code = workers.run_one([*arguments[2:], *option])
        return _train(workers, proof) if option and code == 0 else code
    import_torch_distributed()
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    args = parse_args(arguments)
    args.signals_to_handle = "SIGQUIT"  # torchrun would replace our handlers
    several = args.nnodes.rpartition(":")[2] != "1"  # torchrun's default is "1:1"
    try:
        _allow_connections(args)
    except UserError as error:
        log(str(error))
        return REFUSED
    workers.watch(args.training_script)
    _end_with_launcher(args, several=several)
    try:
        served = _join_nodes(args, workers) if several else _stay_on_this_machine(args)
        option = _option(proof, per_node=args.nproc_per_node, others=workers.others)
        args.training_script_args += option
        if workers.others and workers.others.is_spare():
            log("waits as a spare node")
            if (cause := workers.others.wait_for_cause(None)) and cause.code:
                log(cause.message)
                return cause.code
        else:
            run(args)
            if workers.others:
                workers.others.end_spares(0)
        del served
    except UserError as error:
        log(str(error))
        return exit_code(error)
    except SignalException as error:
        return ended_by(error.sigval)
    except ChildFailedError as error:
        return _code_after(error.failures, workers)
    except (DistError, RendezvousError) as error:
        log(f"the processes could not find each other: {error}")
        return NOT_MET
    finally:
        workers.take_leave()
    return _train(workers, None if args.node_rank else proof) if option else 0


def _code_after(failures: Mapping[int, Any], workers: Workers) -> int:
    """The exit code after workers have failed, which the other nodes are told. failures: torchrun's, by rank."""
    rank, failure = min(failures.items(), key=lambda item: workers.blame_order(item[1]))
    others = workers.others
    if others and (workers.killed or failure.exitcode not in EXPLAINED) and (cause := others.wait_for_cause()):
        log(cause.message)
        if cause.worker:
            workers.note(*cause.worker)
        return cause.code
    code = exit_code_of(rank, failure.exitcode, sent=workers.signal)
    if others and code == PREEMPTED:  # all nodes have saved together
        others.end_spares(code)
    elif others:
        worker = None if code in EXPLAINED else (rank, failure.exitcode, platform.node())
        others.announce_end(code, crashed=code not in EXPLAINED, worker=worker)
    return code


def _option(proof: "Proof | None", *, per_node: str, others: "Launchers | None" = None) -> list[str]:
    """The option with which the workers of all nodes prove the recipe, if they must before they train."""
    if proof is None:
        return []
    decide = partial(proof.is_missing, per_node=per_node)
    if not (others.agree(decide) if others else decide([platform.node()])):
        return []
    log("run.prove_first: the processes prove the recipe, and train if they can")
    return [PROVE]


def _train(workers: Workers, proof: "Proof | None") -> NoReturn:
    """Start this launcher again after the workers have proved the recipe. proof: to note; only node 0 does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until scripts/launch.py can handle them
    workers.forget()
    if proof is not None:
        proof.note()
    os.execv(sys.executable, [sys.executable, *sys.argv])


@contextmanager
def _without_early_interrupt(script: str) -> Iterator[None]:
    """Python answers an early Ctrl-C with a traceback. train.py unblocks it once it has set how to handle it."""
    later = [signal.SIGINT] if Path(script).name == "train.py" else []
    signal.pthread_sigmask(signal.SIG_BLOCK, later)
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, later)


def _allow_connections(args: Namespace) -> None:
    """Raise the limit on open files, which workers inherit. Raises UserError if it is too low to serve the store."""
    from torch.distributed.run import determine_local_world_size

    raise_limit()
    if args.node_rank == 0:
        nodes = int(args.nnodes.rpartition(":")[2])
        require_store(determine_local_world_size(args.nproc_per_node) * nodes, nodes)


def _end_with_launcher(args: Namespace, *, several: bool) -> None:
    """Change torchrun's arguments so that the kernel signals the workers when this launcher dies.

    With several nodes and RESTARTS by SIGKILL: after SIGTERM all nodes would save and end, and only this one restart.
    """
    number = signal.SIGKILL if several and (os.environ.get("RESTARTS") or "0") != "0" else signal.SIGTERM
    command = with_parent([sys.executable, "-u", args.training_script, *args.training_script_args], number)
    args.no_python, args.training_script, args.training_script_args = True, command[0], command[1:]


def _join_nodes(args: Namespace, workers: Workers) -> "Served | None":
    """Returns the store if this is node 0: it ends with the last reference."""
    from torch.distributed.run import determine_local_world_size

    from recipes.cluster.rendezvous import Launchers
    from recipes.cluster.store import serve

    count = int(args.nnodes.rpartition(":")[2])
    args.master_addr, args.master_port = args.master_addr.strip("[]"), args.master_port or 29500
    address = args.master_addr, args.master_port
    most = None
    if workers.numbers:
        most = partial(workers.numbers.most, started=count, processes=determine_local_world_size(args.nproc_per_node))
    nodes = Launchers(address, node=args.node_rank, nodes=count, log=log, timeout=workers.node_timeout, most=most)
    workers.others = nodes
    workers.exit_on_early_signals()
    served = serve(args.master_addr, args.master_port, remote=True) if args.node_rank == 0 else None
    if args.node_rank == 0 and served is None and (nodes.answers() or most):
        raise UserError(
            f"NODE_RANK=0 runs at {args.master_addr}, no address of this node: number nodes from 0, each once"
        )
    nodes.join()
    nodes.await_all(lambda: workers.starting or nodes.is_spare(), give_up=lambda: os._exit(NOT_MET))
    nodes.watch(workers.kill, grace=2 * FROZEN_SECONDS)
    place, training = nodes.place() if most else (None, count)
    if place is not None:
        if place != args.node_rank:
            log(f"takes the place of node {place}, which has not come")
        args.node_rank, args.nnodes = place, str(training)
    if args.node_rank != 0:
        args.master_addr = nodes.reach()
    elif served is None:
        log(f"MASTER_ADDR={args.master_addr} is no address of this node, so the store listens on all of its networks")
    else:
        args.master_addr = served.address
    return served


def _stay_on_this_machine(args: Namespace) -> "Served | None":
    """Change torchrun's arguments so that the processes of one node meet on its loopback network, at any free port."""
    from recipes.cluster.store import serve_alone

    if not args.standalone and (args.rdzv_endpoint or args.rdzv_backend != "static"):
        return None
    served = serve_alone(0 if args.standalone else args.master_port or 0)
    args.standalone, args.rdzv_backend, args.rdzv_endpoint = False, "static", ""
    args.master_addr, args.master_port = served.address, served.port
    return served


def exit_code_of(rank: int, code: int, *, sent: int) -> int:
    """The launcher's exit code for a failed worker's, logged if unexplained. sent: signal passed on to it, 0 = none."""
    if code not in EXPLAINED and -code != sent:
        log(f"rank {rank} {words_of(code)}")
    return code if code > 0 else ended_by(-code)
