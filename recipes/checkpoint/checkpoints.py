"""The checkpoints of one run: saved while it trains, resumed on any mesh."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.errors import TemporaryError, UserError
from parallel.messages import Channel
from parallel.state_check import not_finite
from recipes.checkpoint import folder as folders
from recipes.checkpoint.config import CheckpointConfig
from recipes.checkpoint.files import complete, read_manifest, shard_bytes, verify_shards, write_shard
from recipes.checkpoint.manifest import Damage, Missing, StoredFile, shard_name
from recipes.checkpoint.plan import pieces_of
from recipes.checkpoint.state import checked_progress, hyperparameters, named_tensors, restore
from recipes.checkpoint.storage import HostCopies, Share, assemble, make_plan, raw, read_tensors, signature, spreads_of
from recipes.checkpoint.together import Together, require_shards, unseen
from recipes.files.atomic import free_bytes, sync_folder, write_whole
from recipes.files.layout import checkpoint_steps, step_folder
from recipes.files.screen import join_aloud
from recipes.optimization.config import OptimizerConfig

if TYPE_CHECKING:
    from recipes.checkpoint.best import BestOf
    from recipes.checkpoint.copies import Copies
    from recipes.checkpoint.remote_folder import RemoteFolder

FAILED_SECONDS = 30
"""How long a process that fails waits for its save in flight: the other processes' threads still write theirs."""

Written = tuple[dict[str, StoredFile], set[str], list[dict[str, Any]]]
"""The files that some processes wrote, the identities of their plans, and the optimizer's groups in their parts."""


class Checkpoints:
    """The checkpoints of one run, OUTPUT/NAME/checkpoints/step-00000100 and so on; see recipes/checkpoint/folder.py.

    All processes call all methods, in the same order. The state of random generators is not saved, because training
    uses none: initialization and sampling have their own seeds, and the order of the data follows from seed and step.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        *,
        files: Mapping[str, str] | None = None,
        mark: Path | None = None,
        remote: "RemoteFolder | None" = None,
        pipeline: int = 1,
        held: Callable[[], Collection[int]] = tuple,
        log: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            folder: the folder of the checkpoints.
            config: which checkpoints are kept, and whether a thread writes them while training continues.
            files: name -> text of the small files in every checkpoint (weights/description.py, checkpoint_files).
            mark: a file outside of the folder that receives the newest step, so that its loss is noticed.
            remote: where checkpoints are copied to, in the background.
            pipeline: the degree of the mesh's outermost axis, along which processes hold other parameters.
            held: the steps that are not deleted, whatever the config says; called on rank 0.
            log: receives one line of text per message.
        """
        self.folder, self.files, self._mark, self._held = folder, files or {}, mark, held
        self._config, self._log = config, log
        self._best: BestOf | None = None
        if config.keep_best:
            from recipes.checkpoint import best

            self._best = best.BestOf(config.keep_best, lambda step: read_manifest(self.path(step)))
        # A channel of its own: a save communicates on a thread while training communicates on others.
        self._together = Together(Channel.SAVES, parts=pipeline)
        self._main, self._shard = self._together.is_main, shard_name(self._together.rank, self._together.size)
        self._memory = HostCopies()
        self._plan: Share | None = None
        self._own: dict[str, StoredFile] = {}  # what this process wrote last
        self._thread: threading.Thread | None = None
        self._messages: deque[str] = deque()
        self._newest: int | None = None
        self._copies: Copies | None = None
        if remote is not None:
            from recipes.checkpoint import copies

            self._copies = copies.Copies(remote, folder.parent, note=self._note_on_main)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return checkpoint_steps(self.folder)

    def path(self, step: int) -> Path:
        return step_folder(self.folder, step)

    def require_space(
        self, parameters: Iterable[Tensor], optimizer: OptimizerConfig, *, matrices: Iterable[Tensor] = ()
    ) -> None:
        """Log how many checkpoints fit on disk; raises UserError if none.

        parameters: those of this process that no earlier stage has. matrices: those that Muon steps.
        """
        parameters, matrices = [*parameters], [*matrices]
        elements, of_matrices = (sum(tensor.numel() for tensor in tensors) for tensors in (parameters, matrices))
        own = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        own += optimizer.state_bytes(elements, len(parameters), matrices=(of_matrices, len(matrices)))
        size = sum(self._together.of_parts(lambda: own)) + sum(len(text.encode()) for text in self.files.values())

        def make_room() -> str:
            # checkpoint.keep was lowered; every byte of the newest has been read.
            for old in self._dispensable() if self._newest in self.steps() else []:
                if (free := free_bytes(self.folder)) is None or free >= size:
                    break
                with suppress(OSError):
                    folders.delete(self.folder, old)
                    self._log(f"deleted step {old}, above checkpoint.keep, as the disk has no space for another save")
            return folders.disk_space(self.folder, checkpoint_bytes=size, keep=self._config.keep)

        self._say(f"  {self._together.on_main(make_room)}")

    # Saving

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Allocate host memory for the first save, in the background, once the optimizer has taken a step."""
        if self._plan is None and self._config.asynchronous and self._config.every:
            plan, state, _ = self._planned(model, optimizer)
            self._memory.allocate(list(plan.tensors(state)))

    def _planned(self, model: nn.Module, optimizer: Optimizer) -> tuple[Share, dict[str, Tensor], list[dict[str, Any]]]:
        """Who writes what, the state to save, and the optimizer's groups."""
        state, groups = named_tensors(model, optimizer)
        if self._plan is None or self._plan.signature != signature(state):
            parts = self._together.of_parts(lambda: (self._together.ranks, spreads_of(state)))
            self._plan = make_plan(state, parts, rank=self._together.rank, processes=self._together.size)
        return self._plan, state, groups

    def save(
        self, model: nn.Module, optimizer: Optimizer, *, step: int, progress: Mapping[str, Any] | None = None
    ) -> None:
        """Save the state after `step` steps, then delete the checkpoints that need not be kept.

        An asynchronous save waits for the previous save to end and for the state to be copied to host memory. The
        result is logged by report(). Nothing is raised if the disk is full. progress: a small record in plain JSON.
        """
        self.finish()
        plan, state, groups = self._planned(model, optimizer)
        record = {"progress": dict(progress or {}), "optimizer": [hyperparameters(group) for group in groups]}
        tensors = plan.tensors(state)
        if not self._config.asynchronous:
            self._write(step, plan, (raw(tensor) for tensor in tensors), record)
            return
        copies: Iterable[memoryview]
        try:
            copies = self._memory.copy(list(tensors))
        except Exception as error:  # out of memory; the other processes learn of it when they write
            copies = _raising(error)
        # Not a daemon: Python would end one in the middle of gloo's code, and abort. A process that exits without
        # finish() leaves without finalizing Python: see recipes/files/exit_codes.py.
        self._thread = threading.Thread(target=self._write, args=(step, plan, copies, record))
        self._thread.start()

    def finish(self, *, failed: bool = False) -> int | None:
        """Wait for a save in flight, for not long if this process has failed, and log its result.

        Returns the step saved or loaded last, or None.
        """
        if self._thread is not None:
            what = f"a checkpoint to be written to {self.folder}"
            done = join_aloud(self._thread, FAILED_SECONDS if failed else inf, what=what, say=self._say)
            self._thread = None if done else self._thread
        self.report()
        return self._newest

    def finish_copies(self, *, soon: bool = False, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the checkpoints are copied, if they are to be. Returns whether they are. Call it after finish().
        soon: the machine may be taken away. stop: whether a signal has ended the wait."""
        if self._copies is None:
            return True
        done = self._copies.finish(soon=soon, stop=stop, say=self._say)
        if done and self._main:  # all were verified before they were sent
            for old in self._dispensable():  # what was kept while it was copied
                try:
                    folders.delete(self.folder, old)
                except OSError as error:
                    self._note(old, f"cannot be deleted: {folders.reason(error)}")
            self._copies.prune()
        self.report()
        return done

    def report(self) -> None:
        """Log the results of the saves that ended since the last call."""
        while self._messages:
            self._log(self._messages.popleft())

    def _write(self, step: int, plan: Share, contents: Iterable[memoryview], record: dict[str, Any]) -> None:
        """Write a copied state with all processes, possibly on a thread."""
        try:
            self._write_new(step, plan, contents, record)
            self._delete_old(step, plan)
            self._newest = step
            self._note(step, f"saved {self.path(step)}")
            if self._copies and self._together.from_main(self._copies.is_free):
                self._copies.start()
        except Exception as error:  # training continues whatever the error is
            self._note(step, f"NOT SAVED: {folders.reason(error)}; older checkpoints are unchanged")

    def _note(self, step: int, text: str) -> None:
        self._messages.append(f"step {step:>6}  {text}")

    def _say(self, text: str) -> None:
        if self._main:
            self._log(text)

    def _note_on_main(self, step: int, text: str) -> None:
        if self._main:
            self._note(step, text)

    def _write_new(self, step: int, plan: Share, contents: Iterable[memoryview], record: dict[str, Any]) -> None:
        place = folders.partial_folder(self.folder, step)

        def write() -> Written:
            groups = record["optimizer"] if self._together.speaks else []
            if not plan.pieces:
                return {}, {plan.identity}, groups
            (place / self._shard).parent.mkdir(parents=True, exist_ok=True)  # this node may not see it yet
            return {self._shard: write_shard(place / self._shard, plan.pieces, contents)}, {plan.identity}, groups

        def see_the_next() -> None:
            # If each process sees the file of the next one that writes any, all of them have the same folder.
            rank, size = self._together.rank, self._together.size
            for other in (*range(rank + 1, size), *range(rank + 1)):
                if pieces := pieces_of(plan.stored, other):
                    folders.require_shard(place, shard_name(other, size), shard_bytes(pieces))
                    break

        def commit() -> None:
            if len(plans) > 1:
                raise UserError("the processes do not have the same tensors, so they planned different checkpoints")
            complete(place, assemble(step, record | {"optimizer": groups}, plan.stored, files), self.files)
            folders.commit(self.folder, step)
            if self._mark:
                with suppress(OSError):  # the checkpoint is saved all the same
                    write_whole(self._mark, str(step))

        try:
            # Delete what a kill left behind, each process its own shards.
            if left_overs := self._together.on_main(lambda: folders.left_overs(self.folder)):
                self._together.on_all(partial(folders.remove_own, left_overs, self._shard))
            self._together.on_main(lambda: folders.begin(self.folder, step, log=partial(self._note, step)))
            files, plans, groups = self._together.on_all(write, merge=_of_both)
            self._together.on_all(see_the_next)
            self._together.on_main(commit)
        except UserError:
            # Each process deletes its own shard: without a shared folder, no other can. The next save deletes the rest.
            folders.remove_own([place], self._shard)
            with suppress(OSError):
                if self._main:
                    folders.remove(place)
                else:
                    place.rmdir()
            raise
        self._own = files if not self._main else {name: files[name] for name in {self._shard} & files.keys()}

    def _delete_old(self, step: int, plan: Share) -> None:
        """Delete the checkpoints that need not be kept, once the new one is committed and reads back.

        Each process reads its own shard, usually from the page cache: this verifies the file, not the disk. Raises
        UserError if the new checkpoint is damaged. If that cannot be determined, nothing is deleted.
        """

        def settle() -> list[int]:
            sync_folder(self.folder)
            return self._dispensable()

        def verify() -> None:
            if self._main:
                folders.check(self.folder, step, most=0)
            verify_shards(self.path(step), assemble(step, {}, plan.stored, self._own), self._own)

        try:
            if not (doomed := self._together.on_main(settle)):
                return
            self._together.on_all(verify)
        except Damage as damage:
            problem = str(damage)
            raise UserError(folders.put_away(self.folder, step, problem) if self._main else problem) from None
        except UserError as failure:
            self._note(step, f"is complete, but {failure}; older checkpoints are kept")
            return
        for old in doomed:
            try:
                self._together.on_main(partial(folders.retire, self.folder, old))
                path = folders.partial_folder(self.folder, old)
                self._together.on_all(partial(folders.remove_own, [path], self._shard))
                self._together.on_main(partial(folders.remove, path))
            except UserError as error:  # newer ones are saved all the same
                self._note(old, f"cannot be deleted: {error}")

    def _dispensable(self) -> list[int]:
        """The steps of the checkpoints that need not be kept here, oldest first."""
        steps, copied = self.steps(), self._copies.step if self._copies else None
        try:
            best = self._best.kept(steps) if self._best else ()
        except TemporaryError:  # it may be any of them; the next save deletes the others
            return []
        return [old for old in folders.dispensable(steps, self._config, best={*best, *self._held()}) if old != copied]

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
            self._together.on_main(partial(check, path))
            try:
                progress = self.load(model, optimizer, step=step)
            except Damage as damage:
                newest = self._together.on_main(
                    partial(folders.newest_whole, self.folder, log=self._log, known={step: str(damage)})
                )
                assert newest is not None, "newest_whole() raises if all checkpoints are damaged"
                step = newest
            else:
                self._log(f"resumed from {path}")
                return progress | {"step": step}

    def fork(
        self, model: nn.Module, optimizer: Optimizer, *, checkpoint: Path, check: Callable[[Path], None]
    ) -> dict[str, Any]:
        """Load a checkpoint of another run, which is only read. check: as of resume(). Returns what resume() does.

        Raises UserError if it is damaged.
        """
        self._together.on_main(partial(check, checkpoint))
        step = int(checkpoint.name.removeprefix("step-"))
        try:
            progress = self.load(model, optimizer, step=step, folder=checkpoint.parent)
        except Damage as damage:
            raise UserError(f"run.continue_from: {damage}; name an older one with @STEP") from None
        self._newest = None  # nothing of this run is saved yet
        self._log(f"continues from {checkpoint}")
        return progress | {"step": step}

    def load(self, model: nn.Module, optimizer: Optimizer, *, step: int, folder: Path | None = None) -> dict[str, Any]:
        """Load the checkpoint of `step` into model and optimizer, from any mesh. Returns its progress.

        folder: of another run's checkpoints; None = of this run's.

        Raises Damage on all processes if one of them reads anything that is not as it was written, or not finite, and
        TemporaryError if one of them cannot read now, or does not see a file that process 0 sees.
        """
        self.finish()
        state, groups = named_tensors(model, optimizer)
        folder = folder or self.folder
        path = step_folder(folder, step)
        # Read by one process for all. Thousands that open one file at the same time are a burden for any server.
        manifest = self._together.on_main(lambda: folders.check(folder, step, most=0))
        require_shards(path, manifest, self._together)
        progress = dict[str, Any]()

        def read() -> None:
            progress.update(checked_progress(manifest, groups, path))
            try:
                read_tensors(path, manifest, state)
            except Missing as error:  # another process has seen it whole
                raise unseen(str(error), self._together.rank) if self._together.size > 1 else error from None
            if names := not_finite(state):  # written by an older version, or by a faulty machine
                raise Damage(
                    f"{path} has NaN or infinite values in {names[0]} (tensors with such values: {len(names)})"
                )

        self._together.on_all(read)
        # The recipe's hyperparameters, which a stage or a fork may have changed, not the stored ones.
        restore(model, optimizer, state, [dict(group) for group in groups])
        self._newest = step
        return progress


def _of_both(one: Written, other: Written) -> Written:
    return one[0] | other[0], one[1] | other[1], one[2] + other[2]


def _raising(error: Exception) -> Iterator[memoryview]:
    """Contents that could not be copied: raises the error when they are to be written."""
    raise error
    yield
