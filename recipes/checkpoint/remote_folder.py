"""A run's folder at a server, REMOTE/NAME: which checkpoints are there, what belongs to which run, what may go.

run-id.txt                       the id of the one run that writes here; its own folder holds the same in .run-id
recipe.toml metrics.jsonl ...    the small files of the run's folder, as they were at the last copy
checkpoints/step-00000100/       a checkpoint; it counts as soon as it has its manifest, which is sent last

Imports no torch.
"""

import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError
from recipes.checkpoint.best import BestOf
from recipes.checkpoint.config import CheckpointConfig
from recipes.checkpoint.files import decode
from recipes.checkpoint.folder import dispensable
from recipes.checkpoint.manifest import MANIFEST, Manifest
from recipes.files import remote
from recipes.files.atomic import write_whole
from recipes.files.layout import CHECKPOINTS, RUN_ID, checkpoint_step, step_name
from recipes.files.reading import names_in, read_text

THEIR_ID = "run-id.txt"
PROBE = "may-be-written.txt"


@dataclass(frozen=True)
class RemoteFolder:
    """The folder of a run at a server."""

    place: str
    """The folder's address: checkpoint.remote and the name of the run."""
    config: CheckpointConfig
    """Which checkpoints are kept there."""

    def address(self, step: int, name: str = "") -> str:
        """The address of a checkpoint, or of a file in it."""
        return f"{self.place}/{CHECKPOINTS}/{step_name(step)}" + (f"/{name}" if name else "")

    def files(self) -> dict[int, dict[str, remote.RemoteFile]]:
        """Step -> name -> file, for what is there of each checkpoint, whole or not, oldest first.

        The names of thousands of shards begin with the folders that they are in.
        """
        by_step: dict[int, dict[str, remote.RemoteFile]] = {}
        for file in remote.find(f"{self.place}/{CHECKPOINTS}"):
            for depth in (2, 3):
                if (step := checkpoint_step(file.parts[-depth])) is not None:
                    by_step.setdefault(step, {})["/".join(file.parts[1 - depth :])] = file
        for step, names in by_step.items():  # a list may lack what has just been sent: ask for the object itself
            if MANIFEST not in names and (about := remote.state(address := self.address(step, MANIFEST))):
                names[MANIFEST] = remote.RemoteFile(address, about)
        return dict(sorted(by_step.items()))

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, oldest first."""
        return [step for step, names in self.files().items() if MANIFEST in names]

    def require_own(self, run_folder: Path, *, create: bool = False) -> None:
        """Raises UserError if another run writes there. create: make this run the one that does, if none does yet."""
        theirs = (remote.read(f"{self.place}/{THEIR_ID}") or b"").decode(errors="replace").strip()
        ours = read_text(run_folder / RUN_ID).strip() if RUN_ID in names_in(run_folder) else ""
        steps = [] if theirs and theirs == ours else self.steps()
        if steps and (not theirs or ours or any(names_in(run_folder / CHECKPOINTS))):
            raise UserError(
                f"checkpoint.remote: {self.place} holds the checkpoints of another run than {run_folder}: give this run"
                " another name (--run.name OTHER), or write another checkpoint.remote"
            )
        if create and not (theirs and theirs == ours):
            ours = ours or theirs or secrets.token_hex(16)
            write_whole(run_folder / RUN_ID, ours, sync=True)
            remote.write(f"{self.place}/{THEIR_ID}", ours.encode())

    def require_writable(self) -> None:
        """Delete the halves of files that a killed process left. Raises UserError if nothing may be written or deleted
        there: better now than at the first checkpoint."""
        remote.write(f"{self.place}/{PROBE}", b"")
        remote.delete([f"{self.place}/{PROBE}"])
        with suppress(UserError):  # where this is not allowed, or no server of S3's kind; it costs room only
            remote.abort_uploads(self.place)

    def clear(self, step: int, names: Collection[str]) -> str:
        """Delete what a copy of these files of a step does not replace there, the manifest first, and what a killed
        process left of other steps. Returns why some of that cannot be deleted, or ""."""
        problem = ""
        for other, there in self.files().items():
            if other == step:
                self._delete(step, {*there} - {*names} | ({*there} & {MANIFEST}))
            elif MANIFEST not in there:
                try:
                    self._delete(other, there)
                except UserError as error:  # it is in nobody's way
                    problem = f"what a killed run left of step {other} cannot be deleted: {error}"
        return problem

    def prune(self, *, besides: Collection[int]) -> None:
        """Delete the checkpoints that need not be kept. besides: those that stay in any case. Raises UserError."""
        files = self.files()
        whole = [step for step, names in files.items() if MANIFEST in names]
        doomed = {*dispensable(whole, self.config)} - {*besides}
        if doomed and self.config.keep_best:  # that of a machine that is gone, perhaps
            doomed -= BestOf(self.config.keep_best, self._manifest).kept(whole)
        for step in sorted(doomed):
            self._delete(step, files[step])

    def _manifest(self, step: int) -> Manifest:
        address = self.address(step, MANIFEST)
        return decode(remote.read(address) or b"", where=Path(address))

    def _delete(self, step: int, names: Collection[str]) -> None:
        """Delete these files, the manifest first: without it, the rest is not a checkpoint."""
        remote.delete([self.address(step, name) for name in sorted(names, key=lambda name: name != MANIFEST)])

    def copy_small_files(self, run_folder: Path) -> None:
        """Send the files directly in the run's folder, such as its recipe and its metrics."""
        for name in names_in(run_folder):
            file = run_folder / name
            if not name.startswith(".") and file.is_file():
                remote.write(f"{self.place}/{name}", file.read_bytes())

    def fetch_small_files(self, run_folder: Path, *, log: Callable[[str], None]) -> None:
        """Copy those files from there to the run's folder, with the run's id. What else lies there is left alone."""
        for file in remote.files_in(self.place):
            if file.name not in (THEIR_ID, PROBE) and not (run_folder / file.name).is_dir():
                try:
                    remote.download(file, run_folder / file.name)
                except remote.Altered as damage:  # the run can do without
                    log(f"{damage}; it is left out")
        write_whole(run_folder / RUN_ID, (remote.read(f"{self.place}/{THEIR_ID}") or b"").decode(), sync=True)
