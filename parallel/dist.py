"""This process's rank and device, and messages between processes. Only this file reads the launcher's environment."""

import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from parallel.errors import TemporaryError, UserError
from parallel.messages import Channel, Messages
from parallel.nodes import Node, arrange, require

Result = TypeVar("Result")
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 has the new names, and warns of the old ones."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables that torch reads its allocator's settings from; the first one that is set counts."""

MALLOC_VARIABLES = ("MALLOC_", "GLIBC_TUNABLES")
TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Parameters of mallopt() in glibc's malloc.h: free memory at the heap's end to give back, and pieces outside of it."""
LAZY = "TORCH_GLOO_LAZY_INIT"
LONE_MESSAGES = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
"""Whether NCCL's part of torch warns of the few messages with which a pipeline begins (torch 2.13)."""
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for every process."""
TASKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Where mpirun and srun say how many processes they started."""
WAITING, WAITING_FOR_TORCHRUN = 5.0, 60.0
"""Seconds in which processes meet, or a line says that this one waits: of other launchers and of torchrun, whose
variables may be left over from a dead one."""

SILENT = "rank 0 failed and reports it"
"""The text of errors that another rank is already reporting."""


@dataclass(frozen=True)
class World:
    """This process and its place among the others."""

    rank: int
    size: int
    device: torch.device
    messages: Messages
    """Messages between the hosts of all processes; they wait for hours, since rank 0 may be tokenizing a corpus."""
    nodes: tuple[Node, ...]

    def node_of(self, rank: int) -> str:
        """The name of the node that runs this rank."""
        return next(node.name for node in self.nodes if rank in node.ranks)

    @property
    def node(self) -> Node:
        """The node of this process."""
        return next(node for node in self.nodes if self.rank in node.ranks)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    @property
    def leads_node(self) -> bool:
        """Whether this is the first process of its node."""
        return any(node.ranks[0] == self.rank for node in self.nodes)


def start(
    device: str,
    *,
    seed: int,
    deterministic: bool = False,
    timeout: timedelta | None = None,
    flight_recorder: Path | None = None,
) -> World:
    """Join torchrun's process group, or create a group of one, and seed torch's global generator.

    device: "cpu", "cuda" or "auto" (the GPUs, if there are any). On CUDA the group also has gloo, for host-side
    messages that must not wait for the device. deterministic: see repeat_bits(). timeout: of its collectives; None =
    torch's default. flight_recorder: where NCCL writes its flight recorder after a timeout. Raises UserError if the
    device does not exist, or if this node or a variable does not allow what is asked for.
    """
    if flight_recorder is not None:
        _switch_flight_recorder_on(flight_recorder)
    rank, local_rank, size = _place() or (0, 0, 1)
    try:
        require(size)
        _connect_on_demand(size)
        if deterministic or torch.are_deterministic_algorithms_enabled():  # by an earlier run of this process
            from parallel.determinism import repeat_bits

            repeat_bits(deterministic)
    except UserError:
        time.sleep(5 if local_rank else 0)  # local rank 0 says so, and then the launcher ends the others
        raise
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda":
        if local_rank >= gpus:
            raise UserError(
                f"process {local_rank} of this node has no GPU: {gpus} visible"
                '; start fewer processes (NPROC) or write run.device = "cpu"'
            )
        let_segments_grow()
        torch.cuda.set_device(local_rank)
        os.environ.setdefault(LONE_MESSAGES, "false")
    else:
        keep_freed_memory()
    own = torch.device(device, local_rank) if device == "cuda" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if size > 1:
        if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            _stay_on_this_machine()
        with _saying_that_it_waits(rank, size):
            dist.init_process_group(backend, timeout=timeout, device_id=own if device == "cuda" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    torch.manual_seed(seed)
    messages = Messages(Channel.MAIN)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()  # the name that sbatch --exclude takes
    # Two launchers on one host count as two nodes, and so do two hosts with the same name.
    places = messages.from_all((host, int(os.environ.get("GROUP_RANK", "0"))))
    return World(rank, size, own, messages, nodes=arrange(places))


def _place() -> tuple[int, int, int] | None:
    """(rank, rank on this node, number of processes) that torchrun gave this process; None if nothing launched it.

    Raises UserError for what another launcher has set, which would train many times, or wait for nobody.
    """
    given = {name: os.environ.get(name, "") for name in LAUNCHED}
    remedy = "scripts/run.sh starts the processes of a node; to use this one alone, unset"
    if given["WORLD_SIZE"] in ("", "1") and not (given["RANK"] and given["LOCAL_RANK"]):
        if many := next((name for name in TASKS if os.environ.get(name, "1") != "1"), None):
            raise UserError(f"{many}={os.environ[many]}: each of these processes would do the same; {remedy} {many}")
        return None
    if all(given.values()):
        with suppress(ValueError):
            rank, local_rank, size = (int(given[name]) for name in LAUNCHED[:3])
            if 0 <= rank < size and local_rank >= 0:
                return rank, local_rank, size
    written = ", ".join(f"{name}={value}" for name, value in given.items())
    raise UserError(f"{written}: not what torchrun sets; {remedy} RANK and WORLD_SIZE")


@contextmanager
def _saying_that_it_waits(rank: int, size: int) -> Iterator[None]:
    """Inside, a line says what this process waits for if that takes long; torchrun starts all of them by itself."""
    place = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
    text = f"RANK={rank} WORLD_SIZE={size}: waiting at {place} for the other processes, which something else must start"
    seconds = WAITING_FOR_TORCHRUN if "TORCHELASTIC_RUN_ID" in os.environ else WAITING
    line = threading.Timer(seconds, print, [text], {"file": sys.stderr, "flush": True})
    line.daemon = True
    line.start()
    try:
        yield
    finally:
        line.cancel()


def let_segments_grow() -> None:
    """Process-wide: torch's allocator of GPU memory extends its segments, which leaves fewer holes between tensors.

    Call it before CUDA is initialized. A variable that is set already stays, whatever it says. Raises UserError where
    torch cannot read it.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # for other processes
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # the variable may have been read
    allocator_settings()


def keep_freed_memory() -> None:
    """Process-wide: glibc keeps the memory of freed tensors for the next ones, as torch's allocator does on a GPU.

    By default it gives large pieces back to the system at once, which then clears their pages anew in every step
    (docs/benchmarks/README.md counts them). Variables that tune glibc's malloc stay in force.
    """
    if sys.platform != "linux" or any(name.startswith(MALLOC_VARIABLES) for name in os.environ):
        return
    with suppress(AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, -1)
        mallopt(MMAP_MAX, 0)


def allocator_settings() -> str:
    """How torch's allocator of GPU memory is set up, as in PYTORCH_ALLOC_CONF; "" if torch's defaults hold."""
    name = next((name for name in ALLOCATOR_VARIABLES if name in os.environ), "")
    written = os.environ.get(name, "")
    try:
        if hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # in torch 2.12, not in 2.11, which only takes them
            return torch._C._accelerator_getAllocatorSettings()
        if written:
            torch._C._accelerator_setAllocatorSettings(written)  # reads the variable, too
    except (RuntimeError, ValueError) as error:  # of the first call in a process
        raise UserError(
            f'{name}="{written}" does not say how to allocate GPU memory ({str(error).splitlines()[0]})'
            '; unset it, or write "expandable_segments:True"'
        ) from None
    return written


def _connect_on_demand(processes: int) -> None:
    """Process-wide: gloo connects two processes when the first message passes between them, not each to all others.

    Raises UserError if a variable says otherwise: with thousands of processes a node does not allow that, and gloo
    crashes where the variable differs between nodes.
    """
    value = os.environ.setdefault(LAZY, "1")
    if processes > 1 and value.lower() not in ("1", "t", "true", "y", "yes"):
        raise UserError(f"{LAZY}={value} makes every process connect to all others; unset it, or write {LAZY}=1")


def _stay_on_this_machine() -> None:
    """gloo and NCCL listen on the loopback network, not on that of the host's name. Variables already set stay."""
    with suppress(OSError):
        loopback = socket.if_indextoname(1)  # on Linux and macOS, whatever its name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if "NCCL_SOCKET_FAMILY" not in os.environ:  # NCCL does not use ::1
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")


def store_address() -> tuple[str, int]:
    """The host and port where the launcher of node 0 serves the store."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def stop() -> None:
    """Destroy the process group, if there is one.

    NCCL waits in here until all processes call it (pytorch #141510). Call it only where all of them do: after an error
    it would hide that error, so exit without it, and without finalizing the interpreter, which destroys it too.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def on_main(world: World, work: Callable[[], Result]) -> Result:
    """Run `work` on rank 0 only and send its (small) result to all ranks. A UserError on rank 0 stops all of them."""
    result, error = _attempted(work) if world.is_main else (None, None)
    kind, result = world.messages.from_main((_kind(error), result))
    if error is not None:
        raise error
    if kind is not None:
        raise kind(SILENT)
    return cast(Result, result)


def on_all(world: World, work: Callable[[], Result]) -> Result:
    """Run `work`, which must not communicate, on every rank. A UserError on any rank is raised on all of them."""
    result, error = _attempted(work)
    first = world.messages.reduce((_kind(error), str(error)), lambda one, other: one if one[0] else other)
    kind, text = world.messages.from_main(first)
    if kind is not None:
        raise kind(text) from error
    return cast(Result, result)


def _attempted(work: Callable[[], Result]) -> tuple[Result | None, UserError | None]:
    try:
        return work(), None
    except UserError as error:
        return None, error


def _kind(error: UserError | None) -> type[UserError] | None:
    """What other processes raise instead of this process's error, so that all exit with the same code."""
    return None if error is None else TemporaryError if isinstance(error, TemporaryError) else UserError


def on_main_first(world: World, work: Callable[[], Result]) -> Result:
    """Run `work` on rank 0, for example to fill a cache, then on the others. A UserError on rank 0 stops them all."""
    held: list[Result] = []  # rank 0's result; it is not sent, so it may be large
    on_main(world, lambda: held.append(work()))
    return held[0] if world.is_main else work()


def on_node(world: World, work: Callable[[], Result]) -> Result:
    """Run `work`, which must not communicate, on the first process of each node and send its (small) result to the
    others of the node. A UserError on any node is raised on all processes."""
    own = on_all(world, work if world.leads_node else lambda: None)
    return cast(Result, world.messages.from_first(own, world.node.ranks))


def wait_for(work: dist.Work) -> None:
    """Wait for the end of a collective. On a GPU the device waits, not the host.

    The wait itself runs no Python: the watchdog sees by this file in a stack that a process waits for others.
    """
    work.wait()


def lost_a_peer(error: Exception) -> bool:
    """Whether an error only means that another process has exited."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def communication_backend(device_type: str) -> str:
    """The class that sends tensors of this device; "" without a group. torch 2.15 calls another one "nccl"."""
    if (world := dist.group.WORLD) is None:
        return ""
    backend = world._get_backend(torch.device(device_type))
    return type(getattr(backend, "wrapped_pg", backend)).__name__  # wrapped for TORCH_DISTRIBUTED_DEBUG=DETAIL


def flight_record() -> bytes:
    """The last CUDA collectives of this process, for `torchfrtrace`. Does not wait for the device or other ranks."""
    c10d: Any = torch._C._distributed_c10d
    has_own = communication_backend("cuda") == "ProcessGroupNCCL2"
    return cast(bytes, c10d._dump_fr_trace(backend="nccl2") if has_own else c10d._dump_nccl_trace())


def records_collectives() -> bool:
    """Whether flight_record() has any. If not after some, a hang would leave nothing to read."""
    return b"profiling_name" in flight_record()


def _switch_flight_recorder_on(file: Path) -> None:
    """Process-wide: NCCL writes its last collectives to FILE + rank after a timeout. Variables already set stay."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(file.absolute()))
