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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn

from parallel.config import MeshConfig
from parallel.dist import start, stop
from parallel.mesh import build_mesh
from recipes.cluster.watchdog import Watchdog
from recipes.metrics.clock import RunClock
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer
from tests.processes import PATIENCE
from tests.recipes.checkpoint.small import checkpoints_in
from tests.scale.store import CountingStore, Load

FILE_EVENTS = {
    *("open", "os.listdir", "os.scandir", "os.mkdir", "os.link", "os.symlink", "os.rename", "os.remove", "os.rmdir")
}
"""Audit events of Python; looks at files (stat) have none."""
NODE = 8
"""Processes of a node."""
PHASES = ("start", "mesh", "step", "save", "resume", "watchdog")


def launcher_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What the launcher of a node gives to a process."""
    node, place = divmod(rank, NODE)
    given = {"RANK": rank, "LOCAL_RANK": place, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": min(NODE, processes)}
    given |= {"GROUP_RANK": node, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    loopback = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": socket.if_indextoname(1)}
    return {name: str(value) for name, value in given.items()} | loopback | {"TORCHELASTIC_USE_AGENT_STORE": "True"}


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
                worker.join(PATIENCE)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    return found


def _answer(pipe: Connection, rank: int, phase: str) -> Seen:
    if not pipe.poll(PATIENCE):
        raise RuntimeError(f"rank {rank} did not finish the phase {phase} within {PATIENCE:g} s")
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
    checkpoints = checkpoints_in(folder / "checkpoints", keep=2, log=lambda line: None)
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
