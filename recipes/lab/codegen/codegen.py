"""What torch.compile generates for an H100, counted without one: `bench.py --suite codegen`.

For the first block of a recipe, and for its loss: bytes kept for the backward pass, kernels, bytes moved by kernels
that are neither matrix products nor attention, and whether ptxas accepts each kernel. An H200 gets the same code.
Imports no torch.
"""

import argparse
import csv
import json
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import groupby, product
from pathlib import Path
from typing import Any

from models.sizes import SIZES
from parallel.config import ActivationCheckpointingConfig
from parallel.errors import UserError
from recipes.files.markdown import markdown_table
from recipes.lab.sweep.runner import exit_code_of
from recipes.recipe.conflicts import conflicts
from recipes.recipe.load import CONFIGS, load, read_toml, shown
from recipes.recipe.rules_shares import tokens_divide
from recipes.recipe.schema import Recipe

PAGE = CONFIGS.parent / "docs/benchmarks/codegen.md"
ALL_ROWS = CONFIGS.parent / "docs/benchmarks/codegen.csv"
SHOWN = "smollm3_3b, 1 x 8192 tokens, attention: cudnn"
"""The block that the page shows."""
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Peak bytes per second of the SXM modules (NVIDIA's data sheets)."""
REACHED = 0.9
"""The share of the peak that is assumed for kernels that only move memory."""
FLOAT8 = (("none", False), ("tensorwise", False), ("tensorwise", True), ("rowwise", False))
"""float8.recipe and float8.all_gather."""
CHECKPOINTING = ("none", "selective", "full")
COLUMNS = (
    *("float8", "recompute", "saved kB", "weights kB", "fused", "products", "attention", "other", "moved GB"),
    *("H100 us", "H200 us", "ptxas"),
)
COLUMNS_OF_PAGE = ("float8", "recompute", "saved kB", "fused", "moved GB", "H100 us", "H200 us")
Row = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Print a table, and write all counts to --out; returns the exit code, 1 where ptxas refuses a kernel."""
    parser = argparse.ArgumentParser(
        prog="bench.py --suite codegen",
        description=__doc__.removesuffix("Imports no torch.\n"),
        epilog="Further options, such as --float8.recipe tensorwise, go to the recipe or recipes.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--recipe", type=Path, help="count each kind of its blocks; default: all, with each float8 and checkpointing"
    )
    parser.add_argument("--no-ptxas", action="store_true", help="only count")
    parser.add_argument("--no-loss", action="store_true", help="only blocks")
    parser.add_argument("--out", type=Path, help="JSON file for all counts, with every saved tensor and kernel")
    parser.add_argument("--write-docs", action="store_true", help=f"write {shown(PAGE)} and {shown(ALL_ROWS)}")
    options, overrides = parser.parse_known_args(arguments)
    return exit_code_of(lambda: _run(options, overrides), interrupted="interrupted; nothing was written")


def _run(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.recipe and options.write_docs:
        raise UserError("--write-docs writes the tables of all recipes; leave out --recipe")
    varied = [word for word in overrides if word.partition("=")[0] in variant("", False, "")[::2]]
    if varied and not options.recipe:
        raise UserError(f"{varied[0]}: without --recipe, every kind is counted; name a recipe to choose one")
    if options.out and not os.access(options.out.parent, os.W_OK):  # before minutes of counting
        raise UserError(f"{options.out.parent} is not a writable folder; write another --out")
    cases = [(options.recipe, overrides)] if options.recipe else list(_all_cases(overrides))
    loaded = [(path, load(path, changes, rules=False)) for path, changes in cases]
    for path, recipe in loaded:
        _require_countable(path, recipe)
    recipes = [(path, kind) for path, recipe in loaded for kind in _kinds_of_block(recipe)]
    found = _count(recipes, assemble=not options.no_ptxas, loss=not options.no_loss)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.write_docs:
        PAGE.write_text(page(found), encoding="utf-8")
        write_all_rows(found["rows"])
    return int(any(row["refused"] for row in [*found["rows"], *found["losses"]]))


def _all_cases(overrides: list[str]) -> Iterator[tuple[Path, list[str]]]:
    """Each different block that a GPU holds whole, with each kind of float8 and of checkpointing."""
    seen = set()
    for path in sorted([*(CONFIGS / "benchmarks").glob("*.toml"), *CONFIGS.glob("*.toml")]):
        if not path.stem.startswith(tuple(SIZES)) or _needs_weights(path):  # a model of transformers, or not here
            continue
        recipe = load(path, overrides, rules=False)
        if not recipe.compile.enabled or recipe.run.device != "cuda" or not _is_whole(recipe):
            continue
        if (key := shape_of(recipe)) in seen:
            continue
        seen.add(key)
        for (float8, gathered), mode in product(FLOAT8, CHECKPOINTING):
            yield path, [*overrides, *variant(float8, gathered, mode)]


def _needs_weights(path: Path) -> bool:
    """Whether only the weights of a recipe say how large its model is."""
    return read_toml(path).get("model", {}).get("name") == "from_weights"


def _is_whole(recipe: Recipe) -> bool:
    return recipe.mesh.tensor * recipe.mesh.context * recipe.mesh.expert == 1


def variant(float8: str, gathered: bool, mode: str) -> list[str]:
    """Overrides of a recipe."""
    weights = ["--float8.recipe", float8, "--float8.all_gather", str(gathered).lower()]
    return [*weights, "--activation_checkpointing.mode", mode, "--activation_checkpointing.blocks", "all"]


def _kinds_of_block(recipe: Recipe) -> list[Recipe]:
    """The recipe; where only a part of the blocks recomputes, as if all did, and as if none did."""
    checkpointing, layers = recipe.activation_checkpointing, recipe.model.layers
    if len(checkpointing.recomputed(layers)) in (0, layers):
        return [recipe]
    kinds = (replace(checkpointing, blocks="all"), ActivationCheckpointingConfig("none"))
    return [replace(recipe, activation_checkpointing=kind) for kind in kinds]


def shape_of(recipe: Recipe) -> str:
    """Model, micro-batch and attention, on which a block's code depends besides float8 and checkpointing."""
    batch = recipe.batch
    attention = "documents" if recipe.data.document_mask else recipe.attention.backend
    return f"{recipe.model.name}, {batch.micro_batch_size} x {batch.sequence_length} tokens, attention: {attention}"


def _require_countable(path: Path, recipe: Recipe) -> None:
    """Raise UserError for a recipe whose code cannot be known here."""
    reasons = {
        "compile.enabled = false: nothing is generated; add --compile.enabled true": not recipe.compile.enabled,
        "compile.autotune chooses kernels by timing them on a GPU; write false": recipe.compile.autotune,
        "float8.emulate generates other code than a GPU runs; write false": recipe.float8.emulate,
        "fsdp.param_dtype = float32: attention then uses kernels that are not counted; write bfloat16": (
            recipe.fsdp.param_dtype == "float32"
        ),
        "mesh: only blocks that one process holds whole are counted; write tensor = 1 and context = 1": (
            not _is_whole(recipe)
        ),
        'attention.backend = "math" is made of products that are not counted as attention; write "cudnn" or "flash"': (
            recipe.attention.backend == "math" and not recipe.data.document_mask
        ),
    }
    rules = [*conflicts(recipe, "activation_checkpointing.blocks", "float8.all_gather")]
    rules += [*tokens_divide(recipe.batch, mesh=recipe.mesh, float8=recipe.float8)]
    wrong = [reason for reason, applies in reasons.items() if applies] + [f"{key} {rule}" for key, rule in rules]
    if wrong:
        raise UserError("\n  ".join([f"{shown(path)} cannot be counted:", *wrong]))


def _count(recipes: list[tuple[Path, Recipe]], *, assemble: bool, loss: bool) -> dict[str, Any]:
    """Print a row for each recipe as soon as it is counted; all of them, and the loss of each shape."""
    from recipes.lab.codegen.machine import pretend_h100

    warnings.filterwarnings("ignore")  # of torch and torchao, to their own developers
    pretend_h100()
    begin = time.monotonic()
    rows: list[Row] = []
    losses: list[Row] = []
    for shape, group in groupby(recipes, key=lambda pair: shape_of(pair[1])):
        members = list(group)
        print(f"\n{shape} ({shown(members[0][0])})", flush=True)
        if loss:
            losses.append(_loss(members[0][1], assemble=assemble))
            print(_loss_line(losses[-1]), flush=True)
        print(_line(COLUMNS))
        for path, recipe in members:
            rows.append(block_row(path, recipe, assemble=assemble))
            print(_line(_cells(rows[-1])), flush=True)
            for name, error in rows[-1]["refused"].items():
                print(f"{name}: {error}", flush=True)
    packages = {name: version(name) for name in ("torch", "torchao", "triton")}
    return {"packages": packages, "seconds": time.monotonic() - begin, "rows": rows, "losses": losses}


def block_row(path: Path, recipe: Recipe, *, assemble: bool) -> Row:
    """All counts of the recipe's first block. Call machine.pretend_h100() first."""
    from recipes.lab.codegen import count
    from recipes.lab.codegen.trace import trace_block

    begin = time.monotonic()
    traced = trace_block(recipe)
    saved = count.saved_tensors(traced)
    passes = {"forward": traced.forward.code, "backward": traced.backward.code}
    codes = {name: count.read_code(code) for name, code in passes.items()}
    verdicts = {name: count.assemble(code) for name, code in passes.items()} if assemble else {}
    moved = sum(sum(code.moved.values()) for code in codes.values())
    by_kind: Counter[str] = Counter()
    for tensor in saved:
        by_kind[tensor.kind] += tensor.bytes
    return {
        "recipe": shown(path),
        "shape": shape_of(recipe),
        "layers": recipe.model.layers,
        "tokens": traced.tokens,
        "float8": recipe.float8.recipe + (", gathered" if recipe.float8.all_gather else ""),
        "activation_checkpointing": recipe.activation_checkpointing.mode,
        "saved_bytes_per_token": by_kind["activation"] / traced.tokens,
        "saved_bytes_of_weights": by_kind["weights"],
        "moved_bytes": moved,
        "calls": dict(sum((Counter(code.calls) for code in codes.values()), Counter())),
        "random_states": sum(code.random_states for code in codes.values()),
        "microseconds_per_token": {
            device: moved * recipe.model.layers / traced.tokens / (REACHED * peak) * 1e6
            for device, peak in BANDWIDTH.items()
        },
        "kernels": sum(map(len, verdicts.values())),
        "refused": {
            f"{where}, {name}": error for where, found in verdicts.items() for name, error in found.items() if error
        },
        "saved": [asdict(tensor) for tensor in saved],
        "passes": {name: asdict(code) for name, code in codes.items()},
        "seconds": time.monotonic() - begin,
    }


def _loss(recipe: Recipe, *, assemble: bool) -> Row:
    from recipes.lab.codegen.loss import compiled_loss, eager_bytes

    logits = recipe.batch.micro_batch_size * recipe.batch.sequence_length * recipe.model.vocabulary
    compiled = compiled_loss(recipe, with_ptxas=assemble)
    return {
        "shape": shape_of(recipe),
        "chunks": recipe.batch.loss_chunks,
        "logits": logits,
        "eager_bytes_per_logit": eager_bytes(recipe) / logits,
        "compiled_bytes_per_logit": compiled.bytes / logits,
        "kernels_of_a_chunk": compiled.kernels,
        "verdicts": compiled.verdicts,
        "refused": {name: error for name, error in compiled.verdicts.items() if error},
    }


def _loss_line(row: Row) -> str:
    assembled = f"{len(row['verdicts']) - len(row['refused'])} of {len(row['verdicts'])}"
    return (
        f"loss (loss_chunks = {row['chunks']}): {row['compiled_bytes_per_logit']:.2f} bytes a logit"
        f" in {row['kernels_of_a_chunk']} kernels a chunk, ptxas {assembled if row['verdicts'] else 'not asked'};"
        f" eager {row['eager_bytes_per_logit']:.1f}"
    )


def _line(cells: Iterable[str]) -> str:
    """A line for the screen, with the first cell wide enough for each kind of float8."""
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, (20, *[11] * len(COLUMNS)), strict=False))


def _cells(row: Row) -> list[str]:
    calls = row["calls"]
    assembled = f"{row['kernels'] - len(row['refused'])} of {row['kernels']}" if row["kernels"] else "not asked"
    return [
        row["float8"],
        row["activation_checkpointing"],
        f"{row['saved_bytes_per_token'] / 1e3:.2f}",
        f"{row['saved_bytes_of_weights'] / 1e3:.0f}",
        *(str(calls.get(kind, 0)) for kind in ("fused", "product", "attention", "other")),
        f"{row['moved_bytes'] / 1e9:.3f}",
        *(f"{row['microseconds_per_token'][device]:.2f}" for device in BANDWIDTH),
        assembled,
    ]


HEAD = """\
# The code that torch.compile generates for an H100, counted without one

    python scripts/bench.py --suite codegen --write-docs

writes this page and [codegen.csv](codegen.csv), which has every block of the recipes. It needs no GPU, but a C++
compiler and Triton (`pip install --no-deps triton==VERSION`). `--recipe R` counts the blocks of one recipe, with
overrides such as `--float8.recipe tensorwise`; `--out FILE` writes every saved tensor and every kernel. **Nothing here
was measured on a GPU**: bytes and kernels are read off the generated code, and times are computed from the bytes.

A block with rotary embeddings is traced on the CPU for one micro-batch, with the operators that an H100 would call.
It then moves to a pretended GPU, for which Inductor generates kernels. Recipes with `mesh.tensor` or `mesh.context` are
left out, because no GPU holds their blocks whole.

- **saved kB**: kept for the backward pass, per token and layer, without parameters, cosines and sines. **weights kB**
  (in the file): what is computed from parameters alone and kept, such as float8 copies.
- **gathered**: weights arrive in float8 (`float8.all_gather`); else they are cast inside the block.
- **fused** (in the file also products, attention and other): kernels launched, forward and backward. Fused ones are
  Inductor's, in Triton.
- **moved GB**: what the fused kernels read and write. Each tensor counts once for each kernel.
- **H100 us, H200 us**: the time for that, per token and for all layers, at REACHED of PEAKS TB/s. What FSDP2 gathers
  and casts, optimizer and loss come on top.
- **ptxas** (in the file): Triton kernels that ptxas turned into code for sm_90, in all configurations that Inductor
  would try.
- **loss**: forward and backward, from logits to their gradient; eager bytes are counted operator by operator.
"""


def page(found: dict[str, Any]) -> str:
    """The block that is shown, as Markdown."""
    peaks = " and ".join(f"{peak / 1e12:g}" for peak in BANDWIDTH.values())
    facts = {"VERSION": found["packages"]["triton"], "REACHED": f"{REACHED:.0%}", "PEAKS": peaks}
    lines = [re.sub("VERSION|REACHED|PEAKS", lambda match: facts[match[0]], HEAD)]
    names = ", ".join(f"{name} {number}" for name, number in found["packages"].items())
    lines += [f"Generated by {names}, in {found['seconds'] / 60:.0f} minutes on a CPU.", "", f"## {SHOWN}", ""]
    lines += [f"{_loss_line(row)}.\n" for row in found["losses"] if row["shape"] == SHOWN]
    rows = [dict(zip(COLUMNS, _cells(row), strict=True)) for row in found["rows"] if row["shape"] == SHOWN]
    cells = [[row[column] for column in COLUMNS_OF_PAGE] for row in rows]
    lines += markdown_table(COLUMNS_OF_PAGE, cells, align="ll" + "r" * (len(COLUMNS_OF_PAGE) - 2))
    return "\n".join([*lines, ""])


def write_all_rows(rows: list[Row]) -> None:
    """Write the counts of all blocks, as a table for spreadsheets."""
    with ALL_ROWS.open("w", encoding="utf-8", newline="") as file:
        cells = ([row["shape"], row["recipe"], *_cells(row)] for row in rows)
        csv.writer(file, lineterminator="\n").writerows([("block", "recipe", *COLUMNS), *cells])


def read_all_rows() -> list[dict[str, str]]:
    """The counts of all blocks as they were written: column -> cell."""
    with ALL_ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
