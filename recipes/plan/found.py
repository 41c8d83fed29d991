"""What a search has found: as a screen, as TOML to paste, as a recipe file and as a picture. Imports no torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from parallel.config import MeshDegrees
from parallel.errors import UserError, listed
from recipes.fields import toml
from recipes.files.reading import fault
from recipes.load import load
from recipes.plan.hardware import Gpu
from recipes.plan.memory import FULL
from recipes.plan.plan import Plan
from recipes.plan.search_space import Changes, changes
from recipes.schema import Recipe

TOO_LARGE = "does not fit in memory"


@dataclass(frozen=True)
class Point:
    """One candidate."""

    recipe: Recipe
    degrees: MeshDegrees
    peak: int
    """Bytes."""
    seconds: float
    """Of a step."""


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    recipe: Recipe
    """That it started from."""
    processes: int
    nodes: int
    gpu: Gpu
    fixed: frozenset[str]
    """Fields that had to stay."""
    best: Plan | None
    """The fastest that fits; None if nothing does."""
    others: tuple[Plan, ...]
    """The next best of other kinds, the fastest first."""
    apart: dict[str, Plan]
    """The fastest with other numerics, by what they are."""
    original: Plan | None
    """Of the recipe as it is; None if it cannot run on these processes."""
    settings: int
    """How many were looked at."""
    too_large: int
    """How many of them do not fit in memory."""
    refused: dict[str, int]
    """Why the recipe's rules refuse meshes or micro-batches -> how many."""
    nearly: Point | None
    """The fastest that nearly fits."""
    least: Point
    """What needs the least memory."""
    front: tuple[Point, ...]
    """From the fastest to the leanest: none is both slower and larger than another."""
    remedies: tuple[str, ...]
    """What would make it fit, if nothing does."""

    @property
    def rejected(self) -> dict[str, int]:
        """Why -> how many."""
        return {TOO_LARGE: self.too_large, **self.refused}

    def difference(self) -> str:
        """The fastest recipe's difference to the one the search started from, as TOML; empty if there is none."""
        return as_toml(changes(self.recipe, self.best.recipe)) if self.best else ""

    def points(self) -> list[tuple[float, float, str]]:
        """Of the front: (bytes that are left of the memory, tokens per second and device, what it is)."""
        memory = self.gpu.memory
        return [(memory - at.peak, self._speed(at), described(at.recipe, at.degrees, self.recipe)) for at in self.front]

    def lines(self) -> list[str]:
        """For the screen."""
        on = f"{self.processes:,} x {self.gpu.name}" + (f" on {self.nodes:,} nodes" if self.nodes > 1 else "")
        kept = f"; kept as given: {', '.join(sorted(self.fixed))}" if self.fixed else ""
        lines = [
            f"search on {on}: {self.settings:,} settings{kept}",
            *(self._fitting() if self.best else self._unfit()),
        ]
        lines += ["", f"rejected: {self._why()}"]
        if self.nearly and self.best and self.nearly.seconds < self.best.time.step_seconds:
            at = self.nearly
            lines += [
                f"faster, but too large: {_number(self._speed(at))} tokens/s with {at.peak / 1e9:.1f} GB:",
                f"  {described(at.recipe, at.degrees, self.recipe)}",
            ]
        return lines

    def _why(self) -> str:
        """What was rejected, in settings and meshes."""
        why = f"{self.too_large:,} settings that do not fit in memory"
        if not self.refused:
            return why
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in self.refused.items())
        return f"{why}, and {sum(self.refused.values()):,} meshes and micro-batches ({reasons})"

    def _fitting(self) -> list[str]:
        """The table, and the difference to paste."""
        assert self.best
        rows = [("as it is", self.original)] if self.original else []
        rows += [("fastest", self.best), *(("next best", other) for other in self.others)]
        lines = [*self._table(rows), ""]
        if self.original is None:
            lines += ["The recipe as it is cannot run on these processes.", ""]
        if difference := self.difference():
            lines += ["The fastest, to paste into the recipe (--write FILE makes one of it):", *_indented(difference)]
        else:
            lines += ["The recipe as it is is the fastest."]
        if self.apart:
            fastest = max(self.apart.values(), key=lambda plan: plan.time.tokens_per_second)
            lines += ["", "With numerics that change what is trained:", *self._table(list(self.apart.items()))]
            lines += ["", "The fastest of these:", *_indented(as_toml(changes(self.recipe, fastest.recipe)))]
        return lines

    def _table(self, rows: list[tuple[str, Plan]]) -> list[str]:
        """One line each: its speed, also relative to the recipe as it is or else to the fastest, memory, settings."""
        wide = max(len(name) for name, _ in rows)
        against = self.original or self.best
        assert against
        lines = [f"{'':{wide}}  tokens/s per GPU       GB of {self.gpu.memory / 1e9:.1f}"]
        for name, at in rows:
            speed, memory = at.time.tokens_per_second, at.memory.peak / 1e9
            gain = f"{speed / against.time.tokens_per_second - 1:+.1%}" if at is not against else ""
            what = described(at.recipe, at.degrees, self.recipe) + ("" if at.fits else "  does not fit")
            lines += [f"{name:{wide}}  {_number(speed):>8}  {gain:>7}  {memory:8.1f}  {what}"]
        return lines

    def _unfit(self) -> list[str]:
        """What is nearest, and what would fit."""
        limit = FULL * self.gpu.memory / 1e9
        lines = [
            f"Nothing fits: the least takes {self.least.peak / 1e9:.1f} GB, and a recipe may use {limit:.1f} of the"
            f" {self.gpu.memory / 1e9:.1f} GB:",
            f"  {described(self.least.recipe, self.least.degrees, self.recipe)}",
        ]
        return lines + ([f"It would fit with {listed(self.remedies, last='or')}."] if self.remedies else [])

    def _speed(self, point: Point) -> float:
        """Tokens per second and device."""
        batch = self.recipe.batch
        return batch.global_batch_size * batch.sequence_length / self.processes / point.seconds


def described(recipe: Recipe, degrees: MeshDegrees, original: Recipe) -> str:
    """What a search chooses, as in "shard 128 x tensor 8, micro-batch 8, full in 63 of 126 blocks, ZeRO-3".

    Loss chunks and prefetch only where they differ from those of the original.
    """
    mesh, way, layers = recipe.mesh, recipe.activation_checkpointing, recipe.model.layers
    axes = {axis: getattr(degrees, axis) for axis in ("replicate", "shard", "context", "tensor")}
    parts = [f"{axis} {degree}" for axis, degree in axes.items() if degree > 1] or ["shard 1"]
    if degrees.context > 1:
        parts[-1 - (degrees.tensor > 1)] += f" by {mesh.context_by}"
    recomputed = len(way.recomputed(layers))
    where = f" in {recomputed} of {layers} blocks" if 0 < recomputed < layers else ""
    kept = "" if recipe.fsdp.reshard_after_forward else ", weights kept"
    sharded = degrees.shard * degrees.context > 1
    stage = f", ZeRO-{3 if recipe.fsdp.reshard_after_forward else 2}" if sharded else kept
    chunks = (
        f", {recipe.batch.loss_chunks} loss chunks" if recipe.batch.loss_chunks != original.batch.loss_chunks else ""
    )
    ahead = f", prefetch {recipe.fsdp.prefetch}" if recipe.fsdp.prefetch != original.fsdp.prefetch else ""
    mode = "no checkpointing" if way.mode == "none" else f"{way.mode}{where}"
    return f"{' x '.join(parts)}, micro-batch {recipe.batch.micro_batch_size}, {mode}{stage}{chunks}{ahead}"


def as_toml(changed: Changes) -> str:
    """Sections with their changed fields, to paste into a recipe."""
    return "\n".join(
        f"[{section}]\n" + "".join(f"{name} = {toml(value)}\n" for name, value in values.items())
        for section, values in changed.items()
    )


def _number(speed: float) -> str:
    """With at least three digits."""
    return f"{speed:,.0f}" if speed >= 1000 else f"{speed:.3g}" if speed < 100 else f"{speed:.1f}"


def _indented(text: str) -> list[str]:
    return [f"    {line}".rstrip() for line in text.splitlines()]


def write(found: Found, file: Path, *, base: Path) -> None:
    """Write the fastest recipe to a file of its own, based on the one that the search started from.

    The run is named after the file, so that it does not continue another one's. What the command line changed is
    written, too. Raises UserError, and leaves no file behind, if there is nothing to write, if the file exists, or if
    it would not load.
    """
    if found.best is None:
        raise UserError(f"--write {file}: nothing fits, so there is no recipe to write")
    best = found.best.recipe
    changed = changes(load(base, rules=False), best)
    if "run.name" not in found.fixed:
        changed["run"] = changed.get("run", {}) | {"name": file.stem}
    for section, one, several in (("data", "source", "mixture"), ("validation", "source", "sources")):
        if section in changed and getattr(getattr(best, section), several):
            changed[section].pop(one, None)  # loading refuses both
    speed = found.best.time.tokens_per_second
    head = (
        f"# Found by train.py --plan --search for {found.processes} x {found.gpu.name}: {_number(speed)} tokens/s per"
        f" GPU and {found.best.memory.peak / 1e9:.1f} GB (predicted).\n"
    )
    text = f"{head}base = {toml(os.path.relpath(base, file.parent))}\n\n{as_toml(changed)}"
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise UserError(f"--write {file}: exists; write another name, or remove it") from None
    except OSError as error:
        raise fault(f"--write {file}: cannot be written", error) from None
    try:
        load(file, processes=found.processes, nodes=found.nodes)
    except UserError:
        file.unlink()
        raise
