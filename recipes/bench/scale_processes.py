"""Light processes that start, train a toy, save and resume: what each of them holds, by the number of processes.

They are forked from a server that has imported torch, eight to a "node", and meet at a store that counts.
"""

import multiprocessing
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed.fsdp
from torch import nn

from parallel.config import MeshConfig
from parallel.dist import start, stop
from parallel.mesh import build_mesh
from parallel.messages import children_of
from recipes.bench.scale_rows import Row
from recipes.bench.scale_store import CountingStore, Load, seconds_of
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.cluster.watchdog import Watchdog
from recipes.metrics.clock import RunClock
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer

FILE_EVENTS = {
    *("open", "os.listdir", "os.scandir", "os.mkdir", "os.link", "os.symlink", "os.rename", "os.remove", "os.rmdir")
}
"""Audit events of Python; looks at files (stat) have none."""
NODE = 8
"""Processes of a node."""
PHASES = ("start", "mesh", "step", "save", "resume", "watchdog")
MEASURED = (8, 24, 32, 48, 64)
FITTED_FROM = 24
"""Processes; with fewer, a ring of nodes has no two different neighbours."""
MINUTES = 5.0
"""How long the processes may take to a phase."""


@dataclass(frozen=True)
class Seen:
    """What one process has at the end of a phase."""

    sockets: int
    """Of the network."""
    to_store: int
    """Of these, those to the store."""
    descriptors: int
    resident: int
    """Bytes, of which most are pages that all processes share."""
    private: int
    """Bytes."""
    sent: int
    """Bytes to other processes so far, over the connections that are still open."""
    received: int
    files: int = 0
    """Times that files and folders were opened, listed, made, linked, renamed or removed in this phase."""


Phases = dict[str, tuple[list[Seen], Load]]
"""What all processes have at the end of a phase, by rank, and what the store has done in it."""


class Quantity(NamedTuple):
    """One number of a run of so many processes."""

    what: str
    unit: str
    value: float
    total: bool = False
    """Whether it is a sum over all processes, so that a share per process is what may grow with their number."""
    tree: bool = False
    """Whether the neighbours of rank 0 in the tree of host messages are among it, which are counted and not fitted."""


class Line(NamedTuple):
    """value = base + slope x processes; of a total, first + that x processes."""

    quantity: Quantity
    base: float
    slope: float
    measured: Mapping[int, float]
    first: float = 0.0

    def at(self, ranks: int) -> float:
        """Measured at that size, or extrapolated."""
        if ranks in self.measured:
            return self.measured[ranks]
        fitted = self.base + self.slope * ranks
        if self.quantity.total:
            fitted = self.first + fitted * ranks
        return fitted + (len(children_of(0, ranks)) if self.quantity.tree else 0)


def process_rows(ranks: int) -> list[Row]:
    """What nobody else counts: sockets, memory, the store and what passes through rank 0."""
    found = {line.quantity: line.at(ranks) for line in lines()}
    rows = [Row(quantity.what, value, quantity.unit, "run") for quantity, value in found.items()]
    named = {quantity.what: value for quantity, value in found.items()}
    seconds = seconds_of(named["connections to the store"], named["store operations at start"])
    return [*rows, Row("CPU time of the store at start", seconds, "s", "run")]


@cache
def lines() -> tuple[Line, ...]:
    """Measured on up to 64 processes; slopes fitted to MEASURED from three nodes on, where all rings are closed."""
    found = {processes: quantities(measure(processes)) for processes in MEASURED}
    return tuple(fitted({size: all_of[place] for size, all_of in found.items()}) for place in range(len(found[8])))


def fitted(found: Mapping[int, Quantity]) -> Line:
    """The line through one quantity of runs of several sizes."""
    sizes = [size for size in found if size >= FITTED_FROM]
    values = [found[size].value - (len(children_of(0, size)) if found[size].tree else 0) for size in sizes]
    last = found[max(found)]
    *first, base, slope = numpy.polynomial.polynomial.polyfit(sizes, values, 2 if last.total else 1)
    slope = 0.0 if abs(slope) < 1e-6 * max(values) / max(sizes) else slope  # what rounding leaves
    measured = {size: quantity.value for size, quantity in found.items()}
    return Line(last, float(base), float(slope), measured, float(sum(first)))


def quantities(phases: Phases) -> list[Quantity]:
    """What a run of some size holds, and what has passed through its store and through rank 0."""
    last, load = phases[PHASES[-1]][0], {phase: phases[phase][1] for phase in PHASES}
    starting = [load[phase] for phase in ("start", "mesh", "step")]
    through = {phase: seen[0].sent + seen[0].received for phase, (seen, _) in phases.items()}
    of_save, of_resume = load["save"], load["resume"]
    return [
        Quantity("sockets of rank 0", "", last[0].sockets, tree=True),
        Quantity("sockets of a process, median", "", median(one.sockets for one in last)),
        Quantity("private memory of a process, median", "MB", median(one.private for one in last) / 1e6),
        Quantity("resident memory of a process, median", "MB", median(one.resident for one in last) / 1e6),
        Quantity("connections to the store", "", sum(one.to_store for one in last), total=True),
        Quantity("store operations at start", "", sum(one.operations.total() for one in starting), total=True),
        Quantity("store bytes at start", "B", sum(one.bytes_in + one.bytes_out for one in starting), total=True),
        Quantity("store operations of a save", "", of_save.operations.total(), total=True),
        Quantity("store operations of a resume", "", of_resume.operations.total(), total=True),
        Quantity("bytes through rank 0 at start", "B", through["start"]),
        Quantity("bytes through rank 0 of a save", "B", through["save"] - through["step"]),
        Quantity("bytes through rank 0 of a resume", "B", through["resume"] - through["save"]),
        *(_files(phases, phase) for phase in ("save", "resume")),
        *(_files(phases, phase, of_main=True) for phase in ("save", "resume")),
    ]


def _files(phases: Phases, phase: str, *, of_main: bool = False) -> Quantity:
    counts = [one.files for one in phases[phase][0]]
    whose = "rank 0" if of_main else "a process, median"
    return Quantity(f"file operations of a {phase}, {whose}", "", counts[0] if of_main else median(counts))


def measure(processes: int) -> Phases:
    """Run so many processes through all phases."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    found: Phases = {}
    with tempfile.TemporaryDirectory() as folder, CountingStore() as store:
        pipes, workers = [], []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            environment = launcher_environment(rank, processes, store.port)
            workers.append(context.Process(target=_work, args=(theirs, environment, Path(folder)), daemon=True))
            workers[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            before = Load()
            for phase in PHASES:
                seen = [_answer(pipe, rank, phase) for rank, pipe in enumerate(pipes)]
                time.sleep(0.1)  # a client does not wait for what it sets
                after = store.load.copy()
                found[phase], before = (seen, after.since(before)), after
                for pipe in pipes:
                    pipe.send(phase)
            for worker in workers:
                worker.join(60)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    return found


def launcher_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What the launcher of a node gives to a process."""
    node, place = divmod(rank, NODE)
    given = {"RANK": rank, "LOCAL_RANK": place, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": min(NODE, processes)}
    given |= {"GROUP_RANK": node, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    loopback = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": socket.if_indextoname(1)}
    return {name: str(value) for name, value in given.items()} | loopback | {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def _answer(pipe: Connection, rank: int, phase: str) -> Seen:
    if not pipe.poll(MINUTES * 60):
        raise RuntimeError(f"rank {rank} did not finish the phase {phase} within {MINUTES:g} minutes")
    try:
        seen: Seen = pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended in the phase {phase}; its traceback is above") from None
    return seen


def _work(pipe: Connection, environment: dict[str, str], folder: Path) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)

    files = 0

    def heard(event: str, _: object) -> None:
        nonlocal files
        files += event in FILE_EVENTS

    sys.addaudithook(heard)

    def done(phase: str) -> None:
        nonlocal files
        taken = files
        pipe.send(replace(_count(int(environment["MASTER_PORT"])), files=taken))
        assert pipe.recv() == phase
        files = 0

    world = start("cpu", seed=0)
    done("start")
    mesh = build_mesh(MeshConfig(shard=min(NODE, world.size), replicate=-1).fit(world.size), device_type="cpu")
    done("mesh")
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    for layer in model:
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh.fsdp)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh.fsdp)
    optimizer = build_optimizer(model, OptimizerConfig())
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    done("step")
    checkpoints = Checkpoints(folder / "checkpoints", keep=2, log=lambda line: None)
    checkpoints.save(model=model, optimizer=optimizer, step=2)
    done("save")
    checkpoints.load(model=model, optimizer=optimizer, step=2)
    done("resume")
    # Last, since it posts to the store by the clock, which would add to the other phases' counts.
    watchdog = Watchdog(RunClock(world.device), world, timeout=3600, folder=folder)
    done("watchdog")
    stop()
    watchdog.close()


def _count(store: int) -> Seen:
    """store: its port."""
    sockets, to_store, sent, received = 0, 0, 0, 0
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    for number in numbers:
        with suppress(OSError):  # the folder's own, closed by now
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with _socket(number) as connection:
                if connection.family == socket.AF_UNIX:
                    continue  # the pipe to who measures
                sockets += 1
                if connection.getpeername()[1] == store:
                    to_store += 1
                    continue
                # bytes_acked and bytes_received of struct tcp_info, linux/tcp.h
                counts = struct.unpack_from("QQ", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136), 120)
                sent, received = sent + counts[0], received + counts[1]
    memory = dict.fromkeys(("Rss", "Private_Clean", "Private_Dirty"), 0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        if name in memory:
            memory[name] = int(value.split()[0]) * 1024
    private = memory["Private_Clean"] + memory["Private_Dirty"]
    return Seen(sockets, to_store, len(numbers) - 1, memory["Rss"], private, sent, received)


@contextmanager
def _socket(number: int) -> Iterator[socket.socket]:
    connection = socket.socket(fileno=os.dup(number))
    try:
        yield connection
    finally:
        connection.close()
