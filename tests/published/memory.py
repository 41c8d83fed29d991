"""The predicted memory of other programs' runs beside what they published.

Each row of the table that has a memory is stated as a recipe, and then what its program does otherwise. The programs'
sources, of the weeks of the measurements, say what. Imports no torch.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from textwrap import wrap
from typing import Any

from models.sizes import SIZES
from parallel.config import (
    ActivationCheckpointingConfig,
    CompileConfig,
    Float8Config,
    FSDPConfig,
    MeshConfig,
    MeshDegrees,
)
from recipes.data.config import BatchConfig
from recipes.files.markdown import markdown_table
from recipes.plan.memory import predict
from recipes.plan.sizes import Pieces, Sizes
from recipes.recipe.schema import Recipe
from tests.published.rows import Published

AT = "the gradient of the logits"
"""The moment at which all of them are the fullest: a loss that is not chunked has several copies of the logits."""
NUMBERS = {
    **{"layers": "layers", "width": "hidden", "heads": "heads", "key_value_heads": "kv_heads"},
    **{"feed_forward_width": "ffn", "vocabulary": "vocab"},
}
"""Field of a model -> the column of the table that has it."""
GOAL = 0.05
"""Largest error of a compiled row with one axis and a known loss."""


@dataclass(frozen=True)
class Program:
    """What a program does otherwise. All keep embedding and head gathered, in one unit of FSDP with the last norm."""

    per_logit: int
    """Bytes of all that its loss makes of one logit, at the fullest moment."""
    parameters: int = 4
    """Bytes of each parameter."""
    moments: int = 8
    """Bytes of both moments of each parameter."""
    known: bool = True
    """Whether its loss and its batch are known."""
    whole_logits: bool = False
    """Whether each process of a tensor group gathers all logits."""
    keeps_last: bool = True
    """Whether the last block is not resharded after the forward pass."""
    one_graph: bool = False
    """Whether torch.compile makes one graph without FSDP, fullest at its end because no gradient leaves it before."""


TITAN_2024 = Program(16)
"""torchtitan's train.py says that compiling the loss caused errors. Logits in float32, log-softmax and gradients: 12
bytes live at once; it publishes what the allocator had reserved, and the rows say 16."""
TITAN_2025 = Program(4)
"""A compiled loss: the logits and their gradient, in bfloat16."""
OLDER = replace(TITAN_2024, known=False)
KEMPNER = Program(8, parameters=2, moments=4, whole_logits=True, keeps_last=False, one_graph=True)
"""Everything in bfloat16: logits, log-softmax, two gradients. It publishes what was allocated, in units of 2**30."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    program: Program
    recipe: Recipe
    degrees: MeshDegrees
    second_products: bool
    """Whether it recomputes what torchtitan's "selective" does: every second product is kept."""
    measured: float
    """Bytes."""

    @property
    def counts(self) -> bool:
        """Whether the goal is about it."""
        axes = sum(degree > 1 for degree in (self.degrees.shard, self.degrees.context, self.degrees.tensor))
        return axes <= 1 and self.recipe.compile.enabled and self.program.known

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return peak_of(self) / self.measured - 1


def rows_with_memory(published: Iterable[Published]) -> tuple[list[Row], int]:
    """The rows with a memory that a recipe can state, and how many it cannot: those with pipeline stages."""
    rows = [row for row in published if row.line["memory_gib"]]
    stated = [_row(row) for row in rows if row.line["pp"] == "1"]
    return stated, len(rows) - len(stated)


def _row(published: Published) -> Row:
    row = published.line
    degrees = MeshDegrees(
        replicate=int(row["replicate"]), shard=int(row["shard"]), context=int(row["cp"]), tensor=int(row["tp"])
    )
    batch = BatchConfig(
        sequence_length=int(row["seq"]),
        micro_batch_size=int(row["micro_batch"]),
        global_batch_size=int(row["micro_batch"]) * int(row["accum"]) * degrees.data_parallel,
    )
    second = row["ac"] == "selective_op2"
    numbers: dict[str, Any] = {field: int(row[column]) for field, column in NUMBERS.items()}
    recipe = Recipe(
        model=replace(
            SIZES["llama3_8b"],
            **numbers,
            head_width=int(row["hidden"]) // int(row["heads"]),
            tied_embeddings=row["tied"] == "1",
        ),
        batch=batch,
        mesh=MeshConfig(context=degrees.context, tensor=degrees.tensor, context_by="gather"),
        activation_checkpointing=ActivationCheckpointingConfig(mode="selective" if second else row["ac"]),  # type: ignore[arg-type]
        compile=CompileConfig(enabled=row["compile"] == "1"),
        float8=Float8Config(
            recipe="tensorwise" if row["float8"].startswith("tensorwise") else "none",
            all_gather=row["float8"].endswith("fp8ag"),
        ),
        fsdp=FSDPConfig(reshard_after_forward=True),
    )
    how = "compiled" if recipe.compile.enabled else "eager"
    recompute = "every second product" if second else row["ac"]
    name = f"{published.project}: {published.name}, {how}, {recompute}"
    return Row(name, _program(row), recipe, degrees, second, float(row["memory_gib"]) * 2**30)


def _program(row: Mapping[str, str]) -> Program:
    if row["framework"].startswith("KempnerForge"):
        return KEMPNER
    if "float8nocompile" in row["source"]:
        return OLDER
    return TITAN_2025 if "pytorch/ao" in row["source"] else TITAN_2024


def peak_of(row: Row) -> int:
    """Bytes, without the CUDA context."""
    size, program = Sizes(row.recipe, row.degrees), row.program
    at_loss = sum(_at_loss(row, size).values())
    if size.shards > 1 or not program.one_graph:
        return at_loss
    gradients = program.parameters * (2 if size.accumulates else 1)  # new ones, beside those that are added up
    states = (program.parameters + program.moments + gradients) * size.state["parameters"] // 4
    return max(at_loss, states + 2 * size.element * _logits(row, size))  # the caller holds them and their gradient


def _logits(row: Row, size: Sizes) -> int:
    """Number of logits that a process has."""
    model = row.recipe.model
    return size.tokens * model.vocabulary // (1 if row.program.whole_logits else row.degrees.tensor)


def _at_loss(row: Row, size: Sizes) -> Pieces:
    """What is predicted to live at the gradient of the logits."""
    program, parameters = row.program, size.state["parameters"] // 4
    pieces = dict(predict(row.recipe, row.degrees, context=False).moments[AT])
    pieces["parameters"], pieces["moments"] = program.parameters * parameters, program.moments * parameters
    pieces["logits"], pieces["loss"] = program.per_logit * _logits(row, size), 0
    if size.shards > 1:
        pieces["gathered weights"] += size.element * size.table.whole
        pieces["gathered weights"] += size.gathered_block if program.keeps_last else 0
    elif program.one_graph:
        pieces |= {"gathered weights": 0, "gathering": 0}
        pieces["accumulated gradients"] = program.parameters * parameters if size.accumulates else 0
    if row.second_products:
        kept = size.widths.stream * (1 if row.recipe.compile.enabled else 2)
        kept += 2 * size.widths.query + size.widths.key + size.widths.inner
        per_token = size.element * kept + 4 * size.widths.heads - size.saved[1]
        pieces["activations"] += round(row.recipe.model.layers * size.tokens * per_token)
    return pieces


def memory_table(published: Iterable[Published], *, least: float = 0.0) -> Iterator[str]:
    """Markdown: the largest errors first. least: the least error that is shown."""
    rows, pipelines = rows_with_memory(published)
    counted = [abs(row.error) for row in rows if row.counts]
    met = sum(error <= GOAL for error in counted)
    all_errors = median(abs(row.error) for row in rows)
    summary = (
        f"Compiled, at most one axis, a known loss: {met} of {len(counted)} rows are within {GOAL:.0%}; median"
        f" {median(counted):.1%}, largest {max(counted):.1%}. All {len(rows)} rows that a recipe can state: median"
        f" {all_errors:.1%}. The other {pipelines} have pipeline stages."
        + (f" Errors above {least:.0%}:" if least else "")
    )
    yield from wrap(summary, 120)
    yield ""
    yield from markdown_table(
        ("run", "GiB published", "predicted", "error"),
        [
            (
                f"{row.name}{'' if row.counts else ' *'}",
                f"{row.measured / 2**30:.1f}",
                f"{peak_of(row) / 2**30:.1f}",
                f"{row.error:+.1%}",
            )
            for row in sorted(rows, key=lambda row: -abs(row.error))
            if abs(row.error) >= least
        ],
    )
    yield ""
    yield "\\* several axes, eager, or a loss or a batch that is only assumed."
