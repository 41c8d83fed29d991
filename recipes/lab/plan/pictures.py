"""Draw a plan: memory through one step above its time, or how several numbers of GPUs compare. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from parallel.errors import UserError
from recipes.lab.curves.style import BLUE, DOTS_PER_INCH, GREEN, ORANGE, PINK, SKY, VERMILION, plain_text
from recipes.lab.plan.plan import MESSAGES, Plan
from recipes.lab.plan.screen import number, seconds
from recipes.lab.plan.world import World
from recipes.plan.memory import FULL
from recipes.plan.moments import sizes_of
from recipes.plan.sizes import Pieces
from recipes.recipe.schema import Recipe

if TYPE_CHECKING:
    from recipes.lab.plan.result import SearchResult

# More than a picture of runs needs.
COLOURS = (
    *(BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, "#F0E442"),
    *("#8C564B", "#7F7F7F", "#BFBFBF", "#404040", "#17BECF", "#9467BD", "#BCBD22"),
)
TICKS = 6
LETTERS = 8
"""Points of a search that are named."""
STEADY = ("CUDA context", "buffers of NCCL")
"""Pieces that are drawn, with parameters and moments, below all that comes and goes."""
HIDDEN, EXPOSED = "#BBDDF3", VERMILION
LANES = ("compute", "inside nodes", "between nodes")
"""Lanes of the time of a step, from top to bottom."""


@plain_text
def draw_step(plan: Plan, file: Path) -> None:
    """Memory at the moments of a step, and how long each lane is busy in it. Raises UserError, as all of these do."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 1))
    _memory(above, plan)
    _lanes(below, plan)
    _save(figure, plan.recipe, plan.world, file, number=f"{plan.world.processes:,} ")


def _save(figure: Figure, recipe: Recipe, world: World, file: Path, *, number: str = "") -> None:
    """Raises UserError if the file cannot be written."""
    by = f"calibrated {world.rates.calibrated}" if world.rates.calibrated else "not calibrated"
    figure.suptitle(f"{recipe.run.name} on {number}{world.gpu.name}: predicted, {by}", fontsize=11)
    try:
        figure.savefig(file, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise UserError(f"--picture {file}: cannot be written: {error.strerror}") from None


def _memory(axes: Axes, plan: Plan) -> None:
    """Stacked pieces, moment by moment, below the GPU's memory."""
    moments = ({} if plan.memory.where else forward(plan)) | plan.memory.moments
    pieces_in_order = (piece for pieces in moments.values() for piece, amount in pieces.items() if amount)
    names = dict.fromkeys([*STEADY, *pieces_in_order])
    stacks = [[pieces.get(name, 0) / 1e9 for pieces in moments.values()] for name in names]
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(names))]
    axes.stackplot(range(len(moments)), stacks, labels=list(names), colors=colours, step="mid")
    limit = plan.world.gpu.memory / 1e9
    if plan.memory.peak / 1e9 > limit / 5:  # with a tiny model, the line would flatten all else
        axes.axhline(limit, color="black", linewidth=1.2)
        axes.text(0, limit, f" {limit:.1f} GB of the {plan.world.gpu.name}", va="bottom", fontsize=8)
        axes.axhline(FULL * limit, color="black", linewidth=0.8, linestyle=":")
        note, below = f" {FULL:.0%}: the allocator needs the rest", (0, -3)
        axes.annotate(note, (0, FULL * limit), below, textcoords="offset points", va="top", fontsize=7)
    fullest = list(moments).index(plan.memory.fullest)
    axes.plot([fullest], [plan.memory.peak / 1e9], "v", color="black", markersize=6)
    note = f"{plan.memory.peak / 1e9:.1f} GB at {plan.memory.fullest}{plan.memory.where}"
    side = "left" if fullest < len(moments) / 2 else "right"
    axes.annotate(note, (fullest, plan.memory.peak / 1e9), (0, 7), textcoords="offset points", ha=side, fontsize=8)
    axes.set_xlim(0, len(moments) - 1)
    axes.set_ylim(0, 1.12 * max(axes.dataLim.y1, plan.memory.peak / 1e9))
    axes.set_ylabel("GB per GPU")
    ticks = sorted({round(part * (len(moments) - 1) / TICKS) for part in range(TICKS + 1)})
    axes.set_xticks(ticks, [_short(list(moments)[tick]) for tick in ticks], fontsize=7)
    axes.axvline(plan.recipe.model.layers - 0.5, color="black", linewidth=0.8, linestyle="--")
    title = "memory through a step: forward pass (what is kept), then each moment in its fullest micro-batch"
    axes.set_title(title, fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _short(moment: str) -> str:
    """The name of a moment below an axis, such as "backward 35"."""
    return moment.removeprefix("the ").replace(" pass of block", "").replace(" of block", "")


def forward(plan: Plan) -> dict[str, Pieces]:
    """What is kept when each block has run, with its weights and the next ones; it is never the fullest of a step."""
    loss, size = plan.memory.moments["the loss"], sizes_of(plan.recipe, plan.degrees)
    layers = plan.recipe.model.layers
    steady = (*size.state_by_kind, *STEADY)
    kept = {name: loss.get(name, 0) for name in (*steady, "accumulated gradients", "reduced gradients")}
    moments = {}
    for layer in range(layers):
        weights = loss["gathered weights"]
        if not size.keeps_blocks:
            weights += size.gathered_block * min(2, layers - layer)
        elif not size.accumulates:
            weights -= size.gathered_block * (layers - layer - 1)
        saved = round(size.tokens * size.saved_before(layer + 1))
        moments[f"the forward pass of block {layer}"] = kept | {"gathered weights": weights, "activations": saved}
    return moments


def _lanes(axes: Axes, plan: Plan) -> None:
    """Busy seconds of a step: what computes, then messages by place, pale where computation hides them."""
    end = [0.0] * len(LANES)

    def draw(name: str, amount: float, lane: int, **style: Any) -> None:
        axes.barh(lane, amount, left=end[lane], label=name, **style)
        end[lane] += amount

    computing = [(name, amount) for name, amount in plan.time.seconds.items() if not name.startswith(MESSAGES)]
    for index, (name, amount) in enumerate(computing):
        draw(name, amount, 0, color=COLOURS[index % len(COLOURS)])
    for name, amount in plan.time.hidden.items():
        draw("messages, hidden", amount, _lane(name), color=HIDDEN, edgecolor="white")
    waited = end[0]
    for name, amount in plan.time.seconds.items():
        if name.startswith(MESSAGES):
            end[_lane(name)] = waited
            draw("messages, not hidden", amount, _lane(name), color=EXPOSED, edgecolor="white")
            waited += amount
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.set_xlim(0, 1.01 * plan.time.step_seconds)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
    axes.set_title("seconds that each is busy in a step, added up: not a schedule", fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _lane(message: str) -> int:
    """The row of a message such as "messages: shard, inside nodes"."""
    return LANES.index(message.rpartition(", ")[2])


@plain_text
def draw_scaling(recipe: Recipe, plans: Sequence[Plan], file: Path) -> None:
    """Speed, waiting and memory of a GPU against the number of GPUs."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    speed, waiting, memory = figure.subplots(1, 3)
    counts = [plan.world.processes for plan in plans]
    rates = [plan.time.tokens_per_second for plan in plans]
    ends = [[plan.time.tokens / end for end in plan.range] for plan in plans]
    speed.fill_between(counts, [slow for _, slow in ends], [fast for fast, _ in ends], alpha=0.2, color=COLOURS[0])
    speed.plot(counts, rates, "o-", color=COLOURS[0])
    speed.set_title("tokens/s per GPU, and its range", fontsize=9)
    speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    waiting.plot(counts, [plan.exposed / plan.time.step_seconds for plan in plans], "o-", color=COLOURS[5])
    waiting.set_title("share of a step that waits for messages", fontsize=9)
    waiting.yaxis.set_major_formatter(PercentFormatter(1))
    memory.plot(counts, [plan.memory.peak / 1e9 for plan in plans], "o-", color=COLOURS[2])
    memory.axhline(plans[0].world.gpu.memory / 1e9, color="black", linewidth=1)
    memory.set_title(f"peak memory in GB, and that of an {plans[0].world.gpu.name}", fontsize=9)
    for axes in (speed, waiting, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [f"{count:,}" for count in counts], fontsize=8, rotation=60 if len(counts) > 4 else 0)
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
    _save(figure, recipe, plans[0].world, file)


@plain_text
def draw_front(result: "SearchResult", file: Path) -> None:
    """What a search found: the fastest for each room that is left in memory. Those before a fall get a letter."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.subplots()
    points = sorted(result.points())  # the fastest first, which leaves the least
    axes.plot([room / 1e9 for room, _, _ in points], [speed for _, speed, _ in points], "o-", color=COLOURS[0])
    falls = sorted(range(len(points) - 1), key=lambda index: points[index + 1][1] - points[index][1])
    lettered = sorted({0, len(points) - 1, *falls[: LETTERS - 2]} & set(range(len(points))))
    for letter, index in zip(ascii_uppercase, lettered, strict=False):
        room, speed, name = points[index]
        axes.annotate(letter, (room / 1e9, speed), (5, 5), textcoords="offset points", fontsize=9)
        axes.plot([], [], " ", label=f"{letter}  {number(speed)} tokens/s, {room / 1e9:.1f} GB left: {name}")
    if result.original is not None:
        room = (result.world.gpu.memory - result.original.memory.peak) / 1e9
        axes.plot([room], [result.original.time.tokens_per_second], "s", color=EXPOSED, label="the recipe as it is")
    axes.axvline((1 - FULL) * result.world.gpu.memory / 1e9, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("GB of memory that are left, of which the allocator needs those up to the dotted line")
    axes.set_ylabel("tokens/s per GPU")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center")
    _save(figure, result.recipe, result.world, file, number=f"{result.world.processes:,} ")
