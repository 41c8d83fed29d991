"""A plan on one screen, of at most 40 lines and 100 columns, and several as a table. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from parallel.errors import UserError
from recipes.lab.plan.plan import DAY, MESSAGES, Plan, TrainingCost, World, plan
from recipes.metrics.ladder import Ladder
from recipes.plan.hardware import Gpu
from recipes.plan.memory import FULL, Prediction
from recipes.plan.time import StepTime
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import Stage, stages_of, tokens_of

IMBALANCE = 1.5
"""Load of the fullest process's experts, relative to the mean, beside which a plan is shown. Assumed."""
LINES, COLUMNS = 40, 100
"""Lines and columns of a screen."""
ROWS = 8
"""Pieces of time or memory in a table; the smaller ones share a row."""
SMALLEST = 0.005
"""Share of the whole below which a piece gets no row of its own."""
BAR = 30
"""Characters of a bar for the whole."""
OTHERS = "others"
EQUAL = "equal   to the bit: attention without cuDNN; what else that costs is not counted"


@dataclass(frozen=True)
class Money:
    """What cost and loss are computed from; None: the tokens of the recipe's steps, no price, or no ladder."""

    tokens: int | None = None
    price: float | None = None
    ladder: Ladder | None = None

    def of(self, plan: Plan) -> TrainingCost:
        return plan.cost(tokens=self.tokens, price=self.price)

    def loss(self, plan: Plan) -> dict[str, Any] | None:
        """The predicted loss, and the lowest one of other sizes at equal FLOPs; None without a ladder."""
        if self.ladder is None:
            return None
        from recipes.lab.ladder.answer import at_equal_flops  # matplotlib

        fit, model, length = self.ladder.fits[-1][1], plan.recipe.model, plan.recipe.batch.sequence_length
        planned = self.of(plan).tokens
        flops = float(planned) * model.flops_per_token(length, "causal")
        sizes = [at_equal_flops(fit, model, flops, length, 2 ** (half / 2)) for half in range(-6, 7)]
        (size, _, here), (best, tokens, least) = sizes[6], min(sizes, key=lambda size: size[2].loss)
        lowest = {"parameters": best, "tokens": round(tokens), **least._asdict()}
        lowest["at_edge"] = best in (sizes[0][0], sizes[-1][0])
        beyond = {"ladder": Path(self.ladder.recipe).stem, "beyond_largest_rung": size / self.ladder.parameters}
        beyond["beyond_longest_run"] = planned / self.ladder.tokens
        return {**here._asdict(), **beyond, "lowest_at_equal_flops": lowest}


def screen(plan: Plan, money: Money, *, mark: str = "#") -> list[str]:
    """Lines for one plan. mark: the character that bars are made of."""
    above = [
        *about(plan.recipe, plan.world, plan.time),
        *layout(plan),
        "",
        *answers(plan),
        *_loads(plan),
        *_copies(plan),
        *costs(plan, money),
        "",
        *_time(plan, mark),
        "",
        *_messages(plan),
    ]
    below = f"next: --plan --search looks for a recipe that {'is faster' if plan.fits else 'fits'}"
    left = LINES - len(above) - len(["head of memory", "", below])
    return [*above, *memory_table(plan.memory, mark, rows=min(ROWS, left)), "", below]


def about(recipe: Recipe, world: World, time: StepTime | None, *, number: str = "") -> list[str]:
    """What is planned, on what, and how sure its time is. number: replaces the line about the number of GPUs."""
    by = f"calibrated {world.rates.calibrated}" if world.rates.calibrated else "not calibrated (--calibrated-by FILE)"
    nodes = "1 node" if world.nodes == 1 else f"{world.nodes:,} nodes"
    model = recipe.model
    assumed = world.rates.assumed
    active = f", {in_units(model.active_params())} active" if model.experts else ""
    lines = [
        f"{recipe.run.name}: {model.name}, {in_units(model.num_params())} parameters{active}; all predicted",
        "",
        f"device  {world.gpu.name} with {world.gpu.memory / 1e9:.1f} GB ({world.kind_from})",
        number or f"number  {world.processes:,} in {nodes} ({world.number_from})",
        *([EQUAL] if recipe.run.deterministic else []),
        *([f"rates   {by}; ranges {off_by(time.spread)} to both sides ({time.evidence})"] if time else []),
        *([f"assumed all-to-all is {' and '.join(sorted(assumed))}, which this program's is not"] if assumed else []),
    ]
    return [part for line in lines for part in wrap(line, COLUMNS, subsequent_indent=" " * 8) or [""]]


def off_by(spread: float) -> str:
    """How far times may be off: a share, or where it is large a factor."""
    return f"{spread:.0%}" if spread < 0.5 else f"a factor of {1 + spread:.2g}"


def layout(plan: Plan) -> list[str]:
    """How the processes share the batch."""
    batch = plan.recipe.batch
    return [
        f"mesh    {plan.degrees}",
        f"batch   {batch.global_batch_size:,} x {batch.sequence_length:,} tokens = {batch.divided(plan.degrees)}",
    ]


def answers(plan: Plan) -> list[str]:
    """Whether the recipe fits, and how fast it is."""
    time, (shortest, longest) = plan.time, plan.range
    share = f"MFU {plan.mfu('causal'):.1%} (causal attention), {plan.mfu('full'):.1%} (full)"
    return [
        memory_line(plan.memory, plan.world.gpu),
        f"speed   {number(time.tokens_per_second)} tokens/s per GPU ({number(time.tokens / longest)} to"
        f" {number(time.tokens / shortest)}), {number(time.tokens_per_second * plan.degrees.processes)} in all",
        f"step    {seconds(time.step_seconds)} ({between(seconds(shortest), seconds(longest))}); {share}",
    ]


def _loads(plan: Plan) -> list[str]:
    """What a process has whose experts compute more rows than others."""
    if (worst := unequal(plan)) is None:
        return []
    speed, fits = number(worst.time.tokens_per_second), "" if worst.fits else " (DOES NOT FIT)"
    peak = f"{worst.memory.peak / 1e9:.1f} GB{fits}"
    load = f"assumed equal; {IMBALANCE} x the mean on one process"
    return [f"loads   {load}: {peak}, {speed} tokens/s per GPU"]


def _copies(plan: Plan) -> list[str]:
    """What checkpoint.memory_every takes of the host: two steps of this process and of another."""
    settings, pieces = plan.recipe.checkpoint, plan.memory.pieces
    if not settings.memory_every:
        return []
    most = 4 * (pieces["parameters"] + pieces.get("moments", 0)) * plan.degrees.processes / plan.world.nodes
    return [f"copies  at most {most / 1e9:.1f} GB of {settings.memory_folder} on each node"]


def unequal(equal: Plan) -> Plan | None:
    """The plan where one process has IMBALANCE times the mean load; None if experts are not divided."""
    if equal.degrees.expert == 1:
        return None
    return plan(equal.recipe, replace(equal.world, rates=replace(equal.world.rates, imbalance=IMBALANCE)))


def costs(plan: Plan, money: Money) -> list[str]:
    """How long it takes, and what it costs."""
    cost, (shortest, longest) = money.of(plan), (end / plan.time.step_seconds for end in plan.range)
    paid = "" if cost.money is None else f": {number(cost.money)} at {money.price:g} each"
    return [
        f"time    {in_units(cost.tokens)} tokens in {duration(cost.days)}"
        f" ({between(duration(cost.days * shortest), duration(cost.days * longest))})",
        f"cost    {number(cost.gpu_hours)} GPU-hours{paid}",
        *([] if (loss := money.loss(plan)) is None else _loss(loss)),
    ]


def _loss(predicted: dict[str, Any]) -> list[str]:
    """The loss that a ladder predicts, and the size with the lowest one."""
    best, interval = predicted["lowest_at_equal_flops"], f"{predicted['low']:.3f} to {predicted['high']:.3f}"
    size = f"{in_units(best['parameters'])} parameters (without embeddings) and {in_units(best['tokens'])} tokens"
    size += ", at the edge of the sizes tried" if best["at_edge"] else ""
    lines = (
        f"loss    {predicted['loss']:.3f} ({interval}), {number(predicted['beyond_largest_rung'])}x the largest rung,"
        f" {number(predicted['beyond_longest_run'])}x the longest run of the ladder {predicted['ladder']}",
        f"        at the same cost, {best['loss']:.3f} with {size}",
    )
    return [part for line in lines for part in wrap(line, COLUMNS, subsequent_indent=" " * 8)]


def memory_line(memory: Prediction, gpu: Gpu) -> str:
    """The peak, and whether it fits."""
    share, held = memory.peak / gpu.memory, memory.reserved / gpu.memory
    verdict = f"fits ({held:.0%})" if share <= FULL else f"DOES NOT FIT ({share:.1%} > {FULL:.0%})"
    fullest = f"fullest at {memory.fullest}{memory.where}"
    return f"memory  {memory.peak / 1e9:.1f} of {gpu.memory / 1e9:.1f} GB, {verdict}; {fullest}"


def _time(plan: Plan, mark: str) -> list[str]:
    """What computes, by piece, and the messages that nothing hides, as one."""
    computing = {name: amount for name, amount in plan.time.seconds.items() if not name.startswith(MESSAGES)}
    rows = _largest(computing, ROWS) | ({"messages not hidden": plan.exposed} if plan.exposed else {})
    whole = plan.time.step_seconds
    head = f"{'where the time goes':<28}{'of a step':>10}{'share':>8}"
    return [head, *(_row(name, seconds(amount), amount / whole, mark) for name, amount in rows.items())]


def _messages(plan: Plan) -> list[str]:
    """How long messages take by axis and place, and how much of it computation hides."""
    exposed, hidden = plan.time.seconds, plan.time.hidden
    names = [name for name in dict.fromkeys([*exposed, *hidden]) if name.startswith(MESSAGES)]
    rows = [
        f"{name.removeprefix(MESSAGES):<28}{seconds(hidden.get(name, 0) + exposed.get(name, 0)):>10}"
        f"{seconds(hidden.get(name, 0)):>10}{seconds(exposed.get(name, 0)):>12}"
        f"{exposed.get(name, 0) / plan.time.step_seconds:>8.1%}"
        for name in names
    ]
    return [f"{'messages':<28}{'in all':>10}{'hidden':>10}{'not hidden':>12}{'share':>8}", *rows, ""] if rows else []


def memory_table(memory: Prediction, mark: str, *, rows: int) -> list[str]:
    """The pieces at the fullest moment."""
    whole, pieces = memory.peak, {name: float(amount) for name, amount in memory.pieces.items()}
    head = f"{'memory at that moment':<28}{'GB':>10}{'share':>8}"
    shown = _largest(pieces, rows).items()
    return [head, *(_row(name, f"{amount / 1e9:.2f}", amount / whole, mark) for name, amount in shown)]


def _row(name: str, amount: str, share: float, mark: str) -> str:
    return f"{name:<28}{amount:>10}{share:>8.1%}  {mark * round(share * BAR)}".rstrip()


def _largest(pieces: dict[str, float], rows: int) -> dict[str, float]:
    """The largest first; the smallest, and those beyond so many, as one."""
    ordered = sorted(((amount, name) for name, amount in pieces.items() if amount), reverse=True)
    large = [(amount, name) for amount, name in ordered if amount >= SMALLEST * sum(pieces.values())]
    kept = ordered if len(ordered) - len(large) <= 1 and len(ordered) <= rows else large[: rows - 1]
    shown = {name: amount for amount, name in kept}
    rest = sum(amount for amount, name in ordered if name not in shown)
    return {**shown, OTHERS: rest} if rest else shown


HEADS = {"GPUs": 7, "batch": 8, "micro": 6, "tokens/s/GPU": 13, "step": 9, "waits": 7, "GB": 9, "time": 12}
"""Columns of a table of several sizes: head -> width."""


def sizes_screen(recipe: Recipe, plans: Sequence[Plan], money: Money) -> list[str]:
    """One line for each number of GPUs, below what they share, above what it means."""
    first, in_node = plans[0], max(plan.world.gpu.per_node for plan in plans)
    heads = [f"{head:>{width}}" for head, width in (*HEADS.items(), ("GPU-hours", 12), ("cost", 13))]
    priced = money.price is not None
    lines = [
        *about(recipe, first.world, first.time, number=f"number  as below, up to {in_node} in a node"),
        f"tokens  {in_units(money.of(first).tokens)}" + (f", at {money.price:g} for a GPU and hour" if priced else ""),
        "",
        "".join(heads if priced else heads[:-1]),
        *("".join(_cells(recipe, plan, money)).rstrip() for plan in plans),
        "",
        "waits: the share of a step in which a GPU waits for messages",
    ]
    if any(not plan.fits for plan in plans):
        lines.append("!: does not fit the memory of the GPU; --plan --search --processes N looks for what does")
    if any(plan.recipe.batch != recipe.batch for plan in plans):
        asked = f"{recipe.batch.global_batch_size:,} in micro-batches of {recipe.batch.micro_batch_size:,}"
        lines.append(f"*: the recipe's {asked} cannot be divided like that; the nearest that can")
    return lines


def _cells(recipe: Recipe, plan: Plan, money: Money) -> Iterator[str]:
    """The columns of one number of GPUs."""
    cost, batch = money.of(plan), plan.recipe.batch
    changed = "*" if batch.global_batch_size != recipe.batch.global_batch_size else " "
    smaller = "*" if batch.micro_batch_size != recipe.batch.micro_batch_size else " "
    values = [
        f"{plan.world.processes:,}",
        f"{batch.global_batch_size:,}{changed}",
        f"{batch.micro_batch_size}{smaller}",
        number(plan.time.tokens_per_second),
        seconds(plan.time.step_seconds),
        f"{plan.exposed / plan.time.step_seconds:.1%}",
        f"{plan.memory.peak / 1e9:.1f}{' ' if plan.fits else '!'}",
        duration(cost.days),
    ]
    yield from (f"{value:>{width}}" for value, width in zip(values, HEADS.values(), strict=True))
    yield f"{number(cost.gpu_hours):>12}"
    yield "" if cost.money is None else f"{number(cost.money):>13}"


def number(amount: float) -> str:
    """The number with three digits or all before the point, such as "24,130" or "0.0123"."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def between(low: str, high: str) -> str:
    """The range of two amounts; the unit once if both have the same, as in "5.4 to 7.9 s"."""
    amount, _, unit = low.partition(" ")
    return f"{amount if high.endswith(f' {unit}') else low} to {high}"


def in_units(tokens: int) -> str:
    """The number of tokens with a unit, such as "10.5 B"."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if tokens >= scale:
            return f"{tokens / scale:.4g} {unit}"
    return f"{tokens:,}"


def seconds(amount: float) -> str:
    """The time with a unit, such as "5.43 s" or "812 ms"."""
    return f"{number(amount)} s" if amount >= 1 else f"{number(amount * 1e3)} ms"


def duration(days: float) -> str:
    """The time with a unit, such as "23.4 days" or "15.1 hours"."""
    for unit, scale, least in (("days", 1, 2), ("hours", 24, 1 / 24), ("minutes", 24 * 60, 1 / 24 / 60)):
        if days >= least:
            return f"{number(days * scale)} {unit}"
    return f"{number(days * DAY)} seconds"


@dataclass(frozen=True)
class StagePlan:
    """One stage, what it will need, and what its cost is computed from."""

    stage: Stage
    plan: Plan
    money: Money

    @property
    def cost(self) -> TrainingCost:
        """The cost of all its steps."""
        return self.money.of(self.plan)


def plans_of_stages(recipe: Recipe, world: World, money: Money) -> list[StagePlan]:
    """A plan for each stage. Raises UserError for a number of tokens, which the steps of stages say."""
    if money.tokens is not None:
        raise UserError("--tokens: the stages of this recipe say how many each takes; change their until instead")
    return [
        StagePlan(stage, plan(stage.recipe, world), replace(money, tokens=tokens_of(stage)))
        for stage in stages_of(recipe)
    ]


def stages_screen(recipe: Recipe, stages: Sequence[StagePlan]) -> list[str]:
    """Lines for all stages and their sum."""
    lines = about(recipe, stages[0].plan.world, stages[0].plan.time)
    for planned in stages:
        stage = planned.stage
        lines += ["", f"stage {stage.name}: steps {stage.first + 1:,} to {stage.last:,}", *layout(planned.plan)]
        lines += [*answers(planned.plan), *costs(planned.plan, planned.money)]
    total, price = cost_of_all(stages), stages[0].money.price
    paid = "" if total.money is None else f": {number(total.money)} at {price:g} each"
    return [
        *lines,
        "",
        f"all stages: {in_units(total.tokens)} tokens in {duration(total.days)},"
        f" {number(total.gpu_hours)} GPU-hours{paid}",
    ]


def cost_of_all(stages: Sequence[StagePlan]) -> TrainingCost:
    costs, price = [planned.cost for planned in stages], stages[0].money.price
    hours = sum(cost.gpu_hours for cost in costs)
    paid = None if price is None else price * hours
    return TrainingCost(sum(cost.tokens for cost in costs), sum(cost.days for cost in costs), hours, paid)
