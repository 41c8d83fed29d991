"""Keeps the newest steps of a run in the memory of its nodes, and begins from there; memory_folder.py says where.

After every checkpoint.memory_every steps each process copies its part of the state, behind the step, to memory that
outlives the processes but not the node. A process of the next node gets a copy, unless a replica elsewhere has the same
part. Those of a step before are deleted once all processes have the new ones: however many processes end, and whichever
node is lost, some step is whole.
"""

import os
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.dist import World, on_all, on_main
from parallel.errors import UserError, some
from parallel.messages import Channel, Messages
from recipes.checkpoint import memory_folder
from recipes.checkpoint.files import complete, read_manifest, verify, write_shard
from recipes.checkpoint.folder import partial_folder, reason, taken_by
from recipes.checkpoint.manifest import Damage, shard_name
from recipes.checkpoint.memory_folder import OF, KeptRun, Mark, Parts, folder_of, require
from recipes.checkpoint.state import checked_progress, hyperparameters, named_tensors, restore
from recipes.checkpoint.storage import HostCopies, assemble, local, make_plan, read_tensors, spreads_of
from recipes.checkpoint.together import Together
from recipes.files.atomic import free_bytes
from recipes.files.layout import MEMORY, METRICS, checkpoint_step, checkpoint_steps, step_folder
from recipes.files.reading import logged_rows
from recipes.files.units import size

SHARD = shard_name(0, 1)


class Place:
    """This process's part, its folder, and those that it keeps for others."""

    def __init__(self, run: KeptRun, world: World, mark: Mark) -> None:
        """Raises UserError if this node has no such place."""
        self.root, self.mark, self.node = memory_folder.own_folder(run.memory_folder), mark, world.node
        self.folder = self.root / mark.id / self.node.name
        self.parts = Parts(world.nodes, run.degrees)
        takers = self.parts.takers()
        self.to = takers.get(world.rank)
        self.source = next((giver for giver, taker in takers.items() if taker == world.rank), None)
        self.part, self.own = self.parts.of(world.rank), folder_of(self.folder, world.rank)
        self.kept = [self.own] if self.source is None else [self.own, folder_of(self.folder, self.source)]
        sources = [giver for giver, taker in takers.items() if taker in self.node.ranks]
        self.folders = {folder_of(self.folder, rank) for rank in (*self.node.ranks, *sources)}
        """Those that this node's processes use; others there are of a former place, or number of nodes."""


def newest(run: KeptRun, world: World, *, after: int, log: Callable[[str], None]) -> Path | None:
    """This process's part of the newest step after this one that is whole over all nodes; what its node has lost comes
    from another. None if there is no such step. All processes call it.

    log: receives what was found. Raises UserError.
    """
    mark, of = on_main(world, lambda: (memory_folder.read_mark(run.folder), run.of))  # a path may differ elsewhere
    if mark is None or not mark.step:
        return None
    if mark.of != of:
        log(f"step {mark.step} in memory is of another recipe, folder or mesh, and not used")
        return None
    place = on_all(world, lambda: Place(run, world, mark))
    share = slice(place.node.ranks.index(world.rank), None, len(place.node.ranks))
    found = memory_folder.look(place.folder, mark, place.parts, share=share, by=world.rank)
    held, problems = world.messages.reduce(found, _joined)
    chosen = place.parts.choose(held, after=after) if world.is_main else None
    chosen, problems = world.messages.from_main((chosen, problems[:3]))
    for problem in problems:
        log(f"in memory: {problem}")
    if chosen is None:
        if mark.step > after:
            log(f"step {mark.step} is not whole in the memory of the nodes; nor is another one after {after}")
        return None
    step, start, moves = chosen
    path = step_folder(place.own, step)
    for giver, rank, taker in moves:
        given = step_folder(folder_of(place.folder, rank), step) if world.rank == giver else None
        with suppress(OSError, UserError):  # which the taker finds
            if given and giver == taker:
                shutil.copytree(given, path, dirs_exist_ok=True)
            elif world.rank in (giver, taker):
                exchange(world.messages, given, path, to=taker if given else None, source=None if given else giver)
    try:
        on_all(world, lambda: require(path, mark, place.part, start))
    except UserError as error:
        log(f"step {step} in memory is not used: {error}")
        return None
    log(on_main(world, lambda: _said(run.folder / METRICS, step, after)))
    if lost := sorted({world.node_of(taker) for _, _, taker in moves}):
        log(f"  the parts missing on {' '.join(lost)} came from other nodes")
    return path


def _joined(one: Any, other: Any) -> Any:
    (held, problems), (more, others) = one, other
    return held | {key: held.get(key, []) + there for key, there in more.items()}, problems + others


def _said(metrics: Path, step: int, on_disk: int) -> str:
    text = f"begins from the memory of the nodes: step {step}; on the disk is step {on_disk}"
    if not metrics.exists():
        return text
    logged, ago = max((row["step"] for row in logged_rows(metrics)), default=0), time.time() - metrics.stat().st_mtime
    return f"{text}; steps logged since then: {max(logged - step, 0)}; last logged {ago:.1f} s ago"


def exchange(messages: Messages, mine: Path | None, theirs: Path, *, to: int | None, source: int | None) -> None:
    """Send a folder to one process, while that of another comes. mine: None = there is none to send. Raises Damage or
    OSError if one of them cannot be read or written; the contents are not verified."""
    sent, names, problem = list[Tensor](), None, ""
    place = partial_folder(theirs.parent, checkpoint_step(theirs.name) or 0)
    try:
        if mine is not None:
            names = {name: (mine / name).stat().st_size for name in os.listdir(mine)}
            sent = [_mapped(mine / name, length) for name, length in names.items()]
    except OSError as error:
        problem, names = reason(error), None
    coming, came = messages.pass_on(names, to=to, source=source), list[Tensor]()
    try:
        if coming:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            came = [_mapped(place / Path(name).name, length, new=True) for name, length in coming.items()]
    except OSError as error:
        problem = reason(error)
    ready = messages.pass_on(bool(came), to=source, source=to)
    messages.pass_bytes(sent if ready else [], came, to=to, source=source)
    if source is not None:
        if not came:
            raise Damage(problem or f"rank {source} has nothing to send")
        shutil.rmtree(theirs, ignore_errors=True)  # a damaged one
        os.rename(place, theirs)
    if problem:
        raise Damage(problem)


def _mapped(path: Path, length: int, *, new: bool = False) -> Tensor:
    """The bytes of a file. new: make it, with its space: writing to a mapped file without it would kill the process."""
    if new:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, max(length, 1))
            file.truncate(length)
    return torch.from_file(str(path), shared=True, size=length, dtype=torch.uint8) if length else torch.empty(0)


def load(model: nn.Module, optimizer: Optimizer, path: Path, *, check: Callable[[Path], None]) -> dict[str, Any]:
    """Load this process's part into model and optimizer. Returns what Checkpoints.resume() does.

    check: called with the path before any tensor is read. Raises Damage, on all processes, if one of them cannot.
    """
    state, groups = named_tensors(model, optimizer)
    progress = dict[str, Any]()

    def read() -> None:
        check(path)
        manifest = read_manifest(path)
        progress.update(checked_progress(manifest, groups, path))
        read_tensors(path, manifest, {name: local(value) for name, value in state.items()})

    Together(Channel.MEMORY).on_all(read)
    restore(model, optimizer, state, [dict(group) for group in groups])
    return progress | {"step": checkpoint_step(path.name)}


class Memory:
    """The copies of a run that trains. All processes call all methods, in the same order."""

    def __init__(
        self,
        run: KeptRun,
        world: World,
        *,
        every: int,
        begun_from: Path | None,
        own_bytes: int,
        files: Mapping[str, str],
        log: Callable[[str], None],
    ) -> None:
        """Delete what is in memory of other starts.

        every: so many steps. begun_from: what newest() returned. own_bytes: of this process's part. files: name -> text
        of the small files of a checkpoint. log: receives one line of text per message. Raises UserError if a node has
        no room for the copies.
        """
        self._run, self._files, self._log = run.folder, files, log
        self._copies, self._messages = HostCopies(), deque[str]()
        self._thread: threading.Thread | None = None
        self._together, self._channel = Together(Channel.MEMORY), Messages(Channel.MEMORY)

        def write_mark() -> tuple[Mark, str]:
            mark = (memory_folder.read_mark(self._run) if begun_from else None) or Mark(secrets.token_hex(8), run.of, 0)
            mark.write(self._run)
            return mark, secrets.token_hex(8)

        mark, self._start = on_main(world, write_mark)
        self._place = place = on_all(world, lambda: Place(run, world, mark))
        wanted = 2 * own_bytes * (2 if place.parts.takers() else 1) * len(place.node.ranks)  # of this step and the next

        def make_room() -> None:
            if world.leads_node:
                memory_folder.note(place.root, mark, self._run)
                memory_folder.remove_stale(place.root)
                for other in place.folder.glob("*/*"):
                    if begun_from is None or other.name != begun_from.name or other.parent not in place.folders:
                        shutil.rmtree(other, ignore_errors=True)

        def require_room() -> None:
            free = free_bytes(place.root)
            if free is not None and (free := free + taken_by(place.folder)) < wanted:
                others = [str(folder) for about, folder in memory_folder.runs_in(place.root) if about.stem != mark.id]
                raise UserError(
                    f"checkpoint.memory_every: the copies need {size(wanted)} on {place.node.name}, and {place.root}"
                    f" has {size(free)} free{f', beside those of {some(others)}' if others else ''}; write another"
                    " checkpoint.memory_folder, or memory_every = 0"
                )

        on_all(world, make_room)
        on_all(world, require_room)
        whose = "of two nodes each" if place.parts.takers() else "of the nodes"
        log(f"  copies: every {every} steps, in the memory {whose}, {size(wanted)} on this node in {place.root}")

    def save(self, model: nn.Module, optimizer: Optimizer, *, step: int, progress: Mapping[str, Any]) -> None:
        """Copy the state after `step` steps. Waits for the copies before, and for the state to be copied to the host;
        all else happens on a thread. A lack of memory is only logged."""
        self.finish()
        state, groups = named_tensors(model, optimizer)
        parts = {name: local(value) for name, value in state.items()}
        plan = make_plan(parts, [(None, spreads_of(parts))], rank=0, processes=1)
        own = [hyperparameters(group) for group in groups]
        record = {
            "progress": dict(progress),
            "optimizer": own,
            OF: [self._place.mark.id, self._place.part, self._start],
        }
        contents, problem = list[memoryview](), ""
        try:
            contents = self._copies.copy([*plan.tensors(parts)])
        except Exception as error:  # out of memory
            problem = reason(error)

        def write(path: Path) -> None:
            if problem:
                raise UserError(problem)
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            shard = write_shard(path / SHARD, plan.pieces, contents)
            complete(path, assemble(step, record, plan.stored, {SHARD: shard}), self._files)
            os.rename(path, step_folder(self._place.own, step))

        # Not a daemon: see Checkpoints.save().
        self._thread = threading.Thread(target=self._keep, args=(step, write))
        self._thread.start()

    def _keep(self, step: int, write: Callable[[Path], None]) -> None:
        """Write this process's part, exchange copies, and delete other steps once all processes have this one."""
        place, (path, *copies) = self._place, [step_folder(folder, step) for folder in self._place.kept]

        def take() -> None:
            if problem:
                raise UserError(problem)
            for copy in copies:
                verify(copy)

        try:
            self._together.on_all(lambda: write(partial_folder(path.parent, step)))
            problem = ""
            try:
                exchange(self._channel, path, copies[0] if copies else path, to=place.to, source=place.source)
            except (OSError, UserError) as error:
                problem = reason(error)
            self._together.on_all(take)
            self._together.on_main(lambda: replace(place.mark, step=step).write(self._run))
            kept = {step}
            (place.root / f"{place.mark.id}.json").touch()  # see remove_stale(); a kill leaves no half-written one
        except Exception as error:  # training continues whatever the error is
            self._messages.append(f"step {step:>6}  NOT KEPT in memory: {reason(error)}; older copies stay")
            if not isinstance(error, UserError):  # a process was lost, and others may have deleted the step before
                return
            kept = {*checkpoint_steps(path.parent)} - {step}
        for other in (one for folder in place.kept if folder.is_dir() for one in folder.iterdir()):
            if checkpoint_step(other.name) not in kept:  # also what is not whole
                shutil.rmtree(other, ignore_errors=True)

    def finish(self) -> None:
        """Wait for the copies that are being made, and log what became of them."""
        if self._thread is not None:
            self._thread.join()
        while self._messages:
            self._log(self._messages.popleft())

    def end(self, *, keep: bool) -> None:
        """End with the run. keep: whether a later start may need the copies, because the disk has no such step."""
        self.finish()
        if keep:
            return
        for folder in self._place.kept:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not empty yet
            os.removedirs(self._place.folder)
        if self._together.is_main:
            (self._run / MEMORY).unlink(missing_ok=True)
