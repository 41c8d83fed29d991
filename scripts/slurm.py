"""What scripts/slurm.sbatch runs: a recipe on all nodes of a SLURM job, again where that helps.

slurm.py RECIPE [--section.field value ...]   on the job's first node: check, start every node, judge how it ended
slurm.py --node FOLDER COMMAND ...            on each node, through srun: run the command, keep its output and exit code
"""

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # first: other distributions install a top-level `recipes` too

from parallel.errors import UserError  # noqa: E402
from recipes.cluster.restarts import End, History, end_of, newest_step, number_of_restarts, reason_to_stop  # noqa: E402
from recipes.files.exit_codes import PREEMPTED, REFUSED  # noqa: E402
from recipes.schema import RunConfig  # noqa: E402

RUN = ["bash", str(ROOT / "scripts" / "run.sh")]
STARTED, STOPPING = "started\n", "stopping\n"
STATES = {STARTED: "lost: killed, or the node failed", STOPPING: "killed while stopping"}
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def say(text: str) -> None:
    print(f"slurm: {text}", flush=True)


class Job:
    """The job whose batch shell this process is."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        self.arguments = arguments
        self.id, self.nodes = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_JOB_NUM_NODES"])
        self.node_list = environment["SLURM_JOB_NODELIST"]
        self.logs = Path(f"slurm-{self.id}").absolute()
        self.restarts = number_of_restarts(environment.get("RESTARTS", "10"))
        self.environment = {**environment, "NNODES": str(self.nodes), "RESTARTS": "0"}  # of one node alone: none
        self.taken = False

    def check(self) -> Path | None:
        """The folder of the run, or None where the recipe does not fit, which is said."""
        done = subprocess.run(
            [*RUN, *self.arguments, "--check"], env=self.environment, stdout=subprocess.PIPE, text=True
        )
        if done.returncode != 0:
            return None
        run = tomllib.loads(done.stdout)["run"]
        return RunConfig(name=run["name"], output=run["output"]).folder

    def supervise(self, folder: Path) -> int:
        """Start all nodes until they are done or another start would not help. Returns the exit code."""
        self.logs.mkdir(exist_ok=True)
        history = History(self.logs / "attempts.json")
        code = 1
        while True:
            step = newest_step(folder)
            if stop := reason_to_stop(history.attempts, step=step, restarts=self.restarts):
                say(f"stopped: {stop}")
                return code
            history.begin(step)
            attempt = len(history.attempts)
            say(f"attempt {attempt} on {self.node_list}, from {f'step {step}' if step else 'the beginning'}")
            codes = self._run(attempt)
            if self.taken:
                history.end(End.TAKEN)
                say("ended by SLURM, which cancels the job or requeues it")
                return PREEMPTED
            end, code = end_of([*codes.values()])
            absent = [name for name in codes if not exit_file(self.logs, name).exists()]
            if absent and end == End.CRASHED:
                end = End.UNSTARTED
            history.end(end)
            if end == End.DONE:
                return 0
            say(f"attempt {attempt} {end.value}; newest checkpoint: step {newest_step(folder)}")
            if end != End.PREEMPTED:
                self._explain(codes)
            if absent:
                say(f"  does not answer: {' '.join(absent)}")
            if end in (End.PREEMPTED, End.UNSTARTED) and not reason_to_stop(
                history.attempts, step=newest_step(folder), restarts=self.restarts
            ):
                return self._requeue()

    def _run(self, attempt: int) -> dict[str, int | None]:
        """Run the recipe on all nodes once. Returns the exit code of each, None where it could not tell."""
        names = output("scontrol", "show", "hostnames", self.node_list).split()
        for name in names:
            exit_file(self.logs, name).unlink(missing_ok=True)
        environment = self.environment | {
            "MASTER_ADDR": self.environment.get("MASTER_ADDR") or address(names[0]),
            # Below the ports that systems give out by themselves, and another one each time: the last may linger.
            "MASTER_PORT": self.environment.get("MASTER_PORT") or str(20_000 + (self.id * 10 + attempt % 10) % 10_000),
        }
        # One task per node that has all of it. A node that fails ends the others, which might wait for it for hours.
        srun = ["srun", f"--ntasks={self.nodes}", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1"]
        node = [sys.executable, str(ROOT / "scripts" / "slurm.py"), "--node", str(self.logs)]
        with self._noticing_the_end():
            process = subprocess.Popen([*srun, *node, *RUN, *self.arguments], env=environment)
            process.wait()
        return {name: read_code(exit_file(self.logs, name)) for name in names}

    @contextmanager
    def _noticing_the_end(self) -> Iterator[None]:
        """SIGTERM comes to the batch shell only when SLURM ends the job; srun and the nodes have it too."""

        def notice(number: int, frame: FrameType | None) -> None:
            self.taken = True

        before = signal.signal(signal.SIGTERM, notice)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _explain(self, codes: dict[str, int | None]) -> None:
        """Each way to end with the nodes that ended so, and the last words of the first of them."""
        by_end: dict[str, list[str]] = {}
        for name, code in codes.items():
            lost = STATES.get(read_state(exit_file(self.logs, name)), "not started")
            by_end.setdefault(lost if code is None else f"exit code {code}", []).append(name)
        for what, names in by_end.items():
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            say(f"  {what}: {' '.join(names[:4])}{more}")
            for word in last_words(self.logs / f"{names[0]}.log"):
                say(f"    {names[0]}: {word}")

    def _requeue(self) -> int:
        """Hand the nodes back and wait in the queue for others."""
        done = subprocess.run(["scontrol", "requeue", str(self.id)], capture_output=True, text=True)
        if done.returncode != 0:
            say(f"not requeued ({done.stderr.strip()}); the same sbatch command goes on from the checkpoint")
            return PREEMPTED
        say("requeued; goes on from the checkpoint")
        time.sleep(60)  # SLURM ends this process now
        return PREEMPTED


def run_node(logs: Path, command: list[str]) -> int:
    """Run the command on this node with NODE_RANK; its output goes to NODE.log, and on the first node to srun as well.

    Returns 0 after a pre-emption too, or srun would end the nodes that are still saving.
    """
    name, rank = os.environ["SLURMD_NODENAME"], os.environ["SLURM_NODEID"]
    exit_file(logs, name).write_text(STARTED)
    with (logs / f"{name}.log").open("ab") as log:
        main = rank == "0"
        child = subprocess.Popen(
            command,
            env={**os.environ, "NODE_RANK": rank},
            stdout=subprocess.PIPE if main else log,
            stderr=subprocess.STDOUT,
        )

        def relay(number: int, frame: FrameType | None) -> None:
            exit_file(logs, name).write_text(STOPPING)
            child.send_signal(number)

        # Depending on its configuration SLURM signals this process alone, or all of the step: to the launcher the same
        # signal again is an echo, another one would mean haste.
        for number in STOP_SIGNALS:
            signal.signal(number, relay)
        if child.stdout is not None:
            while chunk := os.read(child.stdout.fileno(), 1 << 16):
                log.write(chunk)
                log.flush()
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
        code = child.wait()
    code = code if code >= 0 else 128 - code
    exit_file(logs, name).write_text(f"{code}\n")
    return 0 if end_of([code])[0] == End.PREEMPTED else code


def exit_file(logs: Path, name: str) -> Path:
    """Where a node leaves its exit code; until then STARTED, or STOPPING once it was told to stop."""
    return logs / f"{name}.exit"


def read_state(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def read_code(path: Path) -> int | None:
    text = read_state(path).strip()
    return int(text) if text.isdecimal() else None


def last_words(log: Path) -> list[str]:
    """What the launcher said at the end of a node's log."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.startswith("launch: ")][-2:]


def output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def address(node: str) -> str:
    """Where SLURM itself reaches a node, whose name need not be a host name."""
    fields = output("scontrol", "--oneliner", "show", "node", node).split()
    return next((field.partition("=")[2] for field in fields if field.startswith("NodeAddr=")), node)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--node"]:
        return run_node(Path(arguments[1]), arguments[2:])
    try:
        job = Job([word for word in arguments if word != "--check"], os.environ)
        folder = job.check()
    except UserError as error:
        say(str(error))
        folder = None
    if folder is None:
        say("refused: nothing was started")
        return REFUSED
    if "--check" in arguments:
        say(f"the recipe fits {job.nodes} nodes")
        return 0
    return job.supervise(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
