"""What a search has found: as a screen, as TOML to paste and as a recipe file. Imports no torch."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap

from parallel.errors import UserError
from recipes.files.reading import fault
from recipes.lab.plan.plan import Plan, World, plan
from recipes.lab.plan.screen import COLUMNS, number, off_by
from recipes.lab.plan.search import TIE, Search, refusal_of_all, what_would_fit
from recipes.lab.plan.search_space import SEARCHED, Candidate, Changes, Space, changes, numerics_of
from recipes.metrics.hardware import MEMORY
from recipes.plan.memory import FULL
from recipes.recipe.fields import toml
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe

WORTH = 1.01
"""What does not fit is shown if it is so many times as fast."""
TOO_LARGE = "does not fit in memory"


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    looked: Search
    best: Plan | None
    """The fastest that fits; None if nothing does."""
    others: tuple[Plan, ...]
    """The next best of other kinds, the fastest first."""
    apart: dict[str, Plan]
    """The fastest with other numerics, by what they are."""
    original: Plan | None
    """The plan of the recipe as it is; None if it cannot run on these processes."""
    least: Candidate
    """What needs the least memory."""
    remedies: tuple[str, ...]
    """What would make it fit, if nothing does."""

    @property
    def recipe(self) -> Recipe:
        """The recipe that the search started from."""
        return self.looked.space.recipe

    @property
    def world(self) -> World:
        return self.looked.space.world

    @property
    def rejected(self) -> dict[str, int]:
        """Reason -> how many."""
        return {TOO_LARGE: self.looked.too_large, **dict(self.looked.refused.most_common())}

    def difference(self) -> str:
        """The fastest recipe's difference to the one the search started from, as TOML; empty if there is none."""
        return as_toml(changes(self.recipe, self.best.recipe)) if self.best else ""

    def points(self) -> list[tuple[float, float, str]]:
        """(bytes that are left of the memory, tokens per second and device, what it is) of each point of the front."""
        memory, front = self.world.gpu.memory, self.looked.front
        return [(memory - point.peak, self._speed(point), settings_of(point, self.recipe)) for point in front]

    def lines(self) -> list[str]:
        """Lines for the screen."""
        fixed = [key for key in SEARCHED if key in self.looked.space.fixed]
        kept = f"; kept as given: {', '.join(fixed)}" if fixed else ""
        lines = [f"searched {self.looked.settings:,} settings of checkpointing, ZeRO, micro-batch and mesh{kept}", ""]
        lines += [*(self._fitting() if self.best else self._unfit()), "", *self._numerics()]
        return lines + [wrapped for line in self._rejected() for wrapped in wrap(line, COLUMNS, subsequent_indent="  ")]

    def _rejected(self) -> list[str]:
        """Why settings and meshes were rejected, and how many; and what a little more memory would give."""
        looked = self.looked
        lines = [f"rejected: {_several(looked.too_large, 'setting')} for memory"]
        if looked.refused:
            reasons = "; ".join(f"{reason}: {count:,}" for reason, count in looked.refused.most_common())
            lines[0] += f", and {_several(looked.refused.total(), 'mesh', 'meshes')} for rules ({reasons})"
        if looked.nearly and self.best and WORTH * looked.nearly.seconds < self.best.time.step_seconds:
            speed, memory = number(self._speed(looked.nearly)), looked.nearly.peak / 1e9
            what = settings_of(looked.nearly, self.recipe)
            lines += [f"the fastest of those that nearly fit: {speed} tokens/s with {memory:.1f} GB; {what}"]
        return lines

    def _fitting(self) -> list[str]:
        """The table, and the difference to paste."""
        assert self.best
        rows = [("as it is", self.original)] if self.original else []
        rows += [("fastest", self.best)] if self.best.recipe != self.recipe else []
        rows += [("next best", other) for other in self.others]
        lines = [*self._table(rows), ""]
        if self.original is None:
            lines += [f"As it is, the recipe cannot run on {self.world.processes:,} processes."]
        if self.best.recipe != self.recipe and self.original:
            gain = self.best.time.tokens_per_second / self.original.time.tokens_per_second - 1
            off = max(self.best.time.spread, self.original.time.spread)
            sure = "less than that: measure both" if gain < off else "more than that"
            said = f"Each time is predicted within {off_by(off)}; the gain of {gain:+.1%} is {sure}."
            if gain <= 0:
                said = f"As it is, the recipe does not fit: what fits is slower, by {-gain:.1%}."
            lines += [said, ""]
        if difference := self.difference():
            lines += ["The fastest, to paste into the recipe (--write FILE makes one of it):", *_indented(difference)]
        else:
            lines += ["As it is, the recipe is the fastest."]
        return lines

    def _numerics(self) -> list[str]:
        """What is faster, or fits, with other numerics."""
        if not self.apart:
            return []
        fastest = max(self.apart.values(), key=lambda plan: plan.time.tokens_per_second)
        return [
            *("With numerics that change what is trained:", *self._table(list(self.apart.items())), ""),
            *("The fastest of these, to paste:", *_indented(as_toml(changes(self.recipe, fastest.recipe))), ""),
        ]

    def _table(self, rows: list[tuple[str, Plan]]) -> list[str]:
        """A line for each plan: speed, also relative to the recipe as it is or else the fastest, memory, settings."""
        against = self.original or self.best or rows[0][1]
        memory = f"of {self.world.gpu.memory / 1e9:.1f} GB"
        mesh: tuple[str, ...] = ("replicate", "shard", "context", "tensor")
        mesh = ("pipeline", *mesh) if any(shown.degrees.pipeline > 1 for _, shown in rows) else mesh
        mesh = (*mesh, "expert") if any(shown.degrees.expert > 1 for _, shown in rows) else mesh
        cells = [["", "tokens/s", "", memory, *mesh, "micro", "recompute", "ZeRO", ""]]
        for name, shown in rows:
            gain = shown.time.tokens_per_second / against.time.tokens_per_second - 1
            cells += [
                [
                    name,
                    number(shown.time.tokens_per_second),
                    "" if shown is against else f"{gain:+.1%}",
                    f"{shown.memory.peak / 1e9:.1f}" + ("" if shown.fits else "!"),
                    *(str(getattr(shown.degrees, axis)) for axis in mesh),
                    str(shown.recipe.batch.micro_batch_size),
                    _recomputed(shown.recipe),
                    "3" if shown.recipe.fsdp.reshard_after_forward else "2",
                    _tuning(shown.recipe, self.recipe),
                ]
            ]
            if shown.degrees.context > 1 and shown.recipe.mesh.context_by == "gather":
                cells[-1][4 + mesh.index("context")] += " gather"
        wide = [max(map(len, cells_below)) for cells_below in zip(*cells, strict=True)]
        left = {0, len(mesh) + 5, len(mesh) + 7}
        lines = [
            "  ".join(f"{cell:{'<' if column in left else '>'}{wide[column]}}" for column, cell in enumerate(row))
            for row in cells
        ]
        return [line.rstrip() for line in lines] + ([] if all(shown.fits for _, shown in rows) else ["!: does not fit"])

    def _unfit(self) -> list[str]:
        """What is nearest, and what would fit."""
        limit = FULL * self.world.gpu.memory / 1e9
        lines = [
            f"Nothing fits: the least takes {self.least.peak / 1e9:.1f} GB, and a recipe may use {limit:.1f} of the"
            f" {self.world.gpu.memory / 1e9:.1f} GB:",
            f"  {settings_of(self.least, self.recipe)}",
        ]
        if self.remedies:
            lines += ["This would fit with one of:", *(f"  {remedy}" for remedy in self.remedies)]
        return lines

    def _speed(self, point: Candidate) -> float:
        """Tokens per second and device."""
        batch = self.recipe.batch
        return batch.global_batch_size * batch.sequence_length / self.world.processes / point.seconds


def search(
    recipe: Recipe, world: World, *, numerics: bool = False, fixed: frozenset[str] = frozenset()
) -> SearchResult:
    """The fastest that fits, and what else there is to say, of a recipe whose mesh need not fit the processes.

    numerics: also try what changes the numbers of the training: float8, and bfloat16 moments and gradient sums. fixed:
    dotted keys that stay as they are. Raises UserError if no mesh of these processes can run the recipe.
    """
    space = Space(recipe, world, fixed)
    looked = Search(space).run()
    if looked.least is None:
        raise refusal_of_all(looked)
    apart = {}
    for name, changed in numerics_of(recipe, gpu=world.gpu, fixed=fixed) if numerics else ():
        if fastest := Search(replace(space, recipe=changed)).run().best_of_each_kind():
            apart[name] = plan(fastest[0].recipe, world)
    best = [plan(candidate.recipe, world) for candidate in looked.best_of_each_kind()]
    original = plan(recipe, world) if space.own_degrees and space.refusal(recipe) is None else None
    if original and original.fits and best and original.time.step_seconds <= TIE * best[0].time.step_seconds:
        best = [original, *(other for other in best if other.recipe != recipe)]  # a mesh that is not searched
    return SearchResult(
        looked=looked,
        best=best[0] if best else None,
        others=tuple(best[1:]),
        apart=apart,
        original=original,
        least=looked.least,
        remedies=() if best else tuple(what_would_fit(looked)),
    )


def settings_of(candidate: Candidate, original: Recipe) -> str:
    """What a search chooses, such as "shard 128 x tensor 8, micro-batch 8, full 63/126, ZeRO-3".

    It says schedule, loss chunks and prefetch only where they differ from those of the original.
    """
    recipe, degrees = candidate.recipe, candidate.degrees
    axes = {axis: getattr(degrees, axis) for axis in ("pipeline", "replicate", "shard", "context", "tensor")}
    words = [f"{axis} {degree}" for axis, degree in axes.items() if degree > 1] or ["shard 1"]
    if degrees.context > 1:
        words[-2 if degrees.tensor > 1 else -1] += f" by {recipe.mesh.context_by}"
    words[-1] += f", of which expert {degrees.expert}" if degrees.expert > 1 else ""
    kept = "" if recipe.fsdp.reshard_after_forward else ", weights kept"
    sharded = degrees.shard * degrees.context > 1
    stage = f", ZeRO-{3 if recipe.fsdp.reshard_after_forward else 2}" if sharded else kept
    tuning = f", {_tuning(recipe, original)}".rstrip(", ")
    return f"{' x '.join(words)}, micro-batch {recipe.batch.micro_batch_size}, {_recomputed(recipe)}{stage}{tuning}"


def _recomputed(recipe: Recipe) -> str:
    """How blocks recompute, such as "full" or "selective 9/36"."""
    way, layers = recipe.activation_checkpointing, recipe.model.layers
    count = len(way.recomputed(layers))
    return f"{way.mode} {count}/{layers}" if 0 < count < layers else way.mode


def _tuning(recipe: Recipe, original: Recipe) -> str:
    """Schedule, loss chunks and prefetch where they differ from those of the original."""
    chunks, ahead = recipe.batch.loss_chunks, recipe.fsdp.prefetch
    words = [f"loss chunks {chunks}"] if chunks != original.batch.loss_chunks else []
    words += [f"prefetch {ahead}"] if ahead != original.fsdp.prefetch else []
    if recipe.mesh.pipeline > 1 and recipe.pipeline != original.pipeline:
        words = [f"{recipe.pipeline.schedule} x {recipe.pipeline.runs}", *words]
    return ", ".join(words)


def as_toml(changed: Changes) -> str:
    """Sections with their changed fields, to paste into a recipe."""
    return "\n".join(
        f"[{section}]\n" + "".join(f"{name} = {toml(value)}\n" for name, value in values.items())
        for section, values in changed.items()
    )


def _several(count: int, single: str, several: str = "") -> str:
    """A count and its noun, such as "1 mesh" or "2,850 settings"."""
    return f"{count:,} {single if count == 1 else several or single + 's'}"


def _indented(text: str) -> list[str]:
    return [f"    {line}".rstrip() for line in text.splitlines()]


def write_fastest(result: SearchResult, file: Path, *, base: Path) -> None:
    """Write the fastest recipe to a file of its own, based on the one that the search started from.

    The run is named after the file, so that it does not continue another one's. What the command line changed is
    written, too. Raises UserError, and leaves no file behind, if the file exists, or if
    it would not load.
    """
    assert result.best
    world, best = result.world, result.best.recipe
    changed = changes(load(base, rules=False), best)
    if "run.name" not in result.looked.space.fixed:
        changed = {"run": changed.pop("run", {}) | {"name": file.stem}, **changed}
    if world.gpu.name in MEMORY:  # else a variant, such as A100-40
        count = f"{world.nodes}x{world.processes // world.nodes}" if world.nodes > 1 else f"{world.processes}x"
        hardware = {"hardware": f"{count}{world.gpu.name.lower()}"}
        changed = {"run": changed.pop("run", {}) | hardware, **changed}
    for section, single, several in (("data", "source", "mixture"), ("validation", "source", "sources")):
        if section in changed and getattr(getattr(best, section), several):
            changed[section].pop(single, None)  # loading refuses both
    speed = result.best.time.tokens_per_second
    head = (
        f"# Found by train.py --plan --search for {world.processes} x {world.gpu.name}: {number(speed)} tokens/s per"
        f" GPU and {result.best.memory.peak / 1e9:.1f} GB (predicted).\n"
    )
    text = f"{head}base = {toml(os.path.relpath(base.resolve(), file.parent.resolve()))}\n\n{as_toml(changed)}"
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise UserError(f"--write {file}: exists; write another name, or remove it") from None
    except OSError as error:
        raise fault(f"--write {file}: cannot be written", error) from None
    try:
        load(file, processes=world.processes, nodes=world.nodes, elsewhere=True)
    except UserError:
        file.unlink()
        raise
