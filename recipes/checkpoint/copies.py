"""Copies of a run's checkpoints at a server, made in the background while the run trains."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

from parallel.errors import UserError
from parallel.messages import Channel
from recipes.checkpoint import folder as folders
from recipes.checkpoint.files import read_manifest, verify_shards
from recipes.checkpoint.manifest import MANIFEST, StoredFile
from recipes.checkpoint.remote_folder import RemoteFolder
from recipes.checkpoint.together import Together
from recipes.files import remote
from recipes.files.layout import CHECKPOINTS, checkpoint_steps, step_folder
from recipes.files.screen import join_aloud

SECONDS, SECONDS_AFTER_A_SIGNAL = 1500.0, 120.0
"""How long the end of a run waits for each of at most two copies: the watchdog waits for an hour."""


class Copies:
    """Each process sends its share of the shards; then process 0 sends everything else, and the manifest last.

    All processes call start() and finish(), in the same order. A copy that fails costs nothing but the copy: the
    checkpoint on the disk is whole, and the next save tries again, the newest first.
    """

    _thread: ClassVar[threading.Thread | None] = None
    """The thread of all stages of a run, which share a channel: a later one waits until an earlier one has copied."""

    def __init__(self, there: RemoteFolder, run_folder: Path, *, note: Callable[[int, str], None]) -> None:
        """note: receives a step and what became of its copy."""
        self._there, self._run_folder, self._note = there, run_folder, note
        # A channel of its own: copies communicate while saves and training do.
        self._together = Together(Channel.COPIES)
        self._all_there = False
        self._same: set[int] = set()  # the steps whose copies are known to be of these checkpoints
        self._sent: dict[str, StoredFile] = {}  # address -> the shard that this process has sent there
        self.step: int | None = None
        """The step that is being copied, which must not be deleted here."""

    @property
    def is_free(self) -> bool:
        """Whether no copy is under way."""
        return self._thread is None or not self._thread.is_alive()

    def start(self) -> None:
        """Copy the checkpoints that are complete here and not there, in the background, once process 0 is free."""
        if self._thread is not None:
            self._thread.join()
        # Not a daemon: see Checkpoints.save().
        Copies._thread = threading.Thread(target=self._copy_missing)
        Copies._thread.start()

    def finish(self, *, soon: bool, stop: Callable[[], bool], say: Callable[[str], None]) -> bool:
        """Wait until the checkpoints are copied, after one more attempt. Returns whether they are. soon: with less
        patience. stop: whether a signal has ended the wait. say: receives what is waited for, unless it is short."""
        seconds = SECONDS_AFTER_A_SIGNAL if soon else SECONDS
        for last in (False, True):
            what = f"copies to {self._there.place}; a signal leaves them to the next start"
            if self._thread is not None and not join_aloud(self._thread, seconds, what=what, say=say, stop=stop):
                why = "when a signal came" if stop() else f"in {seconds:.0f} s"
                self._note(self.step or 0, f"NOT COPIED to {self._there.place} {why}")
                return False
            if not last:
                self.start()
        return self._all_there

    def prune(self) -> None:
        """Delete there what is kept neither there nor here; called on process 0."""
        try:
            self._there.prune(besides=checkpoint_steps(self._run_folder / CHECKPOINTS))
        except UserError as error:  # the next copy tries again
            self._note(self.step or 0, f"older copies are NOT DELETED: {error}")

    def _copy_missing(self) -> None:
        """Copy checkpoints with all processes, on a thread, until none is missing there or a copy fails."""
        self._all_there, last = False, None
        try:
            while (step := self._together.on_main(self._missing)) is not None:
                if step == last:
                    raise UserError(f"{self._there.address(step)} is not there after it was sent")
                self.step = last = step
                self._together.on_main(partial(self._clear, step))
                self._together.on_all(partial(self._send_shards, step))
                self._together.on_main(partial(self._complete, step))
                self._note(step, f"copied to {self._there.address(step)}")
            self._all_there = True
        except UserError as error:  # of any process
            newest = max(checkpoint_steps(self._run_folder / CHECKPOINTS), default=0)
            self._note(
                self.step or newest, f"NOT COPIED: {error}; what is here is whole, and the next save tries again"
            )
        except RuntimeError as error:  # gloo: another process has ended
            self._note(self.step or 0, f"NOT COPIED: {error}".splitlines()[0])
        finally:
            self.step = None

    def _missing(self) -> int | None:
        """The newest step that is complete here and not there; None if there is none, and the small files are there."""
        self._there.require_own(self._run_folder, create=True)
        here, there = checkpoint_steps(self._run_folder / CHECKPOINTS), self._there.steps()
        # A list may lack what was sent, and have what is from before the run went back: the manifest itself tells.
        for step in {*here} - ({*there} & self._same):
            content = None
            with suppress(remote.Altered):
                content = remote.read(self._there.address(step, MANIFEST))
            try:
                ours = (step_folder(self._run_folder / CHECKPOINTS, step) / MANIFEST).read_bytes()
            except FileNotFoundError:  # deleted in the meantime
                here.remove(step)
                continue
            (self._same.add if content == ours else self._same.discard)(step)
        if missing := [step for step in here if step not in self._same]:
            return missing[-1]
        self._there.copy_small_files(self._run_folder)
        return None

    def _clear(self, step: int) -> None:
        if problem := self._there.clear(step, read_manifest(step_folder(self._run_folder / CHECKPOINTS, step)).files):
            self._note(step, problem)

    def _send_shards(self, step: int) -> None:
        """Send this process's share of the shards: the one that it wrote, if all wrote one.

        Each is read once more before, because it must be what the manifest says. What an attempt before has sent stays.
        """
        path = step_folder(self._run_folder / CHECKPOINTS, step)
        manifest = read_manifest(path)
        for name in list(manifest.shards.values())[self._together.rank :: self._together.size]:
            address, file = self._there.address(step, name), manifest.files[name]
            if self._sent.get(address) == file and (about := remote.state(address)) and about.st_size == file.bytes:
                continue
            verify_shards(path, manifest, [name])
            remote.upload(path / name, address)
            self._sent[address] = file

    def _complete(self, step: int) -> None:
        """Send what is not a shard, the manifest last, when all shards are there; then delete older checkpoints."""
        path = step_folder(self._run_folder / CHECKPOINTS, step)
        manifest, there = folders.check(path.parent, step), self._there.files().get(step, {})
        for name, file in manifest.files.items():
            address = self._there.address(step, name)
            if not file.header_bytes:
                remote.upload(path / name, address)
                continue
            about = there[name].state if name in there else remote.state(address)  # a list may lack it
            if about is None or about.st_size != file.bytes:
                raise UserError(f"{address} did not arrive whole")
        self._there.copy_small_files(self._run_folder)
        remote.upload(path / MANIFEST, self._there.address(step, MANIFEST))
        self.prune()
