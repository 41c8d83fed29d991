"""Kills runs again and again: `python -m tests.chaos [--kills N]`. They must end as an undisturbed run does.

One process or all get SIGKILL, at random times while they start, train and save; then the same command continues. The
files of the last checkpoint and every logged loss are compared with those of an undisturbed run. Further arguments
change the recipe, as in `--processes 4 --mesh.context 2 --mesh.tensor 2`.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.processes import ROOT, descendants

OVERRIDES = {
    "model.layers": 2,
    "model.width": 64,
    "model.feed_forward_width": 96,
    "model.heads": 4,
    "model.key_value_heads": 2,
    "model.head_width": 16,
    "data.source": "corpus.txt",
    "data.tokenizer": "train:512",
    "data.cache": "cache",
    "batch.sequence_length": 64,
    "batch.global_batch_size": 16,
    "batch.micro_batch_size": 2,
    "schedule.kind": "constant",
    "schedule.warmup_steps": 5,
    "schedule.decay_steps": 0,
    "checkpoint.every": 2,
    "checkpoint.keep": 2,
    "metrics.every": 1,
    "validation.every": 0,
    "validation.sample_tokens": 0,
}
"""A small model that saves asynchronously at every second step."""


class Run:
    """One run, started as often as needed."""

    def __init__(self, folder: Path, name: str, *, processes: int, steps: int, changes: Sequence[str]) -> None:
        """changes: to the recipe, as words of the command line."""
        self.folder, self.path = folder, folder / "runs" / name
        self.output = folder / f"{name}.output"
        overrides = OVERRIDES | {"run.name": name, "run.steps": steps}
        launch = [sys.executable, str(ROOT / "scripts/launch.py"), "--standalone", f"--nproc-per-node={processes}"]
        self._command = [*launch, str(ROOT / "train.py"), str(ROOT / "configs/smollm3_debug.toml")]
        self._command += [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
        self._command += changes

    def start(self) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            return subprocess.Popen(self._command, cwd=self.folder, env=environment, stdout=log, stderr=log)

    def steps(self) -> int:
        """The number of logged steps."""
        metrics = self.path / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def result_of(run: Path) -> tuple[list[tuple[int, float, float]], dict[str, str]]:
    """(step, loss, gradient norm) of every step, and the checksum of every file of the last checkpoint."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    newest = max((run / "checkpoints").glob("step-*"))
    files = json.loads((newest / "manifest.json").read_text())["files"]
    checksums = {f"{newest.name}/{name}": about["checksum"] for name, about in files.items()}
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row], checksums


def write_corpus(folder: Path) -> None:
    """The text that is trained on."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    (folder / "corpus.txt").write_text("\n\n".join((stdlib / f"{name}.py").read_text() for name in ("ast", "enum")))


def kill(process: subprocess.Popen[bytes], workers: list[int]) -> None:
    """Send SIGKILL to these processes, and wait until all processes of the run have ended."""
    everything = [process.pid, *descendants(process.pid)]
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    try:
        process.wait(90)
    except subprocess.TimeoutExpired:
        sys.exit(f"the run did not end within 90 s after a process of it was killed: {everything}")
    while any(Path(f"/proc/{other}/task").exists() for other in everything):
        time.sleep(0.05)


def torment(run: Run, *, kills: int, pause: float, draw: random.Random) -> int:
    """Start a run until it ends by itself, and kill it up to this many times. Returns the number of kills."""
    done = 0
    while True:
        process = run.start()
        began = time.monotonic()
        if done < kills:
            _wait_for_a_random_time(run, process, pause=pause, draw=draw)
            workers = descendants(process.pid)
            if process.poll() is None and workers:
                everything = draw.random() < 0.5
                kill(process, [process.pid, *workers] if everything else [draw.choice(workers)])
                done += 1
                what = "all processes" if everything else "one worker"
                seconds = time.monotonic() - began
                print(f"  kill {done:>3}: {what:<13} after {seconds:5.2f} s, {run.steps()} steps logged", flush=True)
                continue
        code = process.wait()
        if code != 0:
            output = run.output.read_text(errors="replace")
            sys.exit(f"the run ended with exit code {code} though it was not killed:\n{output[-2000:]}")
        return done


def _wait_for_a_random_time(run: Run, process: subprocess.Popen[bytes], *, pause: float, draw: random.Random) -> None:
    """A third of the times is during start-up, the others up to a few steps after a step, among the saves."""
    before = run.steps()
    if draw.random() < 2 / 3:
        while process.poll() is None and run.steps() in (before, 0):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, pause))
    else:
        time.sleep(draw.uniform(0, 4 * pause))


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 if every killed run ended as the undisturbed one did."""
    parser = argparse.ArgumentParser(prog="chaos.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=50, help="in all")
    parser.add_argument("--kills-per-run", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=1.5, help="longest time from a step to a kill, seconds")
    parser.add_argument("--seed", type=int, default=0)
    options, changes = parser.parse_known_args(arguments)
    draw, kills = random.Random(options.seed), 0
    verdicts: list[bool] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpus(folder)
        new_run = partial(Run, folder, processes=options.processes, steps=options.steps, changes=changes)
        undisturbed = new_run("undisturbed")
        torment(undisturbed, kills=0, pause=0, draw=draw)
        expected = result_of(undisturbed.path)
        while kills < options.kills:
            run = new_run(f"tormented-{len(verdicts)}")
            wanted = min(options.kills_per_run, options.kills - kills)
            kills += torment(run, kills=wanted, pause=options.pause, draw=draw)
            found = result_of(run.path)
            verdicts.append(found == expected)
            losses, files = ("equal" if one == other else "DIFFER" for one, other in zip(found, expected, strict=True))
            newest = min(found[1]).partition("/")[0]
            print(f"run {len(verdicts)}: {len(found[0])} losses {losses}, files of {newest} {files}", flush=True)
    print(f"{kills} kills, {sum(verdicts)} of {len(verdicts)} runs ended as the undisturbed one, to the bit")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
