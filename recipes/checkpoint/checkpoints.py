"""The checkpoints of one run: saved while it trains, resumed on any mesh."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.errors import TemporaryError, UserError
from parallel.state_check import not_finite
from recipes.checkpoint import folder as folders
from recipes.checkpoint.files import Written, complete, verify_shards, write_shard
from recipes.checkpoint.manifest import Damage, Missing
from recipes.checkpoint.state import checked, hyperparameters, named_tensors, restore
from recipes.checkpoint.storage import HostMemory, Plan, assemble, make_plan, raw, read_tensors, shard_name, signature
from recipes.files.atomic import sync_folder, write_whole
from recipes.files.layout import checkpoint_steps, step_folder

FAILED_SECONDS = 30
"""How long a process that fails waits for its save in flight: the other processes' threads still write theirs."""
STEP_BYTES = 4
"""Size of the step count that AdamW keeps for every parameter."""

KINDS = (UserError, TemporaryError, Damage)
"""What all processes raise: the first of the kinds that any of them has met."""

Result = TypeVar("Result")


class Checkpoints:
    """The checkpoints of one run, OUTPUT/NAME/checkpoints/step-00000100 and so on; see recipes/checkpoint/folder.py.

    All processes call all methods, in the same order. The state of random generators is not saved, because training
    uses none: initialization and sampling have their own seeds, and the order of the data follows from seed and step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_every: int = 0,
        asynchronous: bool = False,
        files: Mapping[str, str] | None = None,
        mark: Path | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            folder: the folder of the checkpoints.
            keep: how many of the newest checkpoints to keep.
            keep_every: also keep those whose step is a multiple of this (0 = none).
            asynchronous: write on a thread, from a copy in host memory, while training continues.
            files: name -> text of the small files in every checkpoint (weights/locate.py, checkpoint_files).
            mark: a file outside of the folder that receives the newest step, so that its loss is noticed.
            log: receives one line of text per message.
        """
        self.folder, self.files, self._mark = folder, files or {}, mark
        self._log = log
        self._keep, self._keep_every, self._asynchronous = keep, keep_every, asynchronous
        # A group of its own: a save communicates on a thread while training communicates on others.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        self._main, self._shard = dist.get_rank() == 0, shard_name(dist.get_rank(), dist.get_world_size())
        self._memory = HostMemory()
        self._plan: Plan | None = None
        self._thread: threading.Thread | None = None
        self._messages: deque[str] = deque()
        self._newest: int | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return checkpoint_steps(self.folder)

    def path(self, step: int) -> Path:
        return step_folder(self.folder, step)

    def require_space(self, parameters: Iterable[Tensor], *, moments: torch.dtype = torch.float32) -> None:
        """Log how many checkpoints fit on disk; raises UserError if none. moments: dtype of AdamW's two moments."""
        size = sum(
            parameter.numel() * (parameter.element_size() + 2 * moments.itemsize) + STEP_BYTES
            for parameter in parameters
        ) + sum(len(text.encode()) for text in self.files.values())
        fits = self._on_main(lambda: folders.disk_space(self.folder, checkpoint_bytes=size, keep=self._keep))
        if self._main:
            self._log("  " + fits)

    # Saving

    def save(
        self, model: nn.Module, optimizer: Optimizer, *, step: int, progress: Mapping[str, Any] | None = None
    ) -> None:
        """Save the state after `step` steps, then delete the checkpoints that need not be kept.

        An asynchronous save waits for the previous save to end and for the state to be copied to host memory. The
        result is logged by report(). Nothing is raised if the disk is full. progress: a small record in plain JSON.
        """
        self.finish()
        state, groups = named_tensors(model, optimizer)
        if self._plan is None or self._plan.signature != signature(state):
            # Only if the last plan does not fit any more: this takes messages between all processes.
            self._plan = make_plan(state, group=self._group)
        record = {"progress": dict(progress or {}), "optimizer": [hyperparameters(group) for group in groups]}
        tensors = self._plan.tensors(state)
        if not self._asynchronous:
            self._write(step, self._plan, (raw(tensor) for tensor in tensors), record)
            return
        copies: Iterable[memoryview]
        try:
            copies = self._memory.copy(list(tensors))
        except Exception as error:  # out of memory; the other processes learn of it when they write
            copies = _raising(error)
        # Not a daemon: Python would end one in the middle of gloo's code, and abort. A process that exits without
        # finish() destroys the group first, which ends the thread at its next message.
        self._thread = threading.Thread(target=self._write, args=(step, self._plan, copies, record))
        self._thread.start()

    def finish(self, *, failed: bool = False) -> int | None:
        """Wait for a save in flight, for not long if this process has failed, and log its result.

        Returns the step saved or loaded last, or None.
        """
        if self._thread is not None:
            self._thread.join(FAILED_SECONDS if failed else None)
            self._thread = self._thread if self._thread.is_alive() else None
        self.report()
        return self._newest

    def report(self) -> None:
        """Log the results of the saves that ended since the last call."""
        while self._messages:
            self._log(self._messages.popleft())

    def _write(self, step: int, plan: Plan, contents: Iterable[memoryview], record: dict[str, Any]) -> None:
        """Write a copied state with all processes, possibly on a thread."""
        try:
            self._write_new(step, plan, contents, record)
            self._delete_old(step)
            self._newest = step
            self._note(step, f"saved {self.path(step)}")
        except Exception as error:  # training continues whatever the error is
            self._note(step, f"NOT SAVED: {folders.reason(error)}; older checkpoints are unchanged")

    def _note(self, step: int, text: str) -> None:
        self._messages.append(f"step {step:>6}  {text}")

    def _write_new(self, step: int, plan: Plan, contents: Iterable[memoryview], record: dict[str, Any]) -> None:
        place = folders.partial_folder(self.folder, step)

        def write() -> Written:
            place.mkdir(exist_ok=True)  # this node may not see it yet
            return write_shard(place / self._shard, plan.pieces, contents)

        def commit() -> None:
            folders.require_shards(place, {name: file for name, file, _ in shards})
            complete(place, assemble(step, record, plan.layout, shards), self.files)
            folders.commit(self.folder, step)
            if self._mark:
                with suppress(OSError):  # the checkpoint is saved all the same
                    write_whole(self._mark, str(step))

        try:
            self._on_main(lambda: folders.begin(self.folder, step, log=partial(self._note, step)))
            shards = self._on_all(write)
            self._on_main(commit)
        except UserError:
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

        Each process reads its own shard, usually from the page cache: this verifies the file, not the disk. Raises
        UserError if the new checkpoint is damaged. If that cannot be determined, nothing is deleted.
        """

        def settle() -> list[int]:
            sync_folder(self.folder)
            return folders.dispensable(self.steps(), keep=self._keep, keep_every=self._keep_every)

        def verify() -> None:
            manifest = folders.check(self.folder, step, files=self._main)
            verify_shards(self.path(step), manifest, [self._shard])

        try:
            if not (doomed := self._on_main(settle)):
                return
            self._on_all(verify)
        except Damage as damage:
            problem = str(damage)
            raise UserError(folders.put_away(self.folder, step, problem) if self._main else problem) from None
        except UserError as failure:
            self._note(step, f"is complete, but {failure}; older checkpoints are kept")
            return
        for old in doomed if self._main else ():
            try:
                folders.delete(self.folder, old)
            except OSError as error:  # the new checkpoint is saved all the same
                self._note(old, f"cannot be deleted: {folders.reason(error)}")

    # Resuming

    def resume(
        self, model: nn.Module, optimizer: Optimizer, *, step: int, check: Callable[[Path], None]
    ) -> dict[str, Any]:
        """Load the checkpoint of `step`, or the newest older one that is not damaged. Damaged ones are set aside.

        check: called on rank 0 with the checkpoint before any tensor is read; its errors stop all processes. Returns
        the saved progress, and "step". Raises UserError if no checkpoint is left.
        """
        self.finish()
        while True:
            path = self.path(step)
            self._on_main(partial(check, path))
            try:
                progress = self.load(model, optimizer, step=step)
            except Damage as damage:
                step = self._on_main(partial(self._older_step, step, str(damage)))
            else:
                self._log(f"resumed from {path}")
                return progress | {"step": step}

    def _older_step(self, step: int, problem: str) -> int:
        """Set a damaged checkpoint aside, on rank 0. Returns the newest intact step; raises UserError if none."""
        newest = folders.newest_whole(self.folder, log=self._log, known={step: problem})
        assert newest is not None, "newest_whole() raises if all checkpoints are damaged"
        return newest

    def load(self, model: nn.Module, optimizer: Optimizer, *, step: int) -> dict[str, Any]:
        """Load the checkpoint of `step` into model and optimizer, from any mesh. Returns its progress.

        Raises Damage on all processes if one of them reads anything that is not as it was written, or not finite, and
        TemporaryError if one of them cannot read now, or does not see a file that process 0 sees.
        """
        self.finish()
        state, groups = named_tensors(model, optimizer)
        path = self.path(step)
        record: dict[str, Any] = {}

        def read() -> None:
            try:
                manifest = folders.check(self.folder, step, files=self._main)
                record.update(checked(manifest, groups, path))
                read_tensors(path, manifest, state)
            except Missing as error:
                if self._main:
                    raise
                where = f"for process {dist.get_rank()}, while process 0 sees it whole"
                raise TemporaryError(f"{error} {where}: run.output must be a folder that all nodes share") from None
            if names := not_finite(state):  # written by an older version, or by a faulty machine
                raise Damage(
                    f"{path} has NaN or infinite values in {names[0]} (tensors with such values: {len(names)})"
                )

        self._on_all(read)
        restore(model, optimizer, state, record["optimizer"])
        self._newest = step
        return record["progress"]

    def _on_all(self, work: Callable[[], Result]) -> list[Result]:
        """Run this on every process; it must not communicate. Returns all results on rank 0, none elsewhere.

        If one process raises, all do. Damage, which an older checkpoint would avoid, only if there is no other error.
        """
        result: Result | None = None
        mine = (0, "")
        cause: Exception | None = None
        try:
            result = work()
        except UserError as error:
            mine = next((index for index, kind in enumerate(KINDS) if index and isinstance(error, kind)), 0), str(error)
        except Exception as error:  # a bug, or out of memory
            mine, cause = (0, folders.reason(error)), error
        answers: list[Any] = [None] * dist.get_world_size() if self._main else []
        dist.gather_object((mine, result), answers or None, group=self._group)
        problems = sorted(problem for problem, _ in answers if problem[1])
        kind, text = self._from_main(problems[0] if problems else (0, ""))
        if text:
            raise KINDS[kind](text) from cause
        return [result for _, result in answers]

    def _on_main(self, work: Callable[[], Result]) -> Result:
        """Run this on rank 0. Returns its result on every process, or raises its error there."""
        results = self._on_all(lambda: work() if self._main else None)
        return cast(Result, self._from_main(results[0] if results else None))

    def _from_main(self, value: Result) -> Result:
        """The value that rank 0 has, on every process."""
        values = [value]
        dist.broadcast_object_list(values, group=self._group)
        return values[0]


def _raising(error: Exception) -> Iterator[memoryview]:
    """Contents that could not be copied: raises the error when they are to be written."""
    raise error
    yield
