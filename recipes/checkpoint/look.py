"""Lists, verifies and describes checkpoints: the logic of scripts/checkpoint.py. Imports no torch."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from parallel.errors import TemporaryError, UserError
from recipes.checkpoint.best import BestOf, best_among
from recipes.checkpoint.config import CheckpointConfig
from recipes.checkpoint.files import AtHand, check_files, read_manifest, verify
from recipes.checkpoint.folder import ASIDE, check, delete, dispensable, left_overs, taken_by
from recipes.checkpoint.manifest import MANIFEST, Damage
from recipes.files.atomic import utc_of
from recipes.files.exit_codes import FAILED, FINISHED, TEMPORARY
from recipes.files.layout import CHECKPOINTS, RECIPE, checkpoint_steps, step_folder
from recipes.files.lock import FolderLock
from recipes.files.reading import is_folder, is_remote, named_faults, names_in, similar, toml_table, user_path
from recipes.files.screen import say
from recipes.files.units import size


def find(path: Path) -> list[Path]:
    """The checkpoints of a run folder or of its `checkpoints` folder, oldest first, or the checkpoint at this path.

    A checkpoint without its manifest counts, as a damaged one. Raises UserError if there are none.
    """
    if not is_folder(path):
        raise UserError(f"{path} {'is not a folder' if path.exists() else f'does not exist{similar(path)}'}")
    names = names_in(path)
    if MANIFEST in names:
        return [path]
    for folder in (path / CHECKPOINTS, path):
        if steps := checkpoint_steps(folder):
            return [step_folder(folder, step) for step in steps]
    if re.match(rf"({ASIDE})?step-[0-9]{{8}}", path.name) or any(
        re.match("shard-.*-of-|shards-", name) for name in names
    ):
        return [path]
    others = [name for folder in (path / CHECKPOINTS, path) for name in aside(folder)]
    raise UserError(f"{path} holds no checkpoint" + (f", only {' '.join(others)}" if others else ""))


def lines(command: str, place: str) -> Iterator[tuple[str, int]]:
    """What `list`, `verify` or `show` prints, line by line, each with an exit code: FAILED for damage.

    place: a path or an address. What is fetched from an address is in a temporary folder meanwhile; verify brings
    shards there, one at a time. Raises UserError.
    """
    at_hand: AtHand = nullcontext
    others: list[str] = []
    with TemporaryDirectory() if is_remote(place) else nullcontext(place) as here:
        stands_for = here
        if is_remote(place):
            from recipes.checkpoint.audit import mirrored

            paths, at_hand, stands_for = mirrored(place, Path(here))
        else:
            paths = find(Path(place))
            others = aside(paths[0].parent)
        rows = table(paths, thorough=command == "verify", at_hand=at_hand)
        if command == "show":
            rows = ((line, FINISHED) for line in describe(paths[-1]))
        for line, code in rows:
            yield line.replace(here, stands_for), code
    if others and command != "show":
        yield f"also in this folder: {' '.join(others)}", FINISHED


def table(paths: Sequence[Path], *, thorough: bool, at_hand: AtHand = nullcontext) -> Iterator[tuple[str, int]]:
    """A header and one line per checkpoint, each with an exit code: FAILED for damage. thorough: also read the tensors,
    at_hand being around each shard."""
    yield f"{'step':>10}  {'written':<20}  {'size':>9}  {'files':>5}  {'tensors':>7}  state", FINISHED
    best, remark = best_among(paths) or (None, "")
    for path in paths:
        try:
            manifest = verify(path, at_hand) if thorough else read_manifest(path)
            if not thorough:
                check_files(path, manifest)
            if path.name.startswith("step-") and path != step_folder(path.parent, manifest.step or 0):
                raise Damage(f"{path} holds the checkpoint of another step: {manifest.step}")
            written = utc_of(at) if (at := (path / MANIFEST).stat().st_mtime) else "at a server"
        except (UserError, FileNotFoundError) as error:
            if os.path.lexists(path):
                yield f"{path.name:>10}  {error}", TEMPORARY if isinstance(error, TemporaryError) else FAILED
            else:  # by the training, which has newer ones
                yield f"{path.name:>10}  deleted in the meantime", FINISHED
        else:
            step = "-" if manifest.step is None else manifest.step
            sound = ("intact" if thorough else "complete") + (f", {remark}" if path == best else "")
            yield (
                f"{step:>10}  {written}  {size(manifest.bytes):>9}  {len(manifest.files):>5}"
                f"  {len(manifest.tensors):>7}  {sound}",
                FINISHED,
            )


def prune(run: Path, config: CheckpointConfig, *, really: bool) -> Iterator[str]:
    """Say which checkpoints of a run its config would not keep, and delete them if `really`. Raises UserError."""
    run = run.parent if run.name == CHECKPOINTS else run
    folder, lock = run / CHECKPOINTS, FolderLock()
    steps = checkpoint_steps(folder)
    if not steps:
        raise UserError(f"{folder} holds no checkpoint{'' if run.exists() else similar(run)}")
    if really:
        lock.take(run, log=say, remedy="let it delete them (checkpoint.keep)", here=0, elsewhere=0)
    best = BestOf(config.keep_best, lambda step: read_manifest(step_folder(folder, step))).kept(steps)
    if config.keep_best and not best:
        raise UserError(f"--keep-best {config.keep_best}: no checkpoint has this value; write a column of validation")
    own = BestOf(_recipe_of(run, "checkpoint", "keep_best"), lambda step: read_manifest(step_folder(folder, step)))
    doomed, freed = dispensable(steps, config, best={*best, *own.kept(steps), *_continued(run)}), 0
    for step in steps[-config.keep :]:  # a damaged one is no reason to delete others
        check(folder, step)
    for step in doomed:
        freed += (taken := taken_by(step_folder(folder, step)))
        with named_faults(folder):
            if really:
                delete(folder, step)
        yield f"step {step}: {size(taken)} {'deleted' if really else 'to delete'}"
    yield f"{len(doomed)} of {len(steps)} checkpoints, {size(freed)}{'' if really else '; --yes deletes them'}"


def _recipe_of(run: Path, section: str, key: str) -> str:
    """What the recipe of a run says there; "" if it says nothing, or cannot be read."""
    with suppress(OSError, ValueError, AttributeError):  # a section that is no table has no keys
        return str(toml_table((run / RECIPE).read_text(encoding="utf-8")).get(section, {}).get(key, ""))
    return ""


def _continued(run: Path) -> Iterator[int]:
    """The steps that runs beside this one were forked from, which they need until they have saved."""
    for fork in run.parent.iterdir():
        trunk, _, step = _recipe_of(fork, "run", "continue_from").rpartition("@")
        if step.isdecimal() and user_path(trunk).resolve() == run.resolve():
            yield int(step)


def aside(folder: Path) -> list[str]:
    """The names of damaged checkpoints that were set aside, and of what a kill left."""
    set_aside = [name for name in names_in(folder) if name.startswith(ASIDE)]
    return [*set_aside, *(path.name for path in left_overs(folder))]


def describe(path: Path) -> Iterator[str]:
    """The contents of one checkpoint, line by line. Raises UserError if its manifest is damaged."""
    manifest = read_manifest(path)
    yield f"{path}: {'no step' if manifest.step is None else f'step {manifest.step}'}, {size(manifest.bytes)}"
    progress = manifest.state.get("progress")
    for key, value in progress.items() if isinstance(progress, dict) else ():
        yield f"  {json.dumps(key)[1:-1]}: {json.dumps(value)}"
    yield "files:"
    for name, file in manifest.files.items():
        yield f"  {name}  {size(file.bytes)}  xxh3_128 {file.checksum}"
    yield "tensors:"
    width = max(map(len, manifest.tensors), default=0)
    for name, tensor in sorted(manifest.tensors.items()):
        count = sum(row.count for row in tensor.boxes)
        parts = f"in {count} parts" if count > 1 else ""
        yield f"  {name:<{width}}  {tensor.dtype:<4}  {list(tensor.shape)}  {parts}".rstrip()
    elements = sum(prod(tensor.shape) for tensor in manifest.tensors.values())
    yield f"{len(manifest.tensors)} tensors, {elements:,} elements"
