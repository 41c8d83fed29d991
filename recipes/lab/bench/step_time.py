"""Predict the time of a training step on a GPU that is not there: `bench.py --suite step_time`.

Prints the pieces of a step and tokens per second, by the model of recipes/plan/time.py. Nothing is measured.
Imports no torch.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parallel.config import MeshDegrees
from parallel.errors import UserError
from recipes.files.marks import between
from recipes.lab.codegen.codegen import variant
from recipes.lab.sweep.runner import exit_code_of
from recipes.plan.hardware import GPUS
from recipes.plan.rates import RATES
from recipes.plan.time import StepTime, step_time, time_of
from recipes.plan.work import work_of
from recipes.recipe.load import CONFIGS, load, shown
from recipes.recipe.schema import Recipe

PAGE = CONFIGS.parent / "docs/benchmarks/step.md"
BEGIN = "<!-- Written by scripts/bench.py --suite step_time --write-docs. -->\n"
END = "<!-- Written by scripts/bench.py --suite step_time --write-docs: end. -->\n"
BASE = CONFIGS / "benchmarks/smollm3_3b_h100.toml"
ON = "H200"


@dataclass(frozen=True)
class Goal:
    """Tokens per second to reach on one H200, and the recipe at commit f849f01 as overrides of BASE."""

    title: str
    row: str
    """The row of configs/sweeps/gpu_bench.toml that measures it."""
    target: int
    model: str
    moments: str
    float8: str
    recompute: str
    recompute_now: str
    micro_batch_now: int

    def recipe(self, number: int) -> Recipe:
        """With the first `number` of CHANGES."""
        recompute = self.recompute_now if number >= 3 else self.recompute
        words = ["--model.name", self.model, "--optimizer.state_dtype", self.moments]
        words += variant(self.float8, self.float8 != "none" and number >= 4, recompute)
        words += ["--fsdp.reshard_after_forward", "true" if number < 1 else "false"]
        words += ["--batch.micro_batch_size", str(self.micro_batch_now if number >= 5 else 1)]
        words += ["--batch.global_batch_size", "8" if number < 6 else "32"]
        return load(BASE, words)

    def predicted(self, number: int) -> StepTime:
        """With the first `number` of CHANGES."""
        work = work_of(self.recipe(number), MeshDegrees(1, 1))
        return time_of(replace(work, compiled_loss=number >= 2, clipping=8 if number >= 7 else 12), gpu=GPUS[ON])


GOALS = (
    Goal("SmolLM3-3B bf16", "smollm3_3b_bf16", 27_000, "smollm3_3b", "float32", "none", "none", "none", 2),
    Goal("SmolLM3-3B float8", "smollm3_3b_float8", 35_000, "smollm3_3b", "float32", "tensorwise", "none", "none", 2),
    Goal("Llama-3-8B bf16", "llama3_8b_bf16", 12_400, "llama3_8b", "bfloat16", "none", "selective", "selective", 1),
    Goal(
        "Llama-3-8B float8", "llama3_8b_float8", 17_000, "llama3_8b", "bfloat16", "tensorwise", "selective", "none", 1
    ),
)
CHANGES = (
    "weights gathered once per step (ZeRO-2)",
    "loss compiled",
    "nothing recomputed where that keeps as much",
    "weights cast to float8 once per step (float8.all_gather)",
    "two sequences per micro-batch",
    "262k tokens per step instead of 65k",
    "gradients clipped in the optimizer's kernel",
)
"""In the order in which the page adds them; Goal knows their numbers, from 1."""


def main(arguments: list[str]) -> int:
    """Print predictions. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench.py --suite step_time",
        description=__doc__.removesuffix("Imports no torch.\n"),
        epilog="Further options, such as --fsdp.reshard_after_forward false, go to the recipe.",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", type=Path, help="predict this one; default: the goals, before and after")
    parser.add_argument("--device", choices=list(GPUS), default=ON, help="%(default)s unless given")
    parser.add_argument("--processes", type=int, default=1, help="number of GPUs (%(default)s)")
    parser.add_argument("--write-docs", action="store_true", help=f"write the tables of {shown(PAGE)}")
    options, overrides = parser.parse_known_args(arguments)
    return exit_code_of(lambda: _run(options, overrides), interrupted="interrupted")


def _run(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.recipe is None:
        if overrides:
            raise UserError(f"{overrides[0]}: overrides need a recipe; add --recipe R")
        if options.write_docs:
            PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"written: {shown(PAGE)}" if options.write_docs else tables())
        return 0
    if options.write_docs:
        raise UserError("--write-docs writes the tables of the goals; leave out --recipe")
    if options.processes < 1:
        raise UserError(f"--processes {options.processes}: must be 1 or more")
    gpu = GPUS[options.device]
    recipe = load(options.recipe, overrides, processes=options.processes)
    degrees = recipe.mesh.fit(options.processes, nodes=-(-options.processes // gpu.per_node))
    found = step_time(recipe, degrees, gpu=gpu)
    print(f"{shown(options.recipe)} on {options.processes} x {options.device}, predicted, not measured")
    for piece, seconds in found.seconds.items():
        share = seconds / found.step_seconds
        print(f"{piece:32}{1e3 * seconds:10.1f} ms{1e6 * seconds / found.tokens:10.2f} us per token{share:8.1%}")
    print(f"{'step':32}{1e3 * found.step_seconds:10.1f} ms, {found.tokens_per_second:,.0f} tokens/s per GPU")
    return 0


def with_tables(text: str) -> str:
    """The page with new tables between its marks."""
    return between(text, BEGIN, END, f"\n{tables()}\n")


def tables() -> str:
    """All predictions, as Markdown."""
    by_goal = [[goal.predicted(number) for number in range(len(CHANGES) + 1)] for goal in GOALS]
    return "\n\n".join("\n".join(part) for part in (_speeds(by_goal), _pieces(by_goal), _rates())) + "\n"


def _head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]


def _speeds(by_goal: Sequence[Sequence[StepTime]]) -> Iterator[str]:
    yield from ("### Tokens per second", "")
    yield from _head("one H200, sequence 8192, predicted tokens/s", *(goal.title for goal in GOALS))
    for number, name in enumerate(("the recipes of commit f849f01", *(f"+ {change}" for change in CHANGES))):
        cells = [f"{found[number].tokens_per_second:,.0f}" for found in by_goal]
        changed = [not number or found[number] != found[number - 1] for found in by_goal]
        shown_cells = (cell if differs else "" for cell, differs in zip(cells, changed, strict=True))
        yield f"| {name} | {' | '.join(shown_cells)} |"
    yield f"| **predicted now** | {' | '.join(f'**{found[-1].tokens_per_second:,.0f}**' for found in by_goal)} |"
    yield f"| goal | {' | '.join(f'{goal.target:,}' for goal in GOALS)} |"
    shares = (found[-1].tokens_per_second / goal.target for found, goal in zip(by_goal, GOALS, strict=True))
    yield f"| predicted now / goal | {' | '.join(f'{share:.2f}' for share in shares)} |"
    yield "| measured | " + " | ".join("not measured" for _ in GOALS) + " |"


def _pieces(by_goal: Sequence[Sequence[StepTime]]) -> Iterator[str]:
    yield from ("### Where the time goes", "")
    yield from _head("predicted us per token, recipes of f849f01 -> now", *(goal.title for goal in GOALS))
    for piece in by_goal[0][0].seconds:
        ends = [[1e6 * found[end].seconds[piece] / found[end].tokens for end in (0, -1)] for found in by_goal]
        if any(map(any, ends)):
            yield f"| {piece} | {' | '.join(f'{before:.2f} -> {now:.2f}' for before, now in ends)} |"
    steps = [[1e6 / found[end].tokens_per_second for end in (0, -1)] for found in by_goal]
    yield f"| all | {' | '.join(f'{before:.2f} -> {now:.2f}' for before, now in steps)} |"


def _rates() -> Iterator[str]:
    gpu = GPUS[ON]
    products, attention = (share * gpu.bf16_peak / 1e12 for share in (RATES.share_of(gpu.family), RATES.cudnn))
    yield f"On an {ON} the largest products reach {products:.0f} TFLOP/s in bf16 and"
    yield f"{2 * RATES.float8 * products:,.0f} in float8; cuDNN's attention of long sequences {attention:.0f} forward;"
    yield f"{RATES.moved:.0%} of {gpu.bandwidth / 1e12:g} TB/s; {1e6 * RATES.gap:g} us between kernels. Nine of ten"
    yield "published runs of programs that the model was not fitted to were within"
    yield f"{RATES.spread:.0%} ([plan.md](../plan.md))."
