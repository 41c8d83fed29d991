"""Who is named, and when, if processes of several nodes freeze: light processes that train nothing."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.dist import start, stop
from recipes.cluster import watchdog
from recipes.cluster.others import WORKERS_HUNG
from recipes.cluster.rendezvous import ENDED
from recipes.cluster.store import Served, serve_alone
from recipes.cluster.watchdog import Watchdog
from recipes.files.exit_codes import HUNG
from recipes.metrics.clock import STEP, RunClock
from tests.processes import process_context, run_processes, wait_for

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="stops processes one by one"), pytest.mark.slow]
TIMEOUT = 4.0
NODES, PER_NODE = 2, 3
SIZE = NODES * PER_NODE


def live(environment: dict[str, str], folder: Path) -> None:
    """One process, until the watchdog ends it; its standard error goes to a file."""
    os.environ.update(environment)
    os.dup2(os.open(folder / f"rank-{environment['RANK']}.txt", os.O_WRONLY | os.O_CREAT), 2)
    world = start("cpu", seed=0)
    clock = RunClock(world.device)
    Watchdog(clock, world, timeout=TIMEOUT, folder=folder / "no-run")
    clock.count_step()
    (folder / f"ready-{world.rank}").touch()
    with suppress(RuntimeError):  # a peer has ended
        while True:
            clock.begin(STEP)
            dist.all_reduce(torch.ones(1))
            time.sleep(0.02)
    time.sleep(30)


class Run:
    """Processes of two nodes of three, by rank, and the store of their launcher."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.served: Served | None = serve_alone(0)
        environment = {
            "MASTER_ADDR": self.served.address,
            "MASTER_PORT": str(self.served.port),
            "WORLD_SIZE": str(SIZE),
            "LOCAL_WORLD_SIZE": str(PER_NODE),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        self.processes: list[Any] = []
        for rank in range(SIZE):
            node, local = divmod(rank, PER_NODE)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)}
            self.processes.append(process_context().Process(target=live, args=(environment | own, folder)))
            self.processes[-1].start()
        wait_for("the start", lambda: all((folder / f"ready-{rank}").exists() for rank in range(SIZE)))
        time.sleep(1)

    def freeze(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGSTOP)

    def end(self, living: Sequence[int]) -> tuple[float, str]:
        """Seconds until all of these have ended by themselves, and what was printed without stacks."""
        began = time.monotonic()
        wait_for("the end", lambda: all(self.processes[rank].exitcode is not None for rank in living))
        seconds = time.monotonic() - began
        assert {self.processes[rank].exitcode for rank in living} == {HUNG}
        said = [(self.folder / f"rank-{rank}.txt").read_text() for rank in range(SIZE)]
        return seconds, "".join(text[at:] for text in said if (at := text.find("HUNG: ")) >= 0)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("frozen", [[3, 4, 5], [0, 3]], ids=str)
def test_frozen_processes_are_named_wherever_they_are(frozen: list[int], tmp_path: Path) -> None:
    """Alone or as a whole node, and also those that speak for their nodes: ranks 0 and 3."""
    run = Run(tmp_path)
    try:
        run.freeze(frozen)
        living = [rank for rank in range(SIZE) if rank not in frozen]
        seconds, said = run.end(living)
        assert run.served
        cause = json.loads(run.served.store.get(ENDED))
    finally:
        run.close()
    assert said.count("HUNG: ") == 1 and said.startswith("HUNG: no progress for ")
    assert "does not answer; the process is frozen or its node is gone:\n" in said
    named = [int(line.split()[1]) for line in said.splitlines() if line.startswith("  rank ")]
    assert named == frozen
    assert f"  {len(living)} of {SIZE} processes wait for it, rank {living[0]} on " in said
    assert cause == [WORKERS_HUNG, HUNG, False]
    assert seconds > TIMEOUT / 2


def test_a_lost_store_ends_every_node_and_says_so_once_per_node(tmp_path: Path) -> None:
    run = Run(tmp_path)
    try:
        run.served = None
        _, said = run.end(range(SIZE))
    finally:
        run.close()
    assert said.count("HUNG: ") == NODES and said.count("the launcher of node 0 does not answer (") == NODES
    assert "HUNG: rank 0 on " in said and f"HUNG: rank {PER_NODE} on " in said


def meet(late: bool) -> None:
    """Two processes whose recipes differ, or of which the second never comes to its watchdog."""
    world = start("cpu", seed=0)
    if late and world.rank:
        Event().wait()
    watchdog.MEETING_SECONDS = 1.0
    timeout = 4.0 if late else 60.0 * (1 - world.rank)
    found = Watchdog(RunClock(world.device), world, timeout=timeout, folder=Path("nowhere"))
    assert found._others is None
    stop()


def test_processes_with_other_time_outs_go_on_to_pre_flight_which_refuses_them() -> None:
    run_processes(2, meet, False)


def test_a_process_that_never_comes_to_its_watchdog_ends_the_one_that_waits() -> None:
    with pytest.raises(AssertionError, match="did not answer"):
        run_processes(2, meet, True)
