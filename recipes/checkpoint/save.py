"""Saves the checkpoints of a run: writes them with all processes, then deletes the ones that need not be kept."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from recipes.checkpoint import folder as folders
from recipes.checkpoint.collective import from_main
from recipes.checkpoint.errors import Damage, Unreadable
from recipes.checkpoint.files import complete, verify_shards, write_shard
from recipes.checkpoint.state import hyperparameters, named_tensors
from recipes.checkpoint.storage import HostMemory, Plan, Written, assemble, make_plan, raw, shard_name, signature
from recipes.files.atomic import sync_folder
from recipes.files.layout import checkpoint_steps, step_folder

Result = TypeVar("Result")


class SaveFailed(Exception):
    """A process could not do its part of a save; the text says why."""


class Saver:
    """Saves checkpoints to one folder. All processes call all methods, in the same order."""

    def __init__(
        self,
        folder: Path,
        *,
        group: dist.ProcessGroup,
        files: Mapping[str, str],
        keep: int,
        keep_every: int,
        log: Callable[[str], None],
    ) -> None:
        """group: used by saves alone, which may run on a thread. For the other arguments see Checkpoints."""
        self._folder, self._group, self._files, self._log = folder, group, files, log
        self._keep, self._keep_every = keep, keep_every
        self._main, self._shard = dist.get_rank() == 0, shard_name(dist.get_rank(), dist.get_world_size())
        self._memory = HostMemory()
        self._plan: Plan | None = None
        self._thread: threading.Thread | None = None
        self._saved_step: int | None = None

    def save(
        self, model: nn.Module, optimizer: Optimizer, *, step: int, progress: Mapping[str, Any], asynchronous: bool
    ) -> None:
        """Save the state of model and optimizer; see Checkpoints.save(). Call wait() first."""
        state, groups = named_tensors(model, optimizer)
        plan = self._plan_for(state)
        record = {"progress": dict(progress), "optimizer": [hyperparameters(group) for group in groups]}
        tensors = plan.tensors(state)
        if not asynchronous:
            self._write(step, plan, (raw(tensor) for tensor in tensors), record)
            return
        copies: Iterable[memoryview]
        try:
            copies = self._memory.copy(list(tensors))
        except Exception as error:  # out of memory; the other processes learn of it when they write
            copies = _raising(error)
        # Not a daemon: Python would end one in the middle of gloo's code, and abort. A process that exits without
        # wait() destroys the group first, which ends the thread at its next message.
        self._thread = threading.Thread(target=self._write, args=(step, plan, copies, record))
        self._thread.start()

    def wait(self) -> int | None:
        """Wait for a save in flight. Returns the step saved since the last call, None if there is none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        saved, self._saved_step = self._saved_step, None
        return saved

    def _plan_for(self, state: Mapping[str, Tensor]) -> Plan:
        """The plan of the last save if it still fits: making one takes messages between all processes."""
        if self._plan is None or self._plan.signature != signature(state):
            self._plan = make_plan(state, group=self._group)
        return self._plan

    def _write(self, step: int, plan: Plan, contents: Iterable[memoryview], record: dict[str, Any]) -> None:
        """Write a copied state with all processes, possibly on a thread."""
        try:
            self._write_new(step, plan, contents, record)
            self._delete_old(step)
            self._saved_step = step
            self._log(f"step {step:>6}  saved {step_folder(self._folder, step)}")
        except Exception as error:  # training continues whatever the error is
            why = str(error) if isinstance(error, SaveFailed) else folders.reason(error)
            self._log(f"step {step:>6}  NOT SAVED: {why}; older checkpoints are unchanged")

    def _write_new(self, step: int, plan: Plan, contents: Iterable[memoryview], record: dict[str, Any]) -> None:
        place = folders.partial_folder(self._folder, step)

        def begin() -> None:
            if self._main:
                folders.begin(self._folder, step, log=lambda line: self._log(f"step {step:>6}  {line}"))

        def write() -> Written:
            place.mkdir(exist_ok=True)  # this node may not see it yet
            file, chunks = write_shard(place / self._shard, plan.pieces, contents)
            return self._shard, file, list(zip(plan.pieces, chunks, strict=True))

        def commit() -> None:
            if self._main:
                folders.require_shards(place, {name: file for name, file, _ in shards})
                complete(place, assemble(step, record, plan.layout, shards), self._files)
                folders.commit(self._folder, step)

        try:
            self._gather(begin)
            shards = self._gather(write)
            self._gather(commit)
        except SaveFailed:
            with suppress(OSError):  # otherwise the next save deletes it
                # Each process deletes its own shard: without a shared folder, no other can.
                (place / self._shard).unlink(missing_ok=True)
                if self._main:
                    folders.remove(place)
                else:
                    place.rmdir()
            raise

    def _delete_old(self, step: int) -> None:
        """Delete the checkpoints that need not be kept, once the new one is committed and reads back.

        Each process reads the shard that it wrote. That read usually comes from the page cache: it verifies the file,
        not the disk. Raises SaveFailed if the new checkpoint is damaged. If that cannot be determined, nothing is
        deleted.
        """

        def settle() -> list[int]:
            if not self._main:
                return []
            sync_folder(self._folder)
            return folders.dispensable(checkpoint_steps(self._folder), keep=self._keep, keep_every=self._keep_every)

        def verify() -> str:
            try:
                manifest = folders.check(self._folder, step, files=self._main)
                verify_shards(step_folder(self._folder, step), manifest, [self._shard])
                return ""
            except Unreadable:
                raise
            except Damage as damage:
                return str(damage)

        try:
            found = self._gather(settle)
            doomed = from_main(found[0] if found else [], group=self._group)
            problem = next(filter(None, self._gather(verify)), "") if doomed else ""
        except SaveFailed as failure:
            self._log(f"step {step:>6}  is complete, but {failure}; older checkpoints are kept")
            return
        if problem := from_main(problem, group=self._group):
            raise SaveFailed(folders.put_away(self._folder, step, problem) if self._main else problem)
        for old in doomed if self._main else ():
            try:
                folders.delete(self._folder, old)
            except OSError as error:  # the new checkpoint is saved all the same
                self._log(f"step {old:>6}  cannot be deleted: {folders.reason(error)}")

    def _gather(self, work: Callable[[], Result]) -> list[Result]:
        """Run this on every process; it must not communicate. Returns all results on rank 0, none elsewhere.

        Raises SaveFailed on all processes if one fails.
        """
        result: Result | None = None
        error = ""
        try:
            result = work()
        except Exception as raised:
            error = folders.reason(raised)
        answers: list[Any] = [None] * dist.get_world_size()
        dist.gather_object((error, result), answers if self._main else None, group=self._group)
        problem = next((error for error, _ in answers if error), "") if self._main else ""
        if problem := from_main(problem, group=self._group):
            raise SaveFailed(problem)
        return [result for _, result in answers] if self._main else []


def _raising(error: Exception) -> Iterator[memoryview]:
    """Contents that could not be copied: raises the error when they are to be written."""
    raise error
    yield
