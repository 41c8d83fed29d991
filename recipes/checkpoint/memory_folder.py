"""Where the nodes of a run keep its newest steps in memory, and what they have of them.

Every process keeps its own part of the state, as a checkpoint of one process whose tensors are what it has of them, so
that a part is written, verified and read like any checkpoint:

/dev/shm/shardwright-1000/ID/node7/rank-00003/step-00000010/    ID.json beside ID says which run it is of

The folder belongs to this user alone. ID is new at every start that does not begin from memory, and is noted in the
run's folder with the recipe and number of processes that it is for. So what is in memory of another run, or of this one
before it began anew, is not found, and the next start on that node deletes it.
"""

import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import xxhash

from parallel.config import MeshDegrees
from parallel.errors import UserError
from parallel.nodes import Node
from recipes.checkpoint.files import verify
from recipes.checkpoint.manifest import Damage
from recipes.files.atomic import write_whole
from recipes.files.layout import MEMORY, checkpoint_step, step_folder
from recipes.files.reading import fault, user_path

STALE_SECONDS = 3600.0
"""Without a copy, after which those of a run whose folder is not to be seen are deleted."""
OF = "memory"
"""The key of a manifest's state with the ID, the part, and which start of the run has computed it."""


@dataclass(frozen=True)
class Mark:
    """What the folder of a run notes of its copies in memory."""

    id: str
    of: str
    """Hash of the run's folder, recipe and mesh."""
    step: int
    """The newest that all nodes have kept; 0 = none yet."""

    def write(self, run: Path) -> None:
        write_whole(run / MEMORY, json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True)
class KeptRun:
    """A run whose steps are kept in memory."""

    folder: Path
    memory_folder: str
    recipe: str
    """Its text."""
    degrees: MeshDegrees

    @property
    def of(self) -> str:
        """The hash that its marks have. A copy of its folder is another run. The number of replicas changes no part;
        but in a pipeline, it changes which part a rank has, by which folders are named."""
        mesh = self.degrees if self.degrees.pipeline > 1 else replace(self.degrees, replicate=1)
        return xxhash.xxh3_128_hexdigest(f"{self.folder.resolve()} {mesh} {self.recipe}".encode())


def read_mark(run: Path) -> Mark | None:
    """What the folder of a run notes; None if that is nothing that can be read."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        mark = Mark(**json.loads((run / MEMORY).read_text(encoding="utf-8")))
        return mark if isinstance(mark.id, str) and mark.id.isalnum() and isinstance(mark.step, int) else None
    return None


def own_folder(memory_folder: str) -> Path:
    """The folder of this user on this node, which is made. Raises UserError if others could write there."""
    place = user_path(memory_folder) / f"shardwright-{os.geteuid()}"
    try:
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        about = os.lstat(place)
    except OSError as error:
        raise fault(f"checkpoint.memory_folder: {place} cannot be made", error, "; write another folder") from None
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        what = "is no folder of this user alone (mode 700)"
        raise UserError(f"checkpoint.memory_folder: {place} {what}; remove it, or write another folder")
    return place


def note(place: Path, mark: Mark, run: Path) -> None:
    """Say which run this mark is of; the age of the file, when that last kept a step."""
    write_whole(place / f"{mark.id}.json", json.dumps({"run": str(run.resolve())}))


def remove_stale(place: Path) -> None:
    """Delete what this node has in memory of marks that their runs do not have any more; of a run whose folder is not
    to be seen here, as in another container, once it has been silent for STALE_SECONDS."""
    for about, folder in runs_in(place):
        with suppress(OSError):
            if folder and folder.is_dir():
                stale = (found := read_mark(folder)) is None or found.id != about.stem
            else:
                stale = time.time() - about.stat().st_mtime > STALE_SECONDS
            if stale:
                shutil.rmtree(about.with_suffix(""), ignore_errors=True)
                about.unlink()


def runs_in(place: Path) -> Iterator[tuple[Path, Path | None]]:
    """What says which run something is of, and the folder of that run; None if it cannot be read."""
    for about in place.glob("[!.]*.json"):
        folder = None
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            folder = Path(json.loads(about.read_text(encoding="utf-8"))["run"])
            folder.exists()  # raises for what cannot be a path
        yield about, folder


Held = dict[tuple[int, str, int], list[tuple[int, int]]]
"""(step, start that computed it, part) -> who has it: a process, and the rank whose folder in its node has it."""


@dataclass(frozen=True)
class Parts:
    """Who has which part of the state, and of whom another node has a copy."""

    nodes: Sequence[Node]
    degrees: MeshDegrees

    def of(self, rank: int) -> int:
        """The number of a process among those of one replica: those with the same number have the same part."""
        layer, replicas = self.degrees.per_layer, self.degrees.replicate
        return rank // (replicas * layer) * layer + rank % layer

    def takers(self) -> dict[int, int]:
        """Process -> the one in the next node that keeps a copy, where no replica in another node has the same part."""
        nodes_with: dict[int, set[int]] = {}
        for number, node in enumerate(self.nodes):
            for rank in node.ranks:
                nodes_with.setdefault(self.of(rank), set()).add(number)
        pairs = zip(self.nodes, [*self.nodes[1:], self.nodes[0]], strict=True) if len(self.nodes) > 1 else ()
        both = [pair for node, after in pairs for pair in zip(node.ranks, after.ranks, strict=False)]
        return {giver: taker for giver, taker in both if len(nodes_with[self.of(giver)]) == 1}

    def choose(self, held: Held, *, after: int) -> tuple[int, str, list[tuple[int, int, int]]] | None:
        """The newest step after this one of which all parts of one start are held, that start, and what must move: of
        whom, as of which rank, to whom. None if there is none. Another start may have rounded otherwise."""
        node_of = {rank: node.name for node in self.nodes for rank in node.ranks}
        for step, start in sorted({(step, start) for step, start, _ in held if step > after}, reverse=True):
            holders = {rank: held.get((step, start, self.of(rank)), []) for rank in node_of}
            if all(holders.values()):
                pairs = [pair for key, there in held.items() if key[:2] == (step, start) for pair in there]
                at_home = {folder for by, folder in pairs if node_of[by] == node_of.get(folder)}
                lacking = [(rank, there) for rank, there in holders.items() if rank not in at_home]
                return step, start, [(*there[rank % len(there)], rank) for rank, there in lacking]
        return None


def folder_of(node: Path, rank: int) -> Path:
    return node / f"rank-{rank:05d}"


def look(node: Path, mark: Mark, parts: Parts, *, share: slice, by: int) -> tuple[Held, list[str]]:
    """What is whole in a node's folder, and in words what is not. share: of what is there, what this process, `by`,
    looks at."""
    held, problems = Held(), []
    for path in sorted(node.glob("rank-*/step-*"))[share]:
        try:
            rank, step = int(path.parent.name.removeprefix("rank-")), checkpoint_step(path.name) or 0
            start = require(step_folder(folder_of(node, rank), step), mark, part := parts.of(rank))
            held.setdefault((step, start, part), []).append((by, rank))
        except (UserError, ValueError) as error:
            problems.append(str(error))
    return held, problems


def require(path: Path, mark: Mark, part: int, start: str | None = None) -> str:
    """Verify a part in memory. Returns the start that has computed it. Raises Damage if it is not as it was written, or
    of another run, part or start (None: any)."""
    manifest = verify(path)
    match manifest.state.get(OF):
        case [mark.id, found, str(one)] if found == part and one == (start or one):
            if path == step_folder(path.parent, manifest.step or 0):
                return one
    raise Damage(f"{path} is of another run, start, step or process")
