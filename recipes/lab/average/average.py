"""The average of checkpoints, of one run or several, as a checkpoint of its own."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path

import torch

from parallel.errors import UserError
from recipes.checkpoint.average import read_average
from recipes.checkpoint.config import AVERAGED, VALIDATION, CheckpointConfig
from recipes.checkpoint.files import complete, verify, write_file, write_shard
from recipes.checkpoint.manifest import Damage, Manifest, shard_name
from recipes.checkpoint.plan import Spread, pieces_of, plan
from recipes.checkpoint.remote_folder import RemoteFolder
from recipes.checkpoint.storage import DTYPES, PARAMETERS, assemble, raw, read_tensors
from recipes.files.atomic import free_bytes
from recipes.files.layout import CHECKPOINTS, RECIPE, checkpoint_step, checkpoint_steps, step_folder
from recipes.files.local_copy import local_copy
from recipes.files.reading import is_remote, read_text, user_path
from recipes.files.units import size
from recipes.recipe.load import read_toml
from recipes.training.same_run import read_data_state
from recipes.weights.description import differences, read_description
from recipes.weights.hf_folder import new_folder


def average(wanted: Sequence[tuple[str, int]], out: Path, *, weights: str, log: Callable[[str], None]) -> None:
    """Write the average of checkpoints, with moments, progress and recipe of the last, as a new folder like a run's.

    wanted: run (a folder or an address) and step. weights: see shares_of(). Raises UserError, and leaves no files.
    """
    runs, shares = [*dict.fromkeys(run for run, _ in wanted)], shares_of(len(wanted), weights)
    if weights == "decay" and (len(runs) > 1 or [*wanted] != sorted(wanted)):
        raise UserError("--weights decay is for ascending steps of one run; write those, or a number for each")
    find = {run: _finder(run, [step for other, step in wanted if other == run], out) for run in runs}
    with new_folder(out) as partial:
        fetched = {run: partial / "fetched" / str(number) for number, run in enumerate(runs)}
        recipe = find[wanted[-1][0]](None, fetched[wanted[-1][0]])
        read_toml(recipe)  # damaged, it is refused before all steps are read
        checkpoints: dict[Path, Manifest] = {}
        for run, step in wanted:
            log(f"reading and verifying {f'{run}, ' if len(runs) > 1 else ''}step {step}")
            path = find[run](step, fetched[run]).resolve()
            if path in checkpoints:
                raise UserError(f"{run}@{step} is named twice; write each checkpoint once, and --weights for its share")
            checkpoints[path] = verify(path)
            if checkpoints[path].step != step:
                raise Damage(f"{path} holds the checkpoint of another step: {checkpoints[path].step}")
        last, newest = [*checkpoints.items()][-1]
        model, _ = read_description(last)
        for path, manifest in checkpoints.items():
            other = [name for name, *_ in sorted(_kinds(manifest) ^ _kinds(newest))]
            other += [f"model.{name}" for name, _ in differences(read_description(path)[0], model)]
            if len(runs) > 1 and read_data_state(path).get("tokenizer") != read_data_state(last).get("tokenizer"):
                other.append("its tokenizer")
            if other:
                than = f"step {newest.step}" if len(runs) == 1 else last
                raise UserError(f"{path} differs from {than} in {other[0]}: average checkpoints of one model")
        if (free := free_bytes(partial)) is not None and newest.bytes > free:
            raise UserError(f"{out} needs {size(newest.bytes)}, but its disk has {size(free)} free; free some space")
        log(f"writing {out}")
        write_file(partial / RECIPE, [read_text(recipe).encode()])
        of_one = {"run": runs[0], "steps": [step for _, step in wanted]}
        origin = of_one if len(runs) == 1 else {"checkpoints": [f"{run}@{step}" for run, step in wanted]}
        assert newest.step is not None, "it is that of its folder"
        _write(step_folder(partial / CHECKPOINTS, newest.step), checkpoints, shares, {**origin, "weights": weights})
        shutil.rmtree(partial / "fetched", ignore_errors=True)


def _finder(run: str, steps: Sequence[int], out: Path) -> Callable[[int | None, Path], Path]:
    """What finds the checkpoint of a step, or (None) the recipe, of a run; in the second folder if it is at a server.

    Raises UserError unless the run has these steps, and out is elsewhere.
    """
    place = run.rstrip("/").removesuffix(f"/{CHECKPOINTS}")
    there = RemoteFolder(place, CheckpointConfig()) if is_remote(run) else None
    path = Path(run) if there else user_path(run)
    folder = path if path.name == CHECKPOINTS else path / CHECKPOINTS
    have = there.steps() if there else checkpoint_steps(folder)
    if checkpoint_step(path.name) is not None:
        raise UserError(f"{run} is one checkpoint; write the folder of its run, {path.parents[1]}")
    if missing := ", ".join(str(step) for step in steps if step not in have):
        raise UserError(f"{run} has no checkpoint of step {missing}; it has {', '.join(map(str, have)) or 'none'}")
    if folder.resolve() in out.resolve().parents:
        raise UserError(f"{out} is among the checkpoints of the run itself; write a folder outside of {folder}")

    def find(step: int | None, fetched: Path) -> Path:
        if step is None:
            return (local_copy(place, fetched, only=[RECIPE]) if there else folder.parent) / RECIPE
        return local_copy(there.address(step), fetched, deep=True) if there else step_folder(folder, step)

    return find


def named(texts: Sequence[str]) -> list[tuple[str, int]]:
    """The run and step of each "RUN@STEP". Raises UserError unless they are two or more different ones."""
    found = [(match[1], int(match[2])) for text in texts if (match := re.fullmatch(r"(.+)@(\d{1,9})", text, re.ASCII))]
    if len({*found}) != len(texts) or len(texts) < 2:
        raise UserError(f"{' '.join(texts)}: write two or more different RUN@STEP, or one RUN and --steps")
    return found


def steps_of(text: str) -> Sequence[int]:
    """The steps of "FIRST:LAST:EVERY" or "A,B,C". Raises UserError unless they are two or more, and ascend to LAST."""
    steps: Sequence[int] = ()
    if match := re.fullmatch(r"(\d{1,9}):(\d{1,9}):([1-9]\d{0,8})", text, re.ASCII):
        first, last, every = map(int, match.groups())
        steps = range(first, last + 1, every) if (last - first) % every == 0 else ()
    elif re.fullmatch(r"\d{1,9}(,\d{1,9})+", text, re.ASCII):
        steps = [*map(int, text.split(","))]
    if 1 < len(steps) < 10_000 and sorted({*steps}) == [*steps]:
        return steps
    raise UserError(
        f"--steps {text}: write FIRST:LAST:EVERY, which must end at LAST, or two or more that ascend: A,B,C"
    )


def shares_of(count: int, weights: str) -> list[float]:
    """The shares c(0) ... c(n-1) of checkpoints: equal ones, those of "A,B,C", or "decay".

    From a constant rate and oldest first, w(j) = c(j) + ... + c(n-1) scales the updates before checkpoint j (WSM, arXiv
    2507.17634): equal shares decay by 1 - j/n, and c(j) = sqrt((j+1)/n) - sqrt(j/n), "decay", by 1 - sqrt(j/n).
    """
    if weights == "decay":
        return [((j + 1) / count) ** 0.5 - (j / count) ** 0.5 for j in range(count)]
    try:
        numbers = [1.0] * count if weights == "equal" else [*map(float, weights.split(","))]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(0 < number < inf for number in (*numbers, sum(numbers))):
        raise UserError(f"--weights {weights}: write equal, decay, or {count} positive numbers: 2,1,1")
    return [number / sum(numbers) for number in numbers]


def _kinds(manifest: Manifest) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(name, one.dtype, one.shape) for name, one in manifest.tensors.items() if name.startswith(PARAMETERS)}


def _write(folder: Path, checkpoints: Mapping[Path, Manifest], shares: Sequence[float], origin: object) -> None:
    """Write the average of these checkpoints, and all else of the last, with one tensor and its sum in memory."""
    path, last = [*checkpoints.items()][-1]
    stored = plan({name: Spread(one.dtype, one.shape) for name, one in last.tensors.items()}, 1)
    pieces, shard = pieces_of(stored, 0), shard_name(0, 1)
    buffer = torch.empty(max(piece.bytes for piece in pieces), dtype=torch.uint8)

    def contents() -> Iterator[memoryview]:
        for piece in pieces:
            value = buffer[: piece.bytes].view(DTYPES[piece.dtype]).view(piece.shape)
            if piece.tensor.startswith(PARAMETERS) and value.is_floating_point():
                read_average([*checkpoints], {piece.tensor: value}, shares, [*checkpoints.values()])
            else:
                read_tensors(path, last, {piece.tensor: value})
            yield raw(value)

    folder.mkdir(parents=True)
    shards = {shard: write_shard(folder / shard, pieces, contents())}
    progress = {key: value for key, value in last.state["progress"].items() if key not in (VALIDATION, AVERAGED)}
    state = {**last.state, "progress": {**progress, "average_of": origin}}
    texts = {name: read_text(path / name) for name, file in last.files.items() if not file.header_bytes}
    complete(folder, assemble(last.step, state, stored, shards), texts)
