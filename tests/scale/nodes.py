"""Runs of many light processes on this machine: one launcher for each node, all on the loopback network."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.processes import descendants, free_ports
from tests.scale.proxy import Proxy
from tests.scripts.nodes import ROOT, arguments, environment, losses

LIMIT = 256
"""Open files and connections of a process, as `ulimit -n` sets it."""
SMALL = {"model.layers": "1", "checkpoint.every": "2", "checkpoint.keep": "2", "batch.sequence_length": "16"}


class Nodes:
    """A run on `count` nodes of `each` processes. Its screens go to files of its folder."""

    def __init__(
        self,
        folder: Path,
        corpus: Path,
        *overrides: str,
        count: int,
        each: int,
        proxy: Proxy | None = None,
        **variables: str,
    ) -> None:
        """variables: of the launchers; RESTARTS=N puts supervisors above them. proxy: the way of nodes to node 0's."""
        self.folder, self.count, self.each, self.name = folder, count, each, "run"
        self._variables, self._proxy = variables, proxy
        cache = str(corpus.parent / "scale-cache")  # the runs of all tests share the tokens
        changes = {**SMALL, "batch.global_batch_size": str(count * each), "data.cache": cache}
        words = [part for key, value in changes.items() for part in (f"--{key}", value)]
        self.words = [str(ROOT / "train.py"), *arguments(folder, corpus, self.name, *words, *overrides)]
        self.words[1] = str(ROOT / self.words[1])
        [self._port] = free_ports(1)
        if proxy:
            proxy.target = self._port
        self.launchers = [self.start(node) for node in range(count)]

    def start(self, node: int) -> "subprocess.Popen[bytes]":
        """Start the launcher of one node."""
        place = ["--standalone"]
        if self.count > 1:
            port = self._proxy.port if self._proxy and node else self._port
            master = ["--master-addr=127.0.0.1", f"--master-port={port}"]
            place = [f"--nnodes={self.count}", f"--node-rank={node}", *master]
        launch = [str(ROOT / "tests/scale/light_launch.py"), *place, f"--nproc-per-node={self.each}"]
        supervise = [str(ROOT / "scripts/supervise.py"), sys.executable] if self._variables.get("RESTARTS") else []
        command = [sys.executable, *supervise, *launch, *self.words]
        with (self.folder / f"out-{node}").open("ab") as out, (self.folder / f"err-{node}").open("ab") as err:
            return subprocess.Popen(
                ["bash", "-c", f'ulimit -n {LIMIT}; exec "$@"', "bash", *command],
                cwd=self.folder,
                env=environment(**self._variables),
                stdout=out,
                stderr=err,
            )

    def said(self, node: int = 0, stream: str = "err") -> str:
        return (self.folder / f"{stream}-{node}").read_text()

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in losses(self.folder, self.name)]

    def reach(self, step: int, *, seconds: float = 240) -> None:
        self.wait_for(lambda: bool(self.steps) and self.steps[-1] >= step, f"step {step}", seconds=seconds)

    def wait_for(self, met: Callable[[], object], what: str, *, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not met():
            screens = "\n".join(self.said(node) for node in range(self.count))
            assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s\n{screens}"
            assert any(launcher.poll() is None for launcher in self.launchers), screens
            time.sleep(0.05)

    def processes(self, node: int) -> list[int]:
        """All processes of one node, its launcher first."""
        return [self.launchers[node].pid, *descendants(self.launchers[node].pid)]

    def workers(self, node: int) -> dict[int, int]:
        """The process of each rank of one node."""
        found = {}
        for process in self.processes(node)[1:]:
            with suppress(OSError):  # it has ended
                if (rank := rank_of_fork(process)) is not None:
                    found[rank] = process
        return found

    def lose(self, node: int) -> None:
        """Kill everything on this node at once."""
        for process in self.processes(node):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.launchers[node].wait()

    def end(self, *, seconds: float = 240) -> list[int]:
        """The exit codes of all launchers."""
        end = time.monotonic() + seconds
        try:
            return [launcher.wait(max(0.1, end - time.monotonic())) for launcher in self.launchers]
        finally:
            self.kill()

    def kill(self) -> None:
        for node in range(self.count):
            if self.launchers[node].poll() is None:
                self.lose(node)


def rank_of_fork(process: int) -> int | None:
    """The rank of a worker of light_launch.py, which names its threads by it. None of another process."""
    found = re.fullmatch(r"rank (\d+)\n", Path(f"/proc/{process}/comm").read_text())
    return int(found[1]) if found else None
