"""Predict the time of a training step on a GPU that is not there: `bench.py --suite step_time`.

Prints the pieces of a step and tokens per second, by the model of recipes/bench/step_model.py. Nothing is measured.
Imports no torch.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError
from recipes.bench import step_model
from recipes.bench.codegen import BANDWIDTH, REACHED, variant
from recipes.bench.codegen import PAGE as CODEGEN
from recipes.bench.step_model import PIECES, Block, Code, Prediction, predict, read_blocks
from recipes.load import CONFIGS, load, shown
from recipes.schema import Recipe
from recipes.sweep.runner import exit_code_of

PAGE = CONFIGS.parent / "docs/benchmarks/step.md"
BEGIN = "<!-- Written by scripts/bench.py --suite step_time --write-docs. -->\n"
END = "<!-- Written by scripts/bench.py --suite step_time --write-docs: end. -->\n"
BASE = CONFIGS / "benchmarks/smollm3_3b_h100.toml"
BEFORE_PAGE = """\
## llama3_8b, 1 x 8192 tokens, attention: cudnn
; loss, eager (loss_chunks = 8): 50.0 bytes a logit; compiled, without chunks: 6.0.
| float8 | recompute | saved kB | fused | products | attention | other | moved GB |
| none | none | 147.59 | 17 | 21 | 2 | 0 | 4.413 |
| none | selective | 94.34 | 20 | 21 | 2 | 0 | 5.094 |
| tensorwise | none | 94.34 | 77 | 21 | 2 | 0 | 8.542 |
| tensorwise | selective | 94.34 | 78 | 21 | 2 | 0 | 9.054 |
| tensorwise, gathered | none | 94.34 | 63 | 21 | 2 | 0 | 7.233 |
| tensorwise, gathered | selective | 94.34 | 64 | 21 | 2 | 0 | 7.746 |
| rowwise | none | 94.34 | 75 | 21 | 2 | 0 | 10.954 |
## smollm3_3b, 1 x 8192 tokens, attention: cudnn
; loss, eager (loss_chunks = 8): 50.0 bytes a logit; compiled, without chunks: 6.0.
| float8 | recompute | saved kB | fused | products | attention | other | moved GB |
| none | none | 96.84 | 17 | 21 | 2 | 0 | 2.718 |
| none | selective | 62.53 | 20 | 21 | 2 | 0 | 3.127 |
| tensorwise | none | 62.54 | 77 | 21 | 2 | 0 | 4.850 |
| tensorwise | selective | 62.53 | 78 | 21 | 2 | 0 | 5.112 |
| tensorwise, gathered | none | 62.54 | 63 | 21 | 2 | 0 | 4.382 |
| tensorwise, gathered | selective | 62.53 | 64 | 21 | 2 | 0 | 4.643 |
| rowwise | none | 62.54 | 75 | 21 | 2 | 0 | 6.391 |
"""
"""Rows of docs/benchmarks/codegen.md at commit f849f01, the state that predictions are compared with."""
PUBLISHED = (
    # run, tokens/s per GPU, (float8.recipe, float8.all_gather)
    ("NVIDIA NeMo 25.02.01, Llama-3.1-8B, bf16, 8 H100 (dgxc-benchmarking v25.04)", 10_682, ("none", False)),
    ("Megatron-Bridge 25.11, Llama-3-8B, float8 per tensor, 8 H100", 14_451, ("tensorwise", True)),
)


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
        recompute = self.recompute_now if number >= 5 else self.recompute
        gathered = self.float8 != "none" and number >= 6
        micro_batch = self.micro_batch_now if number >= 7 else 1
        words = ["--model.name", self.model, "--optimizer.state_dtype", self.moments]
        words += variant(self.float8, gathered, recompute)
        words += ["--fsdp.reshard_after_forward", "true" if number < 1 else "false"]
        words += [
            "--batch.micro_batch_size",
            str(micro_batch),
            "--batch.global_batch_size",
            "8" if number < 8 else "32",
        ]
        return load(BASE, words)


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
    "one process copies neither weights nor gradients twice",
    "the blocks' generated code of today",
    "nothing recomputed where that keeps as much",
    "weights cast to float8 once per step (float8.all_gather)",
    "two sequences per micro-batch",
    "262k tokens per step instead of 65k",
)
"""In the order in which the page adds them; Goal.recipe() and code_with() know their numbers, from 1."""


def main(arguments: list[str]) -> int:
    """Print predictions. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench.py --suite step_time",
        description=__doc__.removesuffix("Imports no torch.\n"),
        epilog="Further options, such as --fsdp.reshard_after_forward false, go to the recipe.",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", type=Path, help="predict this one; default: the goals, before and after")
    parser.add_argument("--device", choices=list(BANDWIDTH), default="H200", help="%(default)s unless given")
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
    recipe = load(options.recipe, overrides, processes=options.processes)
    found = predict(recipe, code_with(len(CHANGES)), device=options.device, processes=options.processes)
    print(f"{shown(options.recipe)} on {options.processes} x {options.device}, predicted, not measured")
    for piece, seconds in found.seconds.items():
        share = seconds / found.step_seconds
        print(f"{piece:20}{1e3 * seconds:10.1f} ms{1e6 * seconds / found.tokens:10.2f} us per token{share:8.1%}")
    print(f"{'step':20}{1e3 * found.step_seconds:10.1f} ms, {found.tokens_per_second:,.0f} tokens/s per GPU")
    return 0


def code_with(number: int) -> Code:
    """The code with the first `number` of CHANGES."""
    page = CODEGEN.read_text(encoding="utf-8") if number >= 4 else BEFORE_PAGE
    return Code(read_blocks(page), compiled_loss=number >= 2, copies=number < 3)


def with_tables(text: str) -> str:
    """The page with new tables between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{shown(PAGE)} has lost its marks"
    return before + BEGIN + "\n" + tables() + "\n" + END + after


def tables() -> str:
    """All predictions, as Markdown."""
    numbers = range(len(CHANGES) + 1)
    by_goal = [[predict(goal.recipe(number), code_with(number), device="H200") for number in numbers] for goal in GOALS]
    parts = [_speeds(by_goal), _pieces(by_goal), _blocks(), _published(), _rates()]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]


def _speeds(by_goal: Sequence[Sequence[Prediction]]) -> Iterator[str]:
    yield from ("### Tokens per second", "")
    yield from _head("one H200, sequence 8192, predicted tokens/s", *(goal.title for goal in GOALS))
    for number, name in enumerate(("commit f849f01", *(f"+ {change}" for change in CHANGES))):
        cells = [f"{found[number].tokens_per_second:,.0f}" for found in by_goal]
        changed = [not number or found[number] != found[number - 1] for found in by_goal]
        shown_cells = (cell if differs else "" for cell, differs in zip(cells, changed, strict=True))
        yield f"| {name} | {' | '.join(shown_cells)} |"
    yield f"| **predicted now** | {' | '.join(f'**{found[-1].tokens_per_second:,.0f}**' for found in by_goal)} |"
    yield f"| goal | {' | '.join(f'{goal.target:,}' for goal in GOALS)} |"
    shares = (found[-1].tokens_per_second / goal.target for found, goal in zip(by_goal, GOALS, strict=True))
    yield f"| predicted now / goal | {' | '.join(f'{share:.2f}' for share in shares)} |"
    yield "| measured | " + " | ".join("not measured" for _ in GOALS) + " |"


def _pieces(by_goal: Sequence[Sequence[Prediction]]) -> Iterator[str]:
    yield from ("### Where the time goes", "")
    yield from _head("predicted us per token, f849f01 -> now", *(goal.title for goal in GOALS))
    for piece in PIECES:
        ends = [[1e6 * found[end].seconds[piece] / found[end].tokens for end in (0, -1)] for found in by_goal]
        if any(map(any, ends)):
            yield f"| {piece} | {' | '.join(f'{before:.2f} -> {now:.2f}' for before, now in ends)} |"
    steps = [[1e6 / found[end].tokens_per_second for end in (0, -1)] for found in by_goal]
    yield f"| all | {' | '.join(f'{before:.2f} -> {now:.2f}' for before, now in steps)} |"


def _blocks() -> Iterator[str]:
    """The generated code of one block before and now, for rows that both pages have."""
    yield from ("### Generated code of one block, 8192 tokens, read off, f849f01 -> now", "")
    yield from _head("model, float8, recompute", "saved kB per token", "moved GB", "kernels")
    now = read_blocks(CODEGEN.read_text(encoding="utf-8"))
    for before in read_blocks(BEFORE_PAGE):
        if after := _same(before, now):
            numbers = (
                f"{before.saved_kb:.2f} -> {after.saved_kb:.2f}",
                f"{before.moved / 1e9:.3f} -> {after.moved / 1e9:.3f}",
                f"{before.kernels} -> {after.kernels}",
            )
            yield f"| {before.model}, {before.float8}, {before.recompute} | {' | '.join(numbers)} |"


def _same(block: Block, others: Sequence[Block]) -> Block | None:
    """The row of the same block in another page."""
    place = (block.model, block.tokens, block.float8, block.recompute)
    return next((row for row in others if (row.model, row.tokens, row.float8, row.recompute) == place), None)


def _published() -> Iterator[str]:
    """The same model for what others have measured with their programs, whose code is not ours."""
    yield from ("### The model against published runs of other programs", "")
    yield from _head("run", "published tokens/s per GPU", "predicted for ours", "ratio")
    path = CONFIGS / "benchmarks/llama3_8b_8xh100.toml"
    for who, rate, (float8, gathered) in PUBLISHED:
        words = [
            *variant(float8, gathered, "none"),
            "--batch.global_batch_size",
            "128",
            "--batch.micro_batch_size",
            "1",
        ]
        recipe = load(path, words, rules=False)
        found = predict(recipe, code_with(len(CHANGES)), device="H100", processes=8).tokens_per_second
        yield f"| {who} | {rate:,} | {found:,.0f} | {found / rate:.2f} |"


def _rates() -> Iterator[str]:
    peaks = ", ".join(
        f"{kind} {step_model.PRODUCTS[kind] * step_model.PEAK * (1 + (kind == 'float8')) / 1e12:,.0f}"
        for kind in step_model.PRODUCTS
    )
    forward, backward = (rate / 1e12 for rate in step_model.ATTENTION["cudnn"])
    flash = " and ".join(f"{rate / 1e12:.0f}" for rate in step_model.ATTENTION["flash"])
    bandwidth = " and ".join(f"{peak / 1e12:g} ({device})" for device, peak in BANDWIDTH.items())
    yield f"Assumed rates: matrix products {peaks} TFLOP/s; cuDNN attention {forward:.0f} forward, {backward:.0f}"
    yield f"backward (FlashAttention 2: {flash}); {REACHED:.0%} of {bandwidth} TB/s; {1e6 * step_model.GAP:g} us"
    yield "between kernels."
