"""Kills nodes of a run again and again: `python -m tests.chaos_nodes [--kills N] [--nodes N] [--spares N]`.

Each node is a supervisor, a launcher and a worker on this machine, with a memory folder of its own. What is killed, at
random moments of training, of copies and of recoveries, starts again as SLURM or a person would start it; a node that
loses its power also loses its memory. At the end, every loss and the files of the last checkpoint are compared with
those of an undisturbed run, and the times of recovery are printed as a table.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from tests.chaos import OVERRIDES, result_of, write_corpus
from tests.processes import ROOT, descendants, free_ports

EVERY = 10
"""checkpoint.memory_every."""
CHANGES = {"checkpoint.every": 100, "checkpoint.memory_every": EVERY, "metrics.picture": False}
PATIENCE = 180.0
"""Seconds until a recovery has failed."""
PARTS = {
    "noticed": r"is lost: |ended with exit code|supervise: attempt \d+ ",
    "restarted": r"^pre-flight: \d+ processes",
    "state back": r"^begins from the memory|^resumed from |^  fsdp: ",
    "next step": r"^step +\d+/",
}
"""Part of a recovery -> the line that ends it."""
Times = list[tuple[str, dict[str, float]]]
"""What was killed, and what recovery() has found."""


class Nodes:
    """All nodes of one run."""

    def __init__(self, folder: Path, name: str, options: argparse.Namespace, changes: Sequence[str]) -> None:
        self.folder, self.name, self.path = folder, name, folder / "runs" / name
        self.count, self.spares = options.nodes, options.spares
        self.memory = folder / "memory"
        self.memory.mkdir(exist_ok=True)
        values = OVERRIDES | CHANGES | {"run.name": name, "run.steps": options.steps}
        values |= {"checkpoint.memory_folder": self.memory} | ({"run.spare_nodes": self.spares} if self.spares else {})
        self._words = [word for key, value in values.items() for word in (f"--{key}", str(value))] + [*changes]
        self._port = str(free_ports(1)[0])
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._seen = dict.fromkeys(range(self.count + self.spares), 0)

    def log(self, node: int) -> Path:
        return self.folder / f"{self.name}.{node}.log"

    def start(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            own = {"NPROC": "1", "NNODES": str(self.count + self.spares), "NODE_RANK": str(node), "RESTARTS": "999"}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port, "OMP_NUM_THREADS": "1"}
            command = ["bash", str(ROOT / "scripts/run.sh"), str(ROOT / "configs/smollm3_debug.toml"), *self._words]
            with self.log(node).open("ab") as log:
                self.processes[node] = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=os.environ | own | {"PYTHON": sys.executable},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def new_lines(self) -> list[tuple[int, str]]:
        """(node, line) of all lines since the last call."""
        found = []
        for node, begin in self._seen.items():
            with suppress(FileNotFoundError), self.log(node).open("rb") as file:
                file.seek(begin)
                whole = file.read().rpartition(b"\n")[0]
                if whole:
                    self._seen[node] += len(whole) + 1
                    found += [(node, line) for line in whole.decode(errors="replace").split("\n")]
        return found

    def steps(self) -> int:
        """The newest logged step."""
        metrics = self.path / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        with suppress(ValueError, IndexError):
            return int(json.loads(lines[-1])["step"])
        return 0

    def has_ended(self) -> bool:
        return self.processes[0].poll() is not None


def end(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def tree(run: Nodes, node: int) -> list[int]:
    process = run.processes[node].pid
    return [process, *descendants(process)]


def words(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    return ""


def lose(run: Nodes, nodes: Sequence[int], *, power: bool) -> list[int]:
    """Kill all processes of these nodes, and empty their memory if they lose their power."""
    end(process for node in nodes for process in tree(run, node))
    for node in nodes:
        run.processes[node].wait()
        for folder in run.memory.glob(f"shardwright-*/*/*#{node}") if power else ():
            shutil.rmtree(folder, ignore_errors=True)
    return [*nodes]


def training(run: Nodes) -> list[int]:
    """The nodes but node 0 that do not wait as spare ones now, of those that have a place of their own."""
    return [
        node
        for node in range(1, run.count)
        if (text := run.log(node).read_text()).rfind("waits as a spare node") <= text.rfind("supervise: attempt ")
    ]


def kill_worker(run: Nodes, draw: random.Random) -> list[int]:
    node = draw.choice([0, *training(run)])
    end([process for process in tree(run, node) if "/train.py" in words(process) and "launch.py" not in words(process)])
    return []


def kill_launcher(run: Nodes, draw: random.Random) -> list[int]:
    node = draw.choice([0, *training(run)])
    end([one for one in tree(run, node) if "launch.py" in words(one) and "supervise.py" not in words(one)][:1])
    return []


KINDS: dict[str, Callable[[Nodes, random.Random], list[int]]] = {
    "process": kill_worker,
    "launcher": kill_launcher,
    "node, power": lambda run, draw: lose(run, [draw.choice(training(run))], power=True),
    "node, processes": lambda run, draw: lose(run, [draw.choice([0, *training(run)])], power=False),
    "two nodes, power": lambda run, draw: lose(run, [1, 3] if run.count > 3 else [1], power=True),
    "node and neighbour": lambda run, draw: lose(run, [1, 2 % run.count], power=False),
    "all processes": lambda run, draw: lose(run, range(run.count + run.spares), power=False),
}
"""What is killed -> how; it returns the nodes to start again."""
SPARE_KINDS: dict[str, Callable[[Nodes, random.Random], list[int]]] = {
    "spare": lambda run, draw: lose(run, [run.count], power=True),
}


def recovery(run: Nodes, kind: str, draw: random.Random, *, back_after: float) -> dict[str, float] | None:
    """Kill, start again what was lost, and wait for the next step. Returns seconds since the kill by part, and the
    repeated steps; None if the run ended before."""
    run.new_lines()
    before, began = run.steps(), time.monotonic()
    lost, found = (KINDS | SPARE_KINDS)[kind](run, draw), dict[str, float]()
    parts, began_from = [*PARTS], -1
    restart_at = began + back_after
    while parts:
        if lost and time.monotonic() >= restart_at:
            run.start(lost)
            lost = []
        for _, line in run.new_lines():
            if match := re.search(r"begins from the memory of the nodes: step (\d+)|resumed from .*step-(\d+)", line):
                began_from = int(match[1] or match[2])
            for part in parts[: 2 if parts[0] == "noticed" else 1]:  # nobody notices that all are killed
                if re.search(PARTS[part], line):
                    found[part] = time.monotonic() - began
                    del parts[: parts.index(part) + 1]
                    break
        if run.has_ended() and 0 not in lost:
            if run.processes[0].returncode == 0:
                return None
            sys.exit(f"{kind}: node 0 ended with {run.processes[0].returncode}; see {run.log(0)}")
        if time.monotonic() > began + PATIENCE:
            sys.exit(f"{kind}: not back after {PATIENCE:.0f} s; see {run.log(0)}")
        time.sleep(0.02)
    run.start(lost)
    return found | {"lost steps": before - max(began_from, 0)}


def torment(run: Nodes, options: argparse.Namespace, kills: int, draw: random.Random) -> Times:
    """Start a run, kill this often, and let it end."""
    times: Times = []
    run.start(range(run.count + run.spares))
    kinds = [*KINDS, *(SPARE_KINDS if run.spares else ())]
    while len(times) < kills and not run.has_ended():
        reached = run.steps()
        while run.steps() < reached + EVERY + 1 and not run.has_ended():
            time.sleep(0.02)
        kind = kinds[len(times) % len(kinds)] if options.kind is None else options.kind
        time.sleep(draw.uniform(0, options.pause) + (options.rest if kind == "node, power" else 0))
        if run.has_ended() or kind == "spare":
            if kind == "spare" and not run.has_ended():  # nothing may happen
                lose(run, [run.count], power=True)
                times.append((kind, {}))
                run.start([run.count])
            continue
        if (found := recovery(run, kind, draw, back_after=options.back_after)) is not None:
            times.append((kind, found))
            shown = ", ".join(f"{part} {seconds:.1f}" for part, seconds in found.items())
            print(f"  {kind:<20} {shown}", flush=True)
            if found["lost steps"] > 2 * EVERY:
                print("  MORE STEPS LOST THAN EXPECTED", flush=True)
    while not run.has_ended():
        time.sleep(0.1)
    if code := run.processes[0].returncode:
        sys.exit(f"the run ended with exit code {code}; see {run.log(0)}")
    return times


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 if every run ended as the undisturbed one did."""
    parser = argparse.ArgumentParser(prog="chaos_nodes.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=20, help="in all")
    parser.add_argument("--kills-per-run", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pause", type=float, default=1.5, help="longest time from a copy to a kill, seconds")
    parser.add_argument(
        "--rest", type=float, default=25.0, help="seconds longer before a node loses power: the next launcher is ready"
    )
    parser.add_argument("--back-after", type=float, default=0.0, help="seconds until what was lost starts again")
    parser.add_argument("--kind", choices=[*KINDS, *SPARE_KINDS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: a temporary folder)")
    options, changes = parser.parse_known_args(arguments)
    rows: Times = []
    draw, verdicts = random.Random(options.seed), list[bool]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        write_corpus(folder)
        undisturbed = Nodes(folder, "undisturbed", options, changes)
        torment(undisturbed, options, 0, draw)
        expected = result_of(undisturbed.path)
        while len(rows) < options.kills:
            run = Nodes(folder, f"tormented-{len(verdicts)}", options, changes)
            wanted = min(options.kills_per_run, options.kills - len(rows))
            rows += torment(run, options, wanted, draw)
            found = result_of(run.path)
            verdicts.append(found == expected)
            losses, files = ("equal" if one == other else "DIFFER" for one, other in zip(found, expected, strict=True))
            print(
                f"run {len(verdicts)}: {len(found[0])} losses {losses}, files of the last checkpoint {files}",
                flush=True,
            )
    print("\n| killed | times | " + " | ".join(PARTS) + " | steps lost at most |")
    print("|---|---:|" + "---:|" * (len(PARTS) + 1))
    for kind in dict.fromkeys(kind for kind, _ in rows):
        of_kind = [found for one, found in rows if one == kind and found]
        cells = [
            f"{median(seconds):.1f} s" if (seconds := [f[part] for f in of_kind if part in f]) else "-"
            for part in PARTS
        ]
        lost = max((found["lost steps"] for found in of_kind), default=0)
        print(f"| {kind} | {sum(one == kind for one, _ in rows)} | {' | '.join(cells)} | {lost:.0f} |")
    print(f"\n{len(rows)} kills, {sum(verdicts)} of {len(verdicts)} runs ended as the undisturbed one, to the bit")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
