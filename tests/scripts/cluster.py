"""A SLURM of two nodes on this machine: its own configuration, key, ports and folders, and nothing left afterwards."""

import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.processes import free_ports, wait_for

DAEMONS = ("munged", "slurmctld", "slurmd")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
KILL_WAIT = 20
"""Seconds between SLURM's SIGTERM and its SIGKILL."""


def missing() -> str | None:
    """Why there can be no SLURM here."""
    if absent := [name for name in DAEMONS if not shutil.which(name, path=PATH)]:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    return None


class Cluster:
    """node0 and node1, and the commands to use them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(folder)}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ("munge", "state", "spool-node0", "spool-node1"):
            (self.folder / name).mkdir()
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.folder / "slurm.conf").write_text(self._configuration())
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder / 'munge' / name}" for option, name in files.items()]
        # --force: the folder for temporary files may be written to by all
        self._daemon("munged", "--foreground", "--force", *options)
        wait_for("munged", (self.folder / "munge" / "socket").exists, seconds=30)
        self._daemon("slurmctld", "-D")
        for node in ("node0", "node1"):
            self.start_node(node)
        wait_for("two idle nodes", lambda: self._ask("sinfo", "-h", "-N", "-o", "%t") == "idle\nidle\n", seconds=60)

    def start_node(self, node: str) -> None:
        self._nodes[node] = self._daemon("slurmd", "-D", "-N", node)

    def lose(self, node: str) -> None:
        """What a node does that loses its power: the daemon, its helpers and all tasks are gone at once."""
        daemon = self._nodes[node]
        daemon.kill()
        for process in self.processes(node, daemons=True):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        daemon.wait()
        self._daemons.remove(daemon)

    def _configuration(self) -> str:
        host, (control, first, second) = socket.gethostname(), free_ports(3)
        nodes = "".join(
            f"NodeName=node{index} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n"
            for index, port in enumerate((first, second))
        )
        return f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job may start again when this credential has expired: 120 s by default, which less than 5 stand for too.
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
        """End all jobs, then the daemons, the last one first; then nothing may be left."""
        try:
            self._ask("scancel", "--user=root")
            wait_for("an empty queue", lambda: not self._ask("squeue", "-h"), seconds=KILL_WAIT + 40)
        finally:
            for daemon in reversed(self._daemons):
                daemon.send_signal(signal.SIGTERM)
                try:
                    daemon.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        try:
            wait_for("no process left", lambda: not self.processes(), seconds=30)
        finally:
            for process in self.processes():
                os.kill(process, signal.SIGKILL)

    def _ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout

    def do(self, *command: str) -> str:
        """Standard output of a command of SLURM, which must not fail."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(
        self, script: Path, words: list[str], *, folder: Path, flags: list[str], variables: dict[str, str]
    ) -> str:
        """Returns the job's number."""
        command = ["sbatch", "--parsable", *flags, str(script), *words]
        environment = {**variables, "SLURM_CONF": self.environment["SLURM_CONF"]}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What SLURM knows of a job: JobState, ExitCode, Restarts and so on."""
        words = self.do("scontrol", "--oneliner", "show", "job", number).split()
        return {key: value for key, _, value in (word.partition("=") for word in words)}

    def processes(self, node: str | None = None, *, daemons: bool = False) -> list[int]:
        """Everything that runs with this configuration; node: of the tasks on that node alone, or its daemons too."""
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
