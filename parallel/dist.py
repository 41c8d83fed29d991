"""Processes: who am I, how many are we, which device is mine. The only reader of the launcher's environment."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from parallel.errors import UserError
from parallel.nodes import Node, arrange

Result = TypeVar("Result")
PREFIX = "shardwright/"
"""Of our keys in the launcher's store."""
SPOKEN = "spoken"
"""What Heartbeats tell once a hang has been explained, and all processes leave."""


class SilentUserError(UserError):
    """A UserError that another rank is already telling."""


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    patient: dist.ProcessGroup
    """All processes, over gloo, with hours before a wait counts as a hang: rank 0 may be tokenizing a corpus."""
    nodes: tuple[Node, ...]
    """Where they all are."""

    def node_of(self, rank: int) -> str:
        """The name of the node that a process is on."""
        return next(node.name for node in self.nodes if rank in node.ranks)

    @property
    def is_main(self) -> bool:
        """Rank 0 speaks for all."""
        return self.rank == 0


def start(device: str, *, seed: int, timeout: timedelta | None = None, flight_recorder: Path | None = None) -> World:
    """Join the process group that torchrun announced, or be a group of one, and seed torch's global generator.

    device: "cpu", "cuda" or "auto" (the GPUs where there are any). On CUDA the group carries gloo too, for host-side
    messages that must not wait for the device. timeout: of its collectives; None = torch's. flight_recorder: where
    NCCL's goes when that is over. Raises UserError where the device is not there.
    """
    if flight_recorder is not None:
        _switch_flight_recorder_on(flight_recorder)
    launched = "RANK" in os.environ
    rank, local_rank, size = (
        (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")) if launched else (0, 0, 1)
    )
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda":
        if local_rank >= gpus:
            raise UserError(
                f"process {local_rank} of this node has no GPU: {gpus} visible"
                '; start fewer processes (NPROC) or write run.device = "cpu"'
            )
        torch.cuda.set_device(local_rank)
    own = torch.device(device, local_rank) if device == "cuda" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if launched:
        dist.init_process_group(backend, timeout=timeout, device_id=own if device == "cuda" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(seed)
    patient = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
    places: list[tuple[str, int]] = [("", 0)] * size
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()  # the name that sbatch --exclude takes
    # Two launchers on one host are two nodes, as are two hosts of one name.
    dist.all_gather_object(places, (host, int(os.environ.get("GROUP_RANK", "0"))), group=patient)
    return World(rank, size, own, patient, nodes=arrange(places))


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def on_main(world: World, work: Callable[[], Result]) -> Result:
    """Let rank 0 alone do the work and tell all ranks its (small) result; a UserError of rank 0 stops all of them."""
    result: Result | None = None
    error: UserError | None = None
    if world.is_main:
        try:
            result = work()
        except UserError as raised:
            error = raised
    failed, result = from_main(world, (error is not None, result))
    if error is not None:
        raise error
    if failed:
        raise SilentUserError("rank 0 could not go on")
    return cast(Result, result)


def on_all(world: World, work: Callable[[], Result]) -> Result:
    """Let every rank do its part, which must not communicate; a UserError of any of them is raised on all."""
    result: Result | None = None
    error = ""
    try:
        result = work()
    except UserError as raised:
        error = str(raised)
    if first := next(filter(None, from_all(world, error)), ""):
        raise UserError(first)
    return cast(Result, result)


def on_main_first(world: World, work: Callable[[], Result]) -> Result:
    """Let rank 0 do the work, for instance fill a cache, then the others; a UserError of rank 0 stops all of them."""
    held: list[Result] = []  # what stays with rank 0, and need not be small

    def first() -> None:
        held.append(work())

    on_main(world, first)
    return held[0] if world.is_main else work()


def from_main(world: World, value: Result) -> Result:
    """Rank 0's value, on all ranks: for decisions that each might take otherwise, such as what a file system shows."""
    values = [value]
    dist.broadcast_object_list(values, group=world.patient)
    return values[0]


def from_all(world: World, value: Result) -> list[Result]:
    """Every process's value, which is small, by rank."""
    values: list[Result] = [value] * world.size
    dist.all_gather_object(values, value, group=world.patient)
    return values


def lost_a_peer(error: Exception) -> bool:
    """Whether an error says no more than that another process has gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


class Heartbeats:
    """A word of every process to all others while collectives hang, and whatever the file system does.

    It goes through the store of the launcher of node 0, over a connection of its own: a process that is frozen, be it
    rank 0, holds up none of the others. Errors of the store are RuntimeErrors.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._size = world.rank, world.size
        self._store: dist.Store = dist.HashStore()
        if world.size > 1:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)

    def post(self, word: str) -> None:
        """Leave a word of this process, in place of the one before."""
        self.tell(f"rank {self._rank}", word)

    def of(self, rank: int) -> str:
        """The last word of that process; "" if there was none."""
        return self.told(f"rank {rank}")

    def all(self) -> list[str]:
        """The last words of all, by rank."""
        return [self.of(rank) for rank in range(self._size)]

    def tell(self, subject: str, word: str) -> None:
        """Leave a word for all."""
        self._store.set(PREFIX + subject, word)

    def told(self, subject: str) -> str:
        """What was left under this subject; "" if nothing was. Waits for nobody."""
        key = PREFIX + subject
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def is_first(self, subject: str) -> bool:
        """Whether no process has asked this before."""
        return self._store.add(PREFIX + subject, 1) == 1


def flight_record() -> bytes:
    """The last collectives of this process on CUDA, for `torchfrtrace`. Waits neither for the device nor for others."""
    return torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]  # in CUDA builds


def _switch_flight_recorder_on(file: Path) -> None:
    """Process-wide: NCCL keeps its last collectives, and writes them to FILE + rank when it runs into its own time-out.

    What is set in the environment already stays.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(file.absolute()))
