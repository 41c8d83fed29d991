"""The plan of a model of transformers: its memory and its FLOPs are counted; its time has only a bound.

Imports no torch.
"""

from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any, cast

from models.config import AttentionFlops
from models.transformers_config import TransformersConfig
from parallel.config import MeshDegrees
from parallel.errors import UserError
from recipes.lab.plan.numbers import numbers_of_memory, numbers_of_world
from recipes.lab.plan.options import Options
from recipes.lab.plan.plan import World, degrees_of
from recipes.lab.plan.screen import COLUMNS, ROWS, about, memory_line, memory_table, number, seconds
from recipes.plan.memory import Prediction, predict
from recipes.recipe.schema import Recipe

NOT_TIMED = "is not predicted for models of transformers, whose kernels the plan does not know"


def refuse(options: Options) -> None:
    """Raise UserError for what only a predicted time answers."""
    asked = {
        "--search": options.search,
        "--assume": bool(options.assume),
        "--tokens": options.money.tokens is not None,
        "--price": options.money.price is not None,
    }
    if wrong := [name for name, given in asked.items() if given]:
        raise UserError(f"{wrong[0]}: the time of a step {NOT_TIMED}; leave it out, and --plan shows memory and FLOPs")


@dataclass(frozen=True)
class Counted:
    """Memory and FLOPs of one recipe on one mesh of one kind of GPU."""

    recipe: Recipe
    degrees: MeshDegrees
    world: World
    memory: Prediction
    flops: dict[AttentionFlops, float]
    """FLOPs of a step on all processes, without recomputation, for the longest texts and pairs."""

    @property
    def least_seconds(self) -> float | None:
        """What a step's products take at the rate that large ones reach; None for float32, where none was fitted."""
        gpu, rates = self.world.gpu, self.world.rates
        if self.recipe.fsdp.param_dtype == "float32":
            return None
        peak = gpu.bf16_peak
        if self.recipe.float8.recipe != "none" and gpu.float8_peak:
            peak = rates.float8 * gpu.float8_peak
        return self.flops["causal"] / self.degrees.processes / (rates.share_of(gpu.family) * peak)

    def screen(self, *, mark: str) -> list[str]:
        """Lines for people. mark: the character that bars are made of."""
        recipe, least = self.recipe, self.least_seconds
        model = cast(TransformersConfig, recipe.model)
        upper = "at most " if recipe.data.document_mask or recipe.data.has_pairs else ""
        causal, full = (f"{number(self.flops[kind] / 1e12)} TFLOP" for kind in ("causal", "full"))
        bound = "" if least is None else f"; its products alone take about {seconds(least)} of a step"
        lines = [
            f"model   {model.computed_by}",
            f"mesh    {self.degrees}",
            f"batch   {_batch(recipe)} = {recipe.batch.divided(self.degrees)}",
            memory_line(self.memory, self.world.gpu),
            f"        not counted: {self.memory.not_counted}",
            f"flops   {upper}{causal} per step (causal attention), {full} (full)",
            f"time    {NOT_TIMED}{bound}",
        ]
        wrapped = [part for line in lines for part in wrap(line, COLUMNS, subsequent_indent=" " * 8)]
        return [*about(recipe, self.world, None), *wrapped, "", *memory_table(self.memory, mark, rows=ROWS)]

    def numbers(self) -> dict[str, Any]:
        """The same numbers for scripts, named as in other plans; null where nothing is predicted."""
        at_fullest = replace(self.memory, moments={self.memory.fullest: self.memory.pieces})
        unknown = ("tokens_per_second", "tokens_per_second_per_device", "step_seconds", "mfu", "mfu_full", "cost")
        return {
            "recipe": self.recipe.run.name,
            "parameters": self.recipe.model.num_params(),
            **numbers_of_world(self.recipe, self.world, self.degrees),
            **numbers_of_memory(at_fullest, self.world.gpu),
            "flops_per_step": self.flops["causal"],
            "flops_per_step_full": self.flops["full"],
            "least_step_seconds": self.least_seconds,
            **dict.fromkeys(unknown),
        }


def counted(recipe: Recipe, world: World) -> Counted:
    """Count. Raises UserError for a model that cannot be built or counted."""
    degrees = degrees_of(recipe, world)
    kinds: tuple[AttentionFlops, ...] = ("causal", "full")
    try:
        flops = {kind: _step_flops(recipe, kind) for kind in kinds}
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    return Counted(recipe, degrees, world, predict(recipe, degrees), flops)


def _step_flops(recipe: Recipe, kind: AttentionFlops) -> float:
    from models.counts import Lengths, step_flops

    batch, model, encoder = recipe.batch, cast(TransformersConfig, recipe.model), 0
    decoder = batch.sequence_length
    if model.is_encoder_decoder:
        encoder, decoder = batch.sequence_length, recipe.data.answer_length
    lengths = Lengths(decoder, decoder**2, encoder, encoder**2, encoder * decoder)
    return batch.global_batch_size * step_flops(model, lengths, kind)


def _batch(recipe: Recipe) -> str:
    batch, model = recipe.batch, cast(TransformersConfig, recipe.model)
    if not model.is_encoder_decoder:
        return f"{batch.global_batch_size:,} x {batch.sequence_length:,} tokens"
    return f"{batch.global_batch_size:,} pairs of {batch.sequence_length:,} and {recipe.data.answer_length:,} tokens"
