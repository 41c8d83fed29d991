"""The checkpoints of one run: saved beside the training, resumed on any mesh."""

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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from parallel.errors import UserError
from parallel.float8 import without_wrapper
from recipes.checkpoint import folder as folders
from recipes.checkpoint.files import remove, verify_shards, write_shard
from recipes.checkpoint.folder import partial_folder
from recipes.checkpoint.manifest import Damage, Unreadable
from recipes.checkpoint.parameters import PARAMETERS
from recipes.checkpoint.space import room
from recipes.checkpoint.state import checked, hyperparameters
from recipes.checkpoint.storage import (
    HostMemory,
    Plan,
    Written,
    assemble,
    make_plan,
    raw,
    read_tensors,
    shard_name,
    signature,
)
from recipes.files.atomic import sync_folder
from recipes.files.layout import checkpoint_steps, step_folder

MOMENTS = "optimizer."
"""What the names of the optimizer's tensors begin with inside of a checkpoint: optimizer.PARAMETER.KIND."""

STEP_BYTES = 4
"""Of the count of steps that AdamW keeps of every parameter."""

Result = TypeVar("Result")


class SaveFailed(Exception):
    """Some process could not do its part of a save; the text says why."""


class Checkpoints:
    """The checkpoints of one run, OUTPUT/NAME/checkpoints/step-00000100 and so on; see recipes/checkpoint/folder.py.

    All processes call all methods, in the same order. No state of random generators is saved, as training draws nothing
    from any: initialization and sampling seed their own, and the order of the data follows from seed and step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_every: int = 0,
        asynchronous: bool = False,
        files: Mapping[str, str] | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """keep: newest ones to keep; keep_every: and those at every so many steps (0 = none).

        files: name -> text of what lies beside the numbers of every checkpoint (weights/locate.py, checkpoint_files).
        log: where lines for people go.
        """
        self.folder, self.files = folder, files or {}
        self._log = log
        self._keep, self._keep_every, self._asynchronous = keep, keep_every, asynchronous
        # Its own: a save speaks with the other processes while the training does, on other threads.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        self._main = dist.get_rank() == 0
        self._memory = HostMemory()
        self._plan: Plan | None = None
        self._thread: threading.Thread | None = None
        self._ended: deque[str] = deque()
        self._saved_step: int | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return checkpoint_steps(self.folder)

    def path(self, step: int) -> Path:
        return step_folder(self.folder, step)

    def require_room(self, parameters: Iterable[Tensor], *, moments: torch.dtype = torch.float32) -> None:
        """Tell how many checkpoints fit on the disk; raises UserError where not even one does.

        moments: the dtype of the two that AdamW keeps of every parameter.
        """
        size = sum(
            parameter.numel() * (parameter.element_size() + 2 * moments.itemsize) + STEP_BYTES
            for parameter in parameters
        ) + sum(len(text.encode()) for text in self.files.values())

        def look() -> None:
            if self._main:
                self._log("  " + room(self.folder, checkpoint_bytes=size, keep=self._keep))

        self._agree(look)

    # Saving

    def save(
        self, model: nn.Module, optimizer: Optimizer, *, step: int, progress: Mapping[str, Any] | None = None
    ) -> None:
        """Save the state after `step` steps, then delete what need not be kept. progress: a small record, plain JSON.

        Asynchronously, this waits for a save still in flight, and then only until the state is copied to the host.
        What came of it, report() tells; nothing is raised where a disk is full.
        """
        self.finish()
        state, groups = _tensors(model, optimizer)
        plan = self._plan_for(state)
        record = {"progress": dict(progress or {}), "optimizer": [hyperparameters(group) for group in groups]}
        tensors = plan.tensors(state)
        if not self._asynchronous:
            self._write(step, plan, (raw(tensor) for tensor in tensors), record)
            return
        copies: Iterable[memoryview]
        try:
            copies = self._memory.copy(list(tensors))
        except Exception as error:  # no memory; the others learn of it where they write
            copies = _refusing(error)
        # No daemon: Python would end one in the middle of gloo's code, and abort. A process that leaves without
        # finish() destroys the group first, and the thread ends with its next message.
        self._thread = threading.Thread(target=self._write, args=(step, plan, copies, record))
        self._thread.start()

    def finish(self) -> int | None:
        """Wait for a save in flight, and tell how it ended. Returns the newest step saved here, or resumed from."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.report()
        return self._saved_step

    def report(self) -> None:
        """Tell how the saves ended that ended since the last call."""
        while self._ended:
            self._log(self._ended.popleft())

    def _plan_for(self, state: Mapping[str, Tensor]) -> Plan:
        """The plan of the last save, where nothing but the numbers changed; it takes messages between all processes."""
        if self._plan is None or self._plan.signature != signature(state):
            self._plan = make_plan(state, group=self._group)
        return self._plan

    def _write(self, step: int, plan: Plan, contents: Iterable[memoryview], record: dict[str, Any]) -> None:
        """Write what was copied, with all processes, perhaps on a thread of its own."""
        try:
            self._write_new(step, plan, contents, record)
            self._saved_step = self._retire(step)
            self._ended.append(f"step {step:>6}  saved {self.path(step)}")
        except Exception as error:  # whatever it is, training goes on
            why = str(error) if isinstance(error, SaveFailed) else folders.reason(error)
            self._ended.append(f"step {step:>6}  NOT SAVED: {why}; older checkpoints are as they were")

    def _write_new(self, step: int, plan: Plan, contents: Iterable[memoryview], record: dict[str, Any]) -> None:
        place = partial_folder(self.folder, step)
        try:

            def begin() -> None:
                if self._main:
                    folders.begin(self.folder, step, log=lambda line: self._ended.append(f"step {step:>6}  {line}"))

            self._together(begin)

            def write() -> Written:
                place.mkdir(exist_ok=True)  # another node may not see it yet
                name = shard_name(dist.get_rank(), dist.get_world_size())
                file, chunks = write_shard(place / name, plan.pieces, contents)
                return name, file, list(zip(plan.pieces, chunks, strict=True))

            shards = self._together(write)

            def commit() -> None:
                if self._main:
                    folders.require_shards(place, {name: file for name, file, _ in shards})
                    folders.complete(place, assemble(step, record, plan.layout, shards), self.files)
                    folders.commit(self.folder, step)

            self._together(commit)
        except SaveFailed:
            with suppress(OSError):  # else the next save clears it
                # Each its own: where they share no folder, nobody else can.
                (place / shard_name(dist.get_rank(), dist.get_world_size())).unlink(missing_ok=True)
                if self._main:
                    remove(place)
                else:
                    place.rmdir()
            raise

    def _retire(self, step: int) -> int:
        """Delete what is dispensable, once the new checkpoint has its name for good and reads back. Returns its step.

        Each shard is read by the process that wrote it. That mostly comes from the host's cache: it proves the file,
        not the disk below it. Raises SaveFailed where the new one is damaged; what cannot be told deletes nothing.
        """

        def settle() -> list[int]:
            if not self._main:
                return []
            sync_folder(self.folder)
            return folders.dispensable(self.steps(), keep=self._keep, keep_every=self._keep_every)

        def verify() -> str:
            try:
                manifest = folders.check(self.folder, step, files=self._main)
                verify_shards(self.path(step), manifest, [shard_name(dist.get_rank(), dist.get_world_size())])
                return ""
            except Unreadable:
                raise
            except Damage as damage:
                return str(damage)

        try:
            found = self._together(settle)
            doomed = _from_main(found[0] if found else [], group=self._group)
            problem = next(filter(None, self._together(verify)), "") if doomed else ""
        except SaveFailed as failure:
            self._ended.append(f"step {step:>6}  is complete, but {failure}; older checkpoints are kept")
            return step
        if problem := _from_main(problem, group=self._group):
            raise SaveFailed(folders.put_away(self.folder, step, problem) if self._main else problem)
        for old in doomed if self._main else ():
            try:
                folders.delete(self.folder, old)
            except OSError as error:  # which makes the new one no worse
                self._ended.append(f"step {old:>6}  cannot be deleted: {folders.reason(error)}")
        return step

    def _together(self, work: Callable[[], Result]) -> list[Result]:
        """Let every process do its part, which must not communicate; returns all results, on rank 0 alone.

        Raises SaveFailed on all of them where one fails.
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
        if problem := _from_main(problem, group=self._group):
            raise SaveFailed(problem)
        return [result for _, result in answers] if self._main else []

    # Resuming

    def resume(
        self, model: nn.Module, optimizer: Optimizer, *, step: int, check: Callable[[Path], None]
    ) -> dict[str, Any]:
        """Load the checkpoint of `step`, or, where it turns out damaged, the newest older one that is not.

        A damaged one is set aside. check: called on rank 0 with the checkpoint to be loaded, before any tensor is read;
        what it raises stops all. Returns the progress that was saved, and the "step". Raises UserError where no
        checkpoint is left.
        """
        found: int | None = step
        while found is not None:
            path = self.path(found)
            self._agree(partial(check, path) if self._main else lambda: None)
            try:
                progress = self.load(model, optimizer, step=found)
                self._log(f"resumed from {path}")
                return progress | {"step": found}
            except Damage as damage:
                found = self._older(found, str(damage))
        raise AssertionError("newest_whole() raises where nothing is left")

    def _older(self, step: int, problem: str) -> int | None:
        found: list[int | None] = []

        def look() -> None:
            if self._main:
                self._log(folders.put_away(self.folder, step, problem))
                if not self.steps():
                    raise UserError(f"{problem}\nno older checkpoint is left; the same command begins the run anew")
                found.append(folders.newest_whole(self.folder, log=self._log))

        self._agree(look)
        return _from_main(found[0] if found else None, group=self._group)

    def load(self, model: nn.Module, optimizer: Optimizer, *, step: int) -> dict[str, Any]:
        """Load the checkpoint of `step` into model and optimizer, whatever mesh wrote it. Returns its progress.

        Raises Damage, on all processes, where one of them reads something that was not written so.
        """
        self.finish()
        state, groups = _tensors(model, optimizer)
        path = self.path(step)
        record: dict[str, Any] = {}

        def read() -> None:
            manifest = folders.check(self.folder, step, files=self._main)
            record.update(checked(manifest, groups, path))
            read_tensors(path, manifest, state)

        self._agree(read)
        moments: dict[str, dict[str, Tensor]] = {}
        for name, value in state.items():
            if name.startswith(MOMENTS):
                parameter, _, kind = name.removeprefix(MOMENTS).rpartition(".")
                moments.setdefault(parameter, {})[kind] = value
        set_state_dict(
            model,
            optimizer,
            model_state_dict={n.removeprefix(PARAMETERS): v for n, v in state.items() if n.startswith(PARAMETERS)},
            optim_state_dict={"state": cast(Any, moments), "param_groups": record["optimizer"]},
        )
        self._saved_step = step
        return record["progress"]

    def _agree(self, work: Callable[[], None]) -> None:
        """Let every process do its part, which must not communicate; what one raises, all raise.

        A Damage only where nobody has an error of another kind, which reading an older checkpoint would not cure.
        """
        mine: tuple[bool, str] = (False, "")
        cause: Exception | None = None
        try:
            work()
        except UserError as error:
            mine = isinstance(error, Damage), str(error)
        except Exception as error:  # an error of ours, or no memory
            mine, cause = (False, folders.reason(error)), error
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, mine, group=self._group)
        problems = sorted((is_damage, text) for is_damage, text in answers if text)
        if problems:
            is_damage, text = problems[0]
            raise (Damage if is_damage else UserError)(text) from cause


def _refusing(error: Exception) -> Iterator[memoryview]:
    """What there is to write where nothing could be copied."""
    raise error
    yield


def _from_main(value: Result, *, group: dist.ProcessGroup) -> Result:
    values = [value]
    dist.broadcast_object_list(values, group=group)
    return values[0]


def _tensors(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Parameters and the optimizer's tensors by name, as they are in memory, and the optimizer's groups.

    Names are those of the plain model. The parameters come without the class that float8 all-gather wraps them in: a
    checkpoint must load without torchao.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    found = {PARAMETERS + name: without_wrapper(cast(Tensor, value)) for name, value in model_state.items()}
    for parameter, values in cast(Mapping[str, Any], optimizer_state["state"]).items():
        for kind, value in values.items():
            assert isinstance(value, Tensor), f"optimizer state {kind} of {parameter} is no tensor"
            found[f"{MOMENTS}{parameter}.{kind}"] = value
    return found, cast(list[dict[str, Any]], optimizer_state["param_groups"])
