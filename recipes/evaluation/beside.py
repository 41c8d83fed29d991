"""Evaluation beside a run (validation.job): which checkpoints wait for it, what starts it, and where results go.

Only the process that evaluates (recipes/training/evaluate_waiting.py) writes evaluations.jsonl, and only one does at a
time. Results are copied to metrics.jsonl by the run, or, when that has ended, by that process. Imports no torch.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from recipes.files.layout import CHECKPOINTS, EVALUATION_LOG, EVALUATIONS, METRICS, checkpoint_steps
from recipes.files.reading import logged_rows

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
BEGAN, FAILED, RESULT = "began", "failed", "result"
"""Each row of evaluations.jsonl has a step and one of these: a process, why it failed, or columns of metrics.jsonl."""
EVALUATED = "evaluated"
"""The column of metrics.jsonl with the time of a result: in rows that were copied there."""
ATTEMPTS, MOST, SECONDS = 2, 8, 5.0
"""Of these: attempts that a run starts for a checkpoint; checkpoints that are kept only because they wait (a queue that
stands still must not fill the disk); the time between two looks at the folder."""
OF_A_RUN = re.compile(
    r"CUDA_VISIBLE_DEVICES|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|NNODES|NODE_RANK|NPROC|RESTARTS"
    r"|(MASTER|ROLE|TORCHELASTIC|SBATCH|SLURM(?!_CONF$))_.*"
)
"""Variables of the run's own processes, which would mislead others."""


def waiting(folder: Path, attempts: int = ATTEMPTS) -> list[int]:
    """The steps whose checkpoints have no result, and fewer failures than this; the least often failed first."""
    rows = logged_rows(folder / EVALUATIONS)
    failed = Counter(row["step"] for row in rows if FAILED in row)
    left = {*checkpoint_steps(folder / CHECKPOINTS)} - {row["step"] for row in rows if RESULT in row}
    return sorted((step for step in left if failed[step] < attempts), key=lambda step: (failed[step], step))


def copied(folder: Path) -> set[int]:
    """The steps whose results metrics.jsonl has."""
    return {row["step"] for row in logged_rows(folder / METRICS) if EVALUATED in row}


def uncopied(rows: list[dict[str, Any]], there: Collection[int]) -> list[dict[str, Any]]:
    """The rows that metrics.jsonl lacks. rows: of evaluations.jsonl; there: the steps that metrics.jsonl has."""
    results = [row for row in rows if RESULT in row and row["step"] not in there]
    return [{"step": row["step"], **row[RESULT], EVALUATED: row["time"]} for row in results]


class Beside:
    """The evaluation of a run's checkpoints by other processes; on rank 0 only. Nothing that happens there ends the
    run, or holds it up."""

    def __init__(self, folder: Path, job: str, *, log: Callable[[str], None], write: Callable[[Any], None]) -> None:
        """folder: of the run. log: receives one line of text per message. write: appends a row to metrics.jsonl."""
        self._folder, self._log, self._write = folder, log, write
        self._kind, _, self._options = job.partition(" ")
        self._printed = folder.absolute() / EVALUATION_LOG
        self._asked = set[int]()  # the steps for which this start of the run has begun an evaluation
        self._child: subprocess.Popen[bytes] | None = None  # what evaluates, or submits that
        self._copied = copied(folder)  # read once: it may be long
        self._seen, self._before, self._next = 0, len(logged_rows(folder / EVALUATIONS)), 0.0

    def step(self, number: int) -> AbstractContextManager[None]:
        """A context manager to wrap every step in."""
        if time.monotonic() >= self._next:
            self.look()
            self._next = time.monotonic() + SECONDS
        return nullcontext()

    def look(self, *, last: bool = False) -> None:
        """Copy new results, log new failures, and start an evaluation if there is anything new to evaluate. last: even
        beside another, which may have looked for that already."""
        try:
            rows = logged_rows(self._folder / EVALUATIONS)
            for row in uncopied(rows, self._copied):
                self._copied.add(row["step"])
                self._write(row)
                shown = ", ".join(f"{name} {row[name]}" for name in row if name.startswith("validation_"))
                self._log(f"step {row['step']:>6}  beside the run: {shown}")
            for row in rows[max(self._seen, self._before) :]:
                if FAILED in row:
                    self._log(f"step {row['step']:>6}  NOT EVALUATED: {row[FAILED]}; {self._printed} says more")
            self._seen = len(rows)
            if (code := self._child.poll() if self._child else 0) is None and not last:
                return
            if code:
                self._log(f"the evaluation beside the run ended with exit code {code}; {self._printed} says more")
            new = {*waiting(self._folder)} - self._asked
            self._asked |= new
            self._child = self._start(last=last) if new else self._child if code is None else None
        except OSError as error:
            self._log(f"the evaluation beside the run: {error}")

    def end(self, *, finished: bool) -> None:
        """Evaluate what is left, if the run is finished, and say what that is; all checkpoints are saved."""
        if finished:
            self.look(last=True)
        if left := ", ".join(map(str, sorted(waiting(self._folder)))):
            state = "their evaluation goes on" if self._child and not self._child.poll() else "not evaluated yet"
            by_hand = shlex.join(["python", str(SCRIPTS / "evaluate.py"), str(self._folder), "--pending"])
            self._log(f"checkpoints of steps {left}: {state}; by hand: {by_hand}")

    def _start(self, *, last: bool) -> "subprocess.Popen[bytes]":
        """Start what evaluates all that waits, or what submits that. It outlives this process."""
        environment = {name: value for name, value in os.environ.items() if not OF_A_RUN.fullmatch(name)}
        launch = shlex.join([sys.executable, str(SCRIPTS / "launch.py"), "--standalone"])
        evaluate = shlex.join([str(SCRIPTS / "evaluate.py"), str(self._folder.absolute()), "--pending", str(ATTEMPTS)])
        if self._kind == "slurm":  # of jobs of one name, one runs at a time; --wait tells how it ends
            submit = ["sbatch", f"--job-name=evaluate-{self._folder.absolute()}", "--dependency=singleton"]
            submit += [f"--output={str(self._printed).replace('%', '%%')}", "--open-mode=append"]
            submit += [*([] if last else ["--wait"]), *shlex.split(self._options)]
            command = [*submit, f"--wrap={launch} --nproc-per-node=${{SLURM_GPUS_ON_NODE:-1}} {evaluate}"]
        else:
            environment["CUDA_VISIBLE_DEVICES"] = self._options
            launch += f" --nproc-per-node={self._options.count(',') + 1}"
            command = ["nice", "-n", "19", *shlex.split(f"{launch} {evaluate}")]
        with self._printed.open("ab") as out, suppress(subprocess.TimeoutExpired):
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            if last and self._kind == "slurm":  # it may be refused
                child.wait(timeout=30)
        return child
