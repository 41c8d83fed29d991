"""The fastest recipe that fits: every mesh, micro-batch, checkpointing and ZeRO stage, by prediction alone.

A setting is one of these; its tuning is its loss chunks and prefetch. A box holds the settings that differ in nothing
but how many blocks recompute: eighths of them, and the fewest with which it fits. Of a box, the first or the last
tuning of the fewest blocks is the fastest, whether it fits or not; of a setting, the last one needs the least memory.
So the memory of each setting and a time of each box say which boxes can hold the fastest recipe or a point of the
front, and only these are tried in full. Imports no torch.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import inf

from parallel.config import MeshDegrees
from parallel.errors import UserError, listed
from recipes.lab.plan.search_space import (
    BATCH,
    SEARCHED,
    SEQUENCE,
    Candidate,
    Meshed,
    Space,
    as_keys,
    changes,
    numerics_of,
    tuned,
)
from recipes.plan.memory import FULL, outside_of_torch, predict
from recipes.plan.moments import moments, sizes_of
from recipes.plan.sizes import Sizes
from recipes.plan.stages import parts
from recipes.plan.time import step_time
from recipes.recipe.schema import Recipe

TIE = 1.001
"""Recipes whose times differ by less are equally fast: the one with the fewest changes wins."""
KINDS = 5
"""How many of different kinds are looked for, the fastest included."""
SLOWEST = 2.0
"""The front ends where a step takes so many times as long as the fastest."""
GRAIN = 0.01
"""Candidates of the front differ by at least this share of the device's memory."""
NEARLY = 1.25
"""A setting that needs at most so many times the memory that there is nearly fits."""
MORE = (2, 4, 8, 16, 32, 64, 128, 256)
"""Times as many GPUs are looked at where nothing fits."""

Kind = tuple[int, int, int, int, bool, str]
"""Degrees of pipeline, tensor, context, expert; whether there are replicas; and how at least half of the blocks run."""


@dataclass(frozen=True)
class Box:
    """Settings that differ in nothing but how many blocks recompute."""

    settings: list[Recipe]
    """Settings from the one with the fewest blocks that fits on, with ever more."""
    degrees: MeshDegrees
    needs: list[int]
    """Bytes of each, in its leanest tuning."""
    bound: float
    """Seconds: no step is shorter."""


class Search:
    """A search that goes through one space, once."""

    def __init__(self, space: Space) -> None:
        self.space, self.gpu = space, space.world.gpu
        self.limit = FULL * self.gpu.memory
        self.refused: Counter[str] = Counter()
        """Reason -> number of meshes."""
        self.settings = self.too_large = 0
        """How many there are, and how many of them do not fit."""
        self.nearly: Candidate | None = None
        """The fastest that nearly fits."""
        self.least: Candidate | None = None
        """What needs the least memory."""
        self.points: list[Candidate] = []
        """All points of the boxes that can hold one of the fastest."""
        self._fastest: dict[Kind, float] = {}
        """Seconds of the fastest step of each kind."""
        self.front: list[Candidate] = []
        """Candidates from the fastest to the leanest: none is both slower and larger than another."""

    def run(self) -> "Search":
        """Go through all of it."""
        for box in sorted(self._boxes(), key=lambda box: box.bound):
            kind = kind_of(box.settings[0], box.degrees)
            if not self._can_matter(kind, box.bound, min(box.needs)):
                continue
            for setting, need in zip(box.settings, box.needs, strict=True):
                if self._can_matter(kind, self._bound(setting, box.degrees), need):
                    self._try([tuned(setting, tuning) for tuning in self.space.own_tuning_first], box.degrees)
        first = min(self._fastest.values(), default=inf)
        self.front = _front(
            [point for point in self.front if point.seconds <= SLOWEST * first], GRAIN * self.gpu.memory
        )
        return self

    def fits(self) -> bool:
        """Whether anything does where all blocks recompute, or none."""
        for layout in self.space.layouts():
            if isinstance(layout, Meshed) and self._state(layout) <= self.limit:
                leanest = self.space.tunings[-1]
                for *_, setting in self.space.settings(layout):
                    if peak(tuned(setting, leanest), layout.degrees) <= self.limit:
                        return True
        return False

    def _state(self, layout: Meshed) -> int:
        """Bytes that are always there: no step needs less."""
        if layout.degrees.pipeline > 1:
            stages = [stage for _, stage in parts(layout.recipe, layout.degrees)]
            return max(sum(stage.state.values()) + stage.living()["accumulated gradients"] for stage in stages)
        return sum(sizes_of(layout.recipe, layout.degrees).state.values())

    def best_of_each_kind(self) -> list[Candidate]:
        """The fastest of all, and those of other kinds. Of equally fast ones, that with the fewest changes."""
        kinds: dict[Kind, list[Candidate]] = {}
        for point in sorted(self.points, key=lambda point: point.seconds):
            points = kinds.setdefault(kind_of(point.recipe, point.degrees), [point])
            if point.seconds <= TIE * points[0].seconds:
                points.append(point)

        def fields(point: Candidate) -> int:
            return sum(map(len, changes(self.space.recipe, point.recipe).values()))

        return [min(points, key=lambda point: (fields(point), point.peak)) for points in [*kinds.values()][:KINDS]]

    def _boxes(self) -> Iterator[Box]:
        """The boxes with settings that fit."""
        for layout in self.space.layouts():
            if isinstance(layout, str):
                self.refused[layout] += 1
                continue
            hopeless = self._state(layout) > self._enough
            for settings in self.space.settings(layout):
                self.settings += len(settings)
                if hopeless:
                    self.too_large += len(settings)
                elif box := self._box(settings, layout.degrees):
                    yield box

    @property
    def _enough(self) -> float:
        """Bytes: what needs more is neither near the limit nor the leanest, however much more it needs."""
        return max(NEARLY * self.limit, self.least.peak if self.least else inf)

    def _box(self, settings: list[Recipe], degrees: MeshDegrees) -> Box | None:
        """The settings that fit, if there are any."""
        lean = [tuned(setting, self.space.tunings[-1]) for setting in settings]
        needs = [peak(recipe, degrees, enough=self._enough) for recipe in lean]
        least = min(needs)
        if self.least is None or least < self.least.peak:
            self.least = self._point(lean[needs.index(least)], degrees, least)
        fitting = [index for index, need in enumerate(needs) if need <= self.limit]
        self.too_large += len(settings) - len(fitting)
        for recipe, need in zip(lean, needs, strict=True):
            if self.limit < need <= NEARLY * self.limit:
                point = self._point(recipe, degrees, need)
                self.nearly = min(self.nearly or point, point, key=lambda point: point.seconds)
                break  # further ones recompute more blocks
        if not fitting:
            return None
        settings, needs, finer = settings[fitting[0] :], needs[fitting[0] :], self.space.finer(settings, fitting[0])
        fewest = bisect_left(finer, True, key=lambda setting: self._least_of(setting, degrees) <= self.limit)
        if fewest < len(finer):
            settings, needs = [finer[fewest], *settings], [self._least_of(finer[fewest], degrees), *needs]
        return Box(settings, degrees, needs, self._bound(settings[0], degrees))

    def _least_of(self, setting: Recipe, degrees: MeshDegrees) -> int:
        """Bytes, in its leanest tuning."""
        return peak(tuned(setting, self.space.tunings[-1]), degrees)

    def _bound(self, setting: Recipe, degrees: MeshDegrees) -> float:
        """Seconds: none of its tunings is faster."""
        first, *_, last = *self.space.tunings, self.space.tunings[-1]
        return min(self._point(tuned(setting, tuning), degrees, 0).seconds for tuning in (first, last))

    def _point(self, recipe: Recipe, degrees: MeshDegrees, need: int) -> Candidate:
        time = step_time(recipe, degrees, gpu=self.gpu, rates=self.space.world.rates)
        return Candidate(recipe, degrees, need, time.step_seconds)

    def _can_matter(self, kind: Kind, bound: float, leanest: float) -> bool:
        """Whether what is no faster and no leaner can be the fastest of one of the fastest kinds, or on the front."""
        first = min(self._fastest.values(), default=inf)
        faster = min((point.peak for point in self.front if point.seconds <= bound), default=inf)
        if leanest < faster - GRAIN * self.gpu.memory and bound <= SLOWEST * first:
            return True
        kinds = sum(seconds < bound for seconds in self._fastest.values())
        return bound <= TIE * self._fastest.get(kind, inf) and (kinds < KINDS or bound <= TIE * first)

    def _try(self, candidates: list[Recipe], degrees: MeshDegrees) -> None:
        """Note the candidates that fit."""
        needs = ((recipe, peak(recipe, degrees)) for recipe in candidates)
        points = [self._point(recipe, degrees, need) for recipe, need in needs if need <= self.limit]
        kind = kind_of(candidates[0], degrees)
        self.points += points
        self.front = _front([*self.front, *points])
        self._fastest[kind] = min([self._fastest.get(kind, inf), *(point.seconds for point in points)])


def refusal_of_all(whole: Search) -> UserError:
    """The error for a recipe that no mesh can run."""
    why = ", ".join(f"{reason} ({count})" for reason, count in whole.refused.most_common())
    processes, fixed = f"{whole.space.world.processes:,}", [key for key in SEARCHED if key in whole.space.fixed]
    remedies = [
        *([f"write a batch.global_batch_size that is a multiple of {processes}"] if BATCH in whole.refused else []),
        *(["write another batch.sequence_length"] if SEQUENCE in whole.refused else []),
        *([f"do not fix {' and '.join(fixed)}"] if fixed else []),
        "change --processes",
    ]
    tried = f"no mesh of {processes} processes can run this recipe; of those tried: {why}"
    return UserError(f"--search: {tried}; {listed(remedies, last='or')}")


def kind_of(recipe: Recipe, degrees: MeshDegrees) -> Kind:
    """Recipes of one kind differ in numbers only."""
    way, layers = recipe.activation_checkpointing, recipe.model.layers
    mode = way.mode if 2 * len(way.recomputed(layers)) >= layers else "none"
    return degrees.pipeline, degrees.tensor, degrees.context, degrees.expert, degrees.replicate > 1, mode


def _front(points: list[Candidate], grain: float = 1) -> list[Candidate]:
    """The points that need less memory than all faster ones, by this many bytes, the fastest first."""
    front: list[Candidate] = []
    for point in sorted(points, key=lambda point: (point.seconds, point.peak)):
        if not front or point.peak <= front[-1].peak - grain:
            front.append(point)
    return front


def what_would_fit(whole: Search) -> Iterator[str]:
    """What would make a recipe fit that does not fit at all."""
    space, least = whole.space, whole.least
    assert least is not None
    without_float8 = replace(whole.gpu, float8_peak=None)
    for _, changed in numerics_of(least.recipe, gpu=without_float8, fixed=space.fixed):
        if peak(changed, least.degrees) <= whole.limit:
            yield f"{as_keys(changes(least.recipe, changed))}, which changes what is trained"
            break
    offloaded = replace(least.recipe, fsdp=replace(least.recipe.fsdp, cpu_offload=True))
    if peak(offloaded, least.degrees) <= whole.limit and not least.recipe.optimizer.facts.orthogonalizes:
        yield "fsdp.cpu_offload = true, which is slow: its time is not predicted"
    for times in MORE:
        world, processes = space.world, times * space.world.processes
        nodes = -(-processes // (whole.gpu.per_node if world.nodes == 1 else world.processes // world.nodes))
        larger = replace(space, world=replace(world, processes=processes, nodes=nodes))
        if processes % nodes == 0 and Search(larger).fits():
            yield f"{processes:,} GPUs on {nodes:,} {'node' if nodes == 1 else 'nodes'}"
            return


# The memory of many recipes.


def peak(recipe: Recipe, degrees: MeshDegrees, *, enough: float = inf) -> int:
    """The peak of predict(), for thousands of recipes: of moments that are alike, it looks only at those at the ends.

    enough: where a moment needs more, that is returned instead, and the others are not looked at.
    """
    if degrees.pipeline > 1:
        return predict(recipe, degrees).peak
    size, most = sizes_of(recipe, degrees), 0
    always = sum(size.state.values()) + sum(outside_of_torch(recipe, degrees).values())
    for _, pieces in moments(size, fullest_layers(size)):
        most = max(most, always + sum(pieces.values()))
        if most > enough:
            break
    return most


def fullest_layers(size: Sizes) -> Collection[int]:
    """The blocks that can hold the most memory.

    Between the first blocks, which gather less ahead, and the last one, memory grows all along or shrinks all along: by
    a constant if all blocks run alike, else from each block of a kind (recomputed or not) to the next of that kind. So
    only the ends need checking. If it may grow here and shrink there, every block does.
    """
    model, layers, ahead = size.recipe.model, size.recipe.model.layers, size.recipe.fsdp.prefetch
    ends = {0, min(1, layers - 1), min(ahead, layers - 1), max(0, layers - 2), layers - 1}
    dense = len(model.dense)
    if model.dense != tuple(range(dense)):
        return range(layers)
    ends |= {max(0, dense - 1), dense}  # sparse blocks follow
    recomputed, count = {*size.recomputed}, len(size.recomputed)
    if count in (0, layers):
        return ends
    for kind in (size.recomputed, [layer for layer in range(layers) if layer not in recomputed]):
        ends.update(kind[: bisect_left(kind, ahead) + 1], kind[-2:])
    # (plain blocks, blocks that recompute) from one that recomputes to the next, and from a plain one to the next.
    kinds = ((layers // count - 1, 1), (-(-layers // count) - 1, 1)), ((1, 0), (1, -(-count // (layers - count))))
    plain, recomputing = size.saved
    for each in _gradients_per_block(size):
        for steps in kinds:
            grow = {(i + j) * each + size.tokens * (i * plain + j * recomputing) > 0 for i, j in steps}
            if len(grow) > 1:
                return range(layers)
    return ends


def _gradients_per_block(size: Sizes) -> list[int]:
    """Bytes by which gradients and gathered weights grow from block to block, in the last micro-batch and before."""
    waiting = 4 * size.block.whole
    share = (size.held if size.recipe.fsdp.cpu_offload else 4 + size.held) * size.block.share
    weights = size.gathered_block if size.keeps_blocks else 0
    if not size.accumulates:
        return [weights - share]
    return [waiting - share + weights, -waiting if size.micro_batches == 2 else 0]
