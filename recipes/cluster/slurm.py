"""A recipe on all nodes of a SLURM job, started again where that helps. Imports no torch."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import FrameType

from parallel.errors import UserError
from recipes.cluster.restarts import (
    End,
    History,
    end_of,
    fault_pause,
    newest_step,
    number_of_restarts,
    pause_after,
    reason_to_stop,
)
from recipes.files.atomic import utc_now
from recipes.files.end import read_end
from recipes.files.exit_codes import PREEMPTED, SIGNALS, TEMPORARY
from recipes.files.screen import Output, put, tell

STARTED, STOPPING = "started", "stopping"
STATES = {STARTED: "lost: killed, or the node failed", STOPPING: "killed while stopping"}
TAKEN = ("--run.spare_nodes", "0", "--run.least_nodes", "0")
"""No node of an attempt waits, and none may lack."""
STATE = "slurm-state:"
"""Begins a line from a node to the batch script, through srun's standard error: no disk can be full on that way."""


def log(text: str) -> None:
    tell(f"{utc_now()} slurm: {text}", to=1)


class Job:
    """The SLURM job whose batch script is this process."""

    def __init__(self, run: Sequence[str], environment: Mapping[str, str], *, on_node: Sequence[str]) -> None:
        """run: the command that trains on one node. on_node: a command that passes its arguments to run_node()."""
        self._run_command, self._on_node = [*run], [*on_node]
        if "SLURM_JOB_ID" not in environment:
            raise UserError(
                "not in a SLURM job: sbatch --nodes=N scripts/slurm.sbatch RECIPE, or scripts/run.sh RECIPE"
            )
        self.id, self.nodes = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_JOB_NUM_NODES"])
        self.node_list = environment["SLURM_JOB_NODELIST"]
        self.logs = Path(f"slurm-{self.id}").absolute()
        self.restarts = number_of_restarts(environment.get("RESTARTS", "10"))
        # RESTARTS=0: this process restarts all nodes together, so no node restarts by itself.
        self.environment = {**environment, "NNODES": str(self.nodes), "RESTARTS": "0"}
        self.requeues = int(environment.get("SLURM_RESTART_COUNT", "0"))
        self.ended_by_slurm = False
        self.spare_nodes = self.least_nodes = 0
        """Of the recipe; set before supervise()."""
        self._absent: list[str] = []  # in the attempt before
        self._lost: dict[str, int] = {}  # node -> the last attempt in which it did not answer, or was lost

    def checked_recipe(self) -> tuple[int, str]:
        """(exit code of the check, the resolved recipe as TOML). The check has printed what is wrong with the recipe.

        After a fault that may pass, it is checked again, as often as the job restarts. Unless the job has FORCE=1, what
        cannot fit the GPUs is wrong, too.
        """
        for number in count(1):
            done = self._check()
            if done.returncode != TEMPORARY or number > self.restarts:
                break
            log(f"checked again in {fault_pause(number):g} s")
            time.sleep(fault_pause(number))
        return done.returncode, done.stdout

    def _check(self, *overrides: str, errors: int | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment | {"FORCE": self.environment.get("FORCE") or "0"} | more
        command = [*self._run_command, *overrides, "--check"]
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)

    def supervise(self, folder: Path) -> int:
        """Start all nodes until the run is done or another start would not help. Returns the exit code."""
        try:
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            log(f"{self.logs} cannot be made: {error.strerror}; the job goes on without it")
        history = History(self.logs / "attempts.json", log=log)
        code = 1
        while True:
            step, before = newest_step(folder), read_end(folder)
            if stop := reason_to_stop(history.attempts, step=step, restarts=self.restarts):
                log(f"stopped: {stop}")
                return code
            history.begin(step)
            attempt, names = len(history.attempts), self._chosen()
            fewer = len(names) < self.nodes
            on = output("scontrol", "show", "hostlist", ",".join(names)).strip() if fewer else self.node_list
            log(f"attempt {attempt} on {on}, from {f'step {step}' if step else 'the beginning'}")
            states = self._run(attempt, names)
            if self.ended_by_slurm:
                history.end(End.TAKEN)
                log("ended by SLURM, which cancels the job or requeues it")
                return PREEMPTED
            end, code = end_of([int(state) if state and state.isdecimal() else None for state in states.values()])
            self._absent = absent = [name for name, state in states.items() if state is None]
            if absent and end in (End.CRASHED, End.TEMPORARY):
                end = End.UNSTARTED
            history.end(end)
            if end == End.DONE:
                return 0
            log(f"attempt {attempt} {end.value}; newest checkpoint: step {newest_step(folder)}")
            if end != End.PREEMPTED:
                self._log_causes(states)
                if (killed := read_end(folder)) != before and killed:
                    log(f"  {killed}")
            if absent:
                log(f"  no answer from: {' '.join(absent)}")
            # Where nodes are absent, srun has killed the others before they could say so.
            self._lost |= dict.fromkeys(absent or [name for name in states if states[name] == STARTED], attempt)
            if end == End.UNSTARTED and not {*absent}.intersection(self._chosen()):
                continue
            if end in (End.PREEMPTED, End.UNSTARTED) and not reason_to_stop(
                history.attempts, step=newest_step(folder), restarts=self.restarts
            ):
                if history.unsaved and self.requeues >= self.restarts and newest_step(folder) <= step:
                    log(f"stopped: requeued {self.requeues} times and RESTARTS={self.restarts}, without attempts.json")
                    return code
                return self._requeue()
            if end == End.TEMPORARY:
                time.sleep(pause_after(history.attempts))

    def _chosen(self) -> list[str]:
        """The nodes that train next: the first that are not down; those that were lost in this job only as a remedy.
        Fewer, if the recipe allows it and there are no more."""
        names, count = output("scontrol", "show", "hostnames", self.node_list).split(), self.nodes - self.spare_nodes
        if not (self.spare_nodes or self.least_nodes):
            return names
        ask = ["sinfo", "--noheader", "--Node", f"--nodes={self.node_list}", "--states=down,no_respond", "--format=%N"]
        down = subprocess.run(ask, stdout=subprocess.PIPE, text=True).stdout.split()  # none if SLURM does not answer
        down += self._absent
        if self.least_nodes and (there := len({*names} - {*down})) < count:
            count = next(filter(self._can_train, range(there, self.least_nodes - 1, -1)), count)
        best = sorted(names, key=lambda name: (name in down, self._lost.get(name, 0)))[:count]
        return [name for name in names if name in best]  # in the order of SLURM, by which it numbers them

    def _can_train(self, nodes: int) -> bool:
        return self._check(*TAKEN, errors=subprocess.DEVNULL, NNODES=str(nodes)).returncode in (0, TEMPORARY)

    def _run(self, attempt: int, names: Sequence[str]) -> dict[str, str | None]:
        """Run the recipe on these nodes once. Returns the last state of each node: an exit code, or a key of STATES, or
        None if the node told nothing."""
        variables = {
            "NNODES": str(len(names)),
            "MASTER_ADDR": self.environment.get("MASTER_ADDR") or address(names[0]),
            # Below the ephemeral ports, and a different port for each attempt: the last one may still be in use.
            "MASTER_PORT": self.environment.get("MASTER_PORT") or str(20_000 + (self.id * 10 + attempt % 10) % 10_000),
        }

        def record(number: int, frame: FrameType | None) -> None:
            self.ended_by_slurm = True

        # The batch script gets SIGTERM only when SLURM ends the job; srun and the nodes get it too.
        before = signal.signal(signal.SIGTERM, record)
        try:
            taken = TAKEN if self.spare_nodes or self.least_nodes else ()
            return self._step([*self._on_node, str(self.logs), *self._run_command, *taken], names, variables)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _step(
        self, command: Sequence[str], names: Sequence[str], variables: Mapping[str, str]
    ) -> dict[str, str | None]:
        """Run a command on these nodes. Returns the last state of each; what else they print is shown."""
        states: dict[str, str | None] = dict.fromkeys(names)
        # One task per node, with all of its CPUs. A node that fails ends the others, which might wait for it for hours.
        srun = ["srun", f"--ntasks={len(names)}", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1"]
        if len(names) < self.nodes:
            srun += [f"--nodes={len(names)}", f"--nodelist={','.join(names)}"]
        environment = {**self.environment, **variables}
        with subprocess.Popen([*srun, *command], env=environment, stderr=subprocess.PIPE) as process:
            assert process.stderr
            for line in process.stderr:
                text = line.decode(errors="replace").rstrip("\n")
                match text.split(maxsplit=2):
                    case [prefix, name, state] if prefix == STATE and name in states:
                        states[name] = state
                    case _:
                        tell(text)
        return states

    def _log_causes(self, states: Mapping[str, str | None]) -> None:
        by_end: dict[str, list[str]] = {}
        for name, state in states.items():
            ended = f"exit code {state}" if state and state.isdecimal() else STATES.get(state or "", "not started")
            by_end.setdefault(ended, []).append(name)
        for what, names in by_end.items():
            log(f"  {what}: {some(names)}")
            for line in last_launcher_lines(self.logs / f"{names[0]}.log"):
                log(f"    {names[0]}: {line}")

    def _requeue(self) -> int:
        done = subprocess.run(["scontrol", "requeue", str(self.id)], capture_output=True, text=True)
        if done.returncode != 0:
            log(f"not requeued ({done.stderr.strip()}); the same sbatch command resumes from the checkpoint")
            return PREEMPTED
        log("requeued; resumes from the checkpoint")
        time.sleep(60)  # SLURM ends this process meanwhile
        return PREEMPTED


def run_node(logs: Path, command: list[str]) -> int:
    """Run the command on this node with NODE_RANK set. Its output goes to NODE.log, on the first node also to srun.

    Returns its exit code, but 0 after a pre-emption: else srun ends the nodes that are still saving.
    """
    name, rank = os.environ["SLURMD_NODENAME"], os.environ["SLURM_NODEID"]

    def report(state: str) -> None:
        put(2, f"{STATE} {name} {state}\n".encode(), patience=60)

    report(STARTED)
    file = open_log(logs / f"{name}.log")
    child = subprocess.Popen(
        command,
        env={**os.environ, "NODE_RANK": rank},
        stdout=subprocess.PIPE if rank == "0" else file,  # None: to srun
        stderr=subprocess.STDOUT,
    )

    def relay(number: int, frame: FrameType | None) -> None:
        report(STOPPING)
        child.send_signal(number)

    # Some configurations of SLURM signal the launcher too; it ignores the same signal again within a second.
    for number in SIGNALS:
        signal.signal(number, relay)
    if child.stdout is not None:
        to_file, to_srun = Output(), Output()
        # Whatever happens to the logs: a full pipe stops training.
        while chunk := os.read(child.stdout.fileno(), 1 << 16):
            to_srun.put(1, chunk)
            if file is not None:
                to_file.put(file, chunk)
    code = child.wait()
    code = code if code >= 0 else 128 - code
    report(str(code))
    return 0 if end_of([code])[0] == End.PREEMPTED else code


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{' '.join(names[:4])}{more}"


def open_log(path: Path) -> int | None:
    """A descriptor to append to the file, or None."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        tell(f"slurm: {path} cannot be written: {error.strerror}; the output of this node goes to the main log")
        return None


def last_launcher_lines(path: Path) -> list[str]:
    """The launcher's last lines in a node's log, two at most."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith("launch: ")][-2:]


def output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def address(node: str) -> str:
    """The address at which SLURM itself reaches a node, whose name need not be a host name."""
    try:
        fields = output("scontrol", "--oneliner", "show", "node", node).split()
    except subprocess.CalledProcessError:  # SLURM's controller does not answer, but the nodes go on
        return node
    return next((field.partition("=")[2] for field in fields if field.startswith("NodeAddr=")), node)
