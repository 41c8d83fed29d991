"""What the start of a run costs a shared file system: files that are opened and looked at per process, and per node."""

import os
import subprocess
import sys
import tempfile
from functools import cache
from math import ceil
from pathlib import Path

from recipes.bench.scale_rows import Row
from recipes.cluster.pack import checkout_entries, environment_entries

ROOT = Path(__file__).resolve().parents[2]
PER_NODE = 8
"""Processes."""
LOOK_UPS_PER_SECOND = 50_000
"""Assumed of a shared file system; one that is busy with other jobs answers fewer."""
BYTES_PER_SECOND = 1e9
"""Assumed of one node's network, in each direction."""
FANOUT = 8
"""To how many nodes each node of sbcast passes a block on, at most and by default."""

HOOK = """
import os
import sys


def watch(folder):
    import posix

    # Not inherited: each program opens its own.
    file = os.open(f"{folder}/{os.environ.get('RANK', 'node')}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(path):
        if isinstance(path, (str, bytes, os.PathLike)):
            os.write(file, os.path.abspath(os.fsencode(path)) + b"\\n")

    def heard(event, arguments):
        if event in ("open", "os.listdir", "os.scandir"):
            note(arguments[0])
        elif event == "import":
            note(arguments[1])  # of an extension; None for all others

    def noting(real):
        def look(path, *arguments, **options):
            note(path)
            return real(path, *arguments, **options)

        return look

    sys.addaudithook(heard)
    for name in ("stat", "lstat", "readlink"):  # no event tells of these
        real, new = getattr(posix, name), noting(getattr(posix, name))
        setattr(posix, name, new)
        setattr(os, name, new)
        for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if real in supporting:
                supporting.add(new)


if os.environ.get("LOOKED_AT"):
    watch(os.environ["LOOKED_AT"])
"""
"""A sitecustomize.py that notes each path at which a Python looks, in a file of LOOKED_AT. Libraries that libraries
load, and what programs other than Python read, are missing; `strace -f -e trace=%file` shows them."""


def looked_at(folder: Path) -> dict[int, list[str]]:
    """All paths by rank, in order; those of launchers and other processes without a rank are at -1."""
    found: dict[int, list[str]] = {}
    for file in sorted(folder.glob("*-[0-9]*")):
        rank = file.name.partition("-")[0]
        found.setdefault(int(rank) if rank.isdecimal() else -1, []).extend(file.read_text().splitlines())
    return found


@cache
def count_look_ups(root: Path = ROOT) -> tuple[float, int]:
    """Looks at environment and checkout of a run of two steps on one node: by each process, and by its launcher."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        rows = (f'{{"text": "The fox sees {number} dogs, and {number} dogs see the fox."}}\n' for number in range(2000))
        (folder / "rows.jsonl").write_text("".join(rows))
        fields = {
            "run.output": f"{folder}/runs",
            "data.cache": f"{folder}/cache",
            "data.source": f"{folder}/rows.jsonl",
            "data.tokenizer": "train:300",
            "run.steps": "2",
            "run.device": "cpu",
        }
        own = {"PYTHONPATH": name, "LOOKED_AT": name, "PYTHON": sys.executable, "NPROC": "2", "OMP_NUM_THREADS": "1"}
        words = [word for key, value in fields.items() for word in (f"--{key}", value)]
        command = ["bash", str(root / "scripts" / "run.sh"), "configs/smollm3_debug.toml", *words]
        done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        places = tuple({f"{root}/", f"{sys.prefix}/", f"{sys.base_prefix}/"})
        counts = {rank: sum(path.startswith(places) for path in paths) for rank, paths in looked_at(folder).items()}
    return (counts[0] + counts[1]) / 2, counts[-1]


@cache
def packed() -> tuple[int, int]:
    """Files and bytes of a pack of this environment and checkout."""
    entries = [*environment_entries(), *checkout_entries(ROOT)]
    return len(entries), sum(entry.bytes for entry in entries)


def start_rows(ranks: int) -> list[Row]:
    """What so many processes ask of a shared file system at their start, without PACK and with it.

    An upper bound: what a node's kernel still caches from another of its processes does not reach the file system.
    """
    nodes = ceil(ranks / PER_NODE)
    per_process, per_node = count_look_ups()
    together = ranks * per_process + nodes * per_node
    files, size = packed()
    levels = 1
    while FANOUT**levels < nodes:
        levels += 1
    # The batch script's own, which are about a launcher's, and one of each file to see what has changed.
    packing = per_node + files
    # Each node passes each block to FANOUT others before the next block comes.
    seconds = size * FANOUT * levels / BYTES_PER_SECOND
    return [
        Row("start: look-ups of code and packages per process", per_process, "", "run"),
        Row("start: look-ups of code and packages of a node's launcher", per_node, "", "run"),
        Row("start: look-ups on the shared disk in all", together, "", "counted"),
        Row("start: seconds of them, at 50,000 a second", together / LOOK_UPS_PER_SECOND, "s", "counted"),
        Row("start: look-ups on the shared disk in all, with PACK", packing, "", "counted"),
        Row("start: seconds of them, with PACK", packing / LOOK_UPS_PER_SECOND, "s", "counted"),
        Row("start: bytes of the pack, to each node", size, "B", "counted"),
        Row("start: seconds to send it at 1 GB/s, with sbcast", seconds, "s", "counted"),
    ]
