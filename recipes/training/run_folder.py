"""The run folder, OUTPUT/NAME, which belongs to one recipe. Imports no torch."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.files.atomic import PART, cut_back, keep_rows, sync_folder, write_whole
from recipes.files.layout import (
    CHECKPOINTS,
    ENVIRONMENT,
    EVALUATIONS,
    LOG_FILE,
    METRICS,
    PROOF,
    QUARANTINE,
    RECIPE,
    REPORT,
    checkpoint_step,
    holds_results,
    step_folder,
)
from recipes.files.lock import LOCK, FolderLock, another_name, begun_meanwhile
from recipes.files.reading import fault, is_folder, named_faults, names_in
from recipes.recipe.fields import toml
from recipes.recipe.load import load, to_toml
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stage_of, stages_of

PLOT = Path(__file__).resolve().parents[2] / "scripts/plot.py"
PATIENCE = 60.0
"""Seconds: most that a report may take (where nothing was ever drawn, matplotlib looks for fonts); least between."""
SILLY = ".nfs"
"""Prefix of the names that NFS gives to deleted files that are still open."""


def check_output_folder(recipe: Recipe) -> None:
    """Raises UserError if the run's files cannot be written, or if the folder holds something else."""
    folder = recipe.run.folder
    if not is_folder(folder):
        if folder.is_file():
            raise UserError(f"{folder} is a file, but the run's files go there; {another_name(folder)}")
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            what = "may not be written to" if above.is_dir() else "is no folder"
            raise UserError(f"run.output = {toml(recipe.run.output)}: {above} {what}; write another run.output")
        return
    # Empty, or left by a killed start or by a proof before the first one.
    names = [name for name in names_in(folder) if name not in (LOCK, PROOF) and not name.startswith((PART, SILLY))]
    _require_writable(folder, names)
    if not names:
        return
    if RECIPE not in names and holds_results(folder):
        raise UserError(
            f"{folder} holds a run without its {RECIPE}, which says how it trains. Bring it back, or write it anew"
            " with the recipe and the options that the run had: python train.py RECIPE [--section.field value ...]"
            f" --run.name OTHER --check > {folder / RECIPE}"
        )
    if RECIPE not in names:
        raise UserError(f"{folder} is not empty and has no {RECIPE}, so it is not a run folder; {another_name(folder)}")
    if not holds_results(folder):  # a run that ended before its first logged step
        return
    from recipes.training.same_run import require_resumes

    require_resumes(recipe, folder / RECIPE, where=folder)


def _require_writable(folder: Path, names: Sequence[str]) -> None:
    """Raises UserError if this user may not write in the folder, or what a run changes in it."""
    for path in (folder, *(folder / name for name in (CHECKPOINTS, METRICS, LOG_FILE) if name in names)):
        if os.access(path, os.W_OK) or (path.is_symlink() and not path.exists()):  # that is refused below
            continue
        with named_faults(path):
            os.stat(path)
        raise UserError(
            f"{path} may not be written to by this user. If another one began the run, chmod -R g+rwX {folder} lets"
            f" the group go on with it (and umask 002 in what starts it); or {another_name(folder)}"
        )


def claim_run_folder(recipe: Recipe, *, done: int, environment: dict[str, Any], lock: FolderLock) -> list[str]:
    """Make the folder this run's own: write recipe.toml and environment.json. Returns notes for the user.

    Nothing is lost: a folder with results but no checkpoint to resume from is moved aside, a recipe that changed is
    kept under another name, and only the rows of steps that will be repeated are cut off. done: steps of the checkpoint
    that the run resumes from, or 0. environment: the content of environment.json. lock: of the folder; held already if
    the folder was there when the run looked for checkpoints. Raises UserError if another process uses the folder, or
    has begun a run there since, or it cannot be written.
    """
    folder = recipe.run.folder
    notes: list[str] = []
    if folder.is_symlink():  # old and new files stay where the link points
        folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if lock.take(folder, log=notes.append) and holds_results(folder):
            raise begun_meanwhile(folder)
        if done == 0 and holds_results(folder):
            aside = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.{n}")).exists())
            folder.rename(aside)
            notes.append(f"{folder} held results but no checkpoint to resume from; they are in {aside} now")
            folder.mkdir(parents=True, exist_ok=True)
            lock.take(folder, log=notes.append)
        if not sync_folder(folder):
            notes.append(f"the file system of {folder} has no fsync: a power cut may lose what was saved before")
        if done < recipe.run.steps:
            text, file = to_toml(recipe), folder / RECIPE
            if done > 0 and file.is_file() and (old := file.read_text(encoding="utf-8")) != text:
                from recipes.training.same_run import plugin_notes, schedule_notes

                notes += schedule_notes(load(file, rules=False, kind=type(recipe)), recipe, done)
                notes += plugin_notes(file, recipe, done)
                kept = folder / f"recipe-until-{done:08d}.toml"
                if not kept.exists():  # if it exists, no step of the recipe in `file` remains
                    write_whole(kept, old, sync=True)
            _update(file, text)
            # Rewritten up to the present step; the stages before had other sources, too.
            present = set(stage_of(recipe, done).recipe.data.sources)
            earlier = {name for stage in stages_of(recipe) if stage.last <= done for name in stage.recipe.data.sources}
            keep_rows(folder / QUARANTINE, "source", [*(earlier - present)].__contains__)
            _update(folder / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
        for name in (METRICS, EVALUATIONS):
            cut_back(folder / name, done)
    except OSError as error:
        raise fault(f"{error.filename or folder} cannot be written", error, "; write another run.output") from None
    return notes


def _update(file: Path, text: str) -> None:
    """Replace the text of the file, if it differs, atomically."""
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        write_whole(file, text, sync=True)


class Report:
    """Writes a run's report in processes of their own: whatever happens there, the run goes on, and ends as without."""

    def __init__(self, folder: Path) -> None:
        self._command = [sys.executable, str(PLOT), str(folder), "--out", str(folder / REPORT)]
        self._child: subprocess.Popen[bytes] | None = None
        self._next = 0.0

    def begin(self) -> None:
        """Rewrite it without holding up the run, unless that goes on or was begun a moment ago."""
        if time.monotonic() > self._next and (self._child is None or self._child.poll() is not None):
            self._next, nowhere = time.monotonic() + PATIENCE, subprocess.DEVNULL
            with suppress(OSError):
                self._child = subprocess.Popen(self._command, stdout=nowhere, stderr=nowhere, start_new_session=True)

    def write(self, *, log: Callable[[str], None]) -> None:
        """Write it, and wait for it. log: receives why that failed."""
        try:
            if self._child:
                self._child.wait(PATIENCE)
            subprocess.run(self._command, check=True, capture_output=True, timeout=PATIENCE, start_new_session=True)
        except (subprocess.SubprocessError, OSError) as error:
            why = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace").splitlines()[-1]
            log(f"{REPORT} was not written: {why}; {shlex.join(self._command[1:3])} writes it later")


def own_checkpoint(recipe: Recipe, step: int) -> Path:
    """The run's own checkpoint of this step."""
    return step_folder(recipe.run.folder / CHECKPOINTS, step)


def is_of_trunk(checkpoint: Path, recipe: Recipe) -> bool:
    """Whether the checkpoint that a run begins from is another run's, see fork.py."""
    return checkpoint.parent.name == CHECKPOINTS and checkpoint.parent != recipe.run.folder / CHECKPOINTS


def is_in_memory(checkpoint: Path | None) -> bool:
    """Whether this is a process's own part, see recipes/checkpoint/memory.py."""
    return checkpoint is not None and checkpoint.parent.name != CHECKPOINTS


def step_of(checkpoint: Path | None) -> int:
    """The step of the checkpoint in this folder; 0 without one."""
    return checkpoint_step(checkpoint.name) or 0 if checkpoint is not None else 0
