"""A SLURM cluster of some nodes on this machine, with its own configuration, key, ports and folders."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.processes import PATIENCE, free_ports, wait_for
from tests.scripts.nodes import ROOT, arguments, environment, kill, losses, reached

DAEMONS = ("munged", "slurmctld", "slurmd")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
KILL_WAIT = 20
"""Seconds between SLURM's SIGTERM and its SIGKILL."""


PRIVATE = ("unshare", "--mount", "sh", "-c")
"""Runs a command of the shell that sees its own mounts, which nobody else sees."""


def cannot_mount() -> str | None:
    """Why a node cannot have a disk of its own here, or None."""
    done = subprocess.run([*PRIVATE, "mount --bind /tmp /tmp"], capture_output=True, text=True)
    return f"mounting is not allowed here: {done.stderr.strip()}" if done.returncode else None


def missing() -> str | None:
    """Why SLURM cannot run here, or None."""
    if absent := [name for name in DAEMONS if not shutil.which(name, path=PATH)]:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    return None


class Cluster:
    """A cluster of node0, node1 and so on."""

    def __init__(self, folder: Path, *, own_disks: bool = False, nodes: int = 2) -> None:
        """own_disks: folder/disk is folder/disk-node0 on node0 and folder/disk-node1 on node1. Needs cannot_mount()."""
        self.folder, self._own_disks = folder, own_disks
        self._names = [f"node{index}" for index in range(nodes)]
        self.environment = {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(folder)}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        own = [f"{kind}-{name}" for kind in ("spool", "disk") for name in self._names]
        for name in ("munge", "state", "disk", *own):
            (self.folder / name).mkdir()
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.folder / "slurm.conf").write_text(self._configuration())
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder / 'munge' / name}" for option, name in files.items()]
        # --force: munged rejects folders below one that is writable by all
        self._daemon("munged", "--foreground", "--force", *options)
        wait_for("munged", (self.folder / "munge" / "socket").exists)
        self._daemon("slurmctld", "-D")
        for node in self._names:
            self.start_node(node)
        wait_for("idle nodes", lambda: self._ask("sinfo", "-h", "-N", "-o", "%t") == "idle\n" * len(self._names))

    def start_node(self, node: str) -> None:
        own = [
            *PRIVATE,
            "mount --bind $0 $1 && shift && exec $@",
            f"{self.folder / 'disk'}-{node}",
            self.folder / "disk",
        ]
        self._nodes[node] = self._daemon(*(own if self._own_disks else []), "slurmd", "-D", "-N", node)

    def lose(self, node: str) -> None:
        """Simulate a power failure: kill the node's daemon, its helpers and all tasks."""
        daemon = self._nodes[node]
        daemon.kill()
        kill(self.processes(node, daemons=True))
        daemon.wait()
        self._daemons.remove(daemon)

    def _configuration(self) -> str:
        host, (control, *others) = socket.gethostname(), free_ports(1 + len(self._names))
        nodes = "".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n"
            for name, port in zip(self._names, others, strict=True)
        )
        return f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job may start again after this credential has expired. Values below 5 mean the default, 120 s.
AuthInfo=socket={self.folder}/munge/socket,cred_expire=5
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
KillWait={KILL_WAIT}
SlurmdTimeout=10
{nodes}PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))
        return self._daemons[-1]

    def stop(self) -> None:
        """End all jobs, then the daemons in reverse order, and check that no process is left."""
        try:
            self._ask("scancel", "--user=root")
            wait_for("an empty queue", lambda: not self._ask("squeue", "-h"))
        finally:
            for daemon in reversed(self._daemons):
                daemon.send_signal(signal.SIGTERM)
                try:
                    daemon.wait(timeout=PATIENCE)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        try:
            wait_for("no process left", lambda: not self.processes())
        finally:
            kill(self.processes())

    def _ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout

    def do(self, *command: str) -> str:
        """Standard output of a SLURM command, which must succeed."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(
        self, script: Path, words: list[str], *, folder: Path, flags: list[str], variables: dict[str, str]
    ) -> str:
        """Submit a job. Returns its number."""
        command = ["sbatch", "--parsable", *flags, str(script), *words]
        environment = {**variables, "SLURM_CONF": self.environment["SLURM_CONF"]}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """SLURM's fields of a job: JobState, ExitCode, Restarts and so on."""
        words = self.do("scontrol", "--oneliner", "show", "job", number).split()
        return {key: value for key, _, value in (word.partition("=") for word in words)}

    def processes(self, node: str | None = None, *, daemons: bool = False) -> list[int]:
        """Processes that run with this configuration. node: only tasks on that node; daemons: and its daemons."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                variables = (path / "environ").read_bytes().split(b"\0")
                command = (path / "cmdline").read_bytes()
            except OSError:  # it has just ended
                continue
            ours = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode() in variables
            there = node is None or (
                f"SLURMD_NODENAME={node}".encode() in variables and (daemons or b"slurmstepd" not in command)
            )
            if ours and there and command:
                found.append(int(path.name))
        return found


class Job:
    """A run on two nodes, or on those that flags of sbatch ask for."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        corpus: Path,
        name: str,
        *overrides: str,
        script: Path = ROOT / "scripts/slurm.sbatch",
        below: Path | None = None,
        flags: Sequence[str] = ("--nodes=2",),
        **variables: str,
    ) -> None:
        """folder: the run is written there, and the job's logs, too. below: another folder for these."""
        self.cluster, self.folder, self.name = cluster, folder, name
        self._below = below or folder
        self.number = cluster.submit(
            script,
            arguments(folder, corpus, name, *overrides),
            folder=self._below,
            flags=[*flags],
            variables=environment(**{"NPROC": "1"} | variables),
        )

    @property
    def log(self) -> str:
        """The main log."""
        path = self._below / f"slurm-{self.number}.out"
        return path.read_text() if path.exists() else ""

    @property
    def losses(self) -> list[tuple[int, float]]:
        return losses(self.folder, self.name)

    @property
    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    @property
    def restarts(self) -> str:
        return self.cluster.job(self.number)["Restarts"]

    def reach(self, step: int) -> None:
        def is_there() -> bool:
            assert self.state not in ("FAILED", "COMPLETED"), self.log
            return reached(self.folder, self.name, step)

        wait_for(f"step {step} of {self.name}", is_there)

    def finish(self) -> tuple[str, str]:
        """State and exit code at the end."""
        wait_for(f"the end of {self.name}", lambda: self.state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"))
        return self.state, self.cluster.job(self.number)["ExitCode"]
