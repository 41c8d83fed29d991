"""Small recipes of the shape of a large one, for a ladder that predicts its loss.

Width, heads and depth of a rung shrink together, by the cube root of the parameters. Learning rate and batch follow
Bhagia et al. 2024 (arXiv 2412.04403, after Porian et al., arXiv 2406.19146): rate ~ N^(-1/3), sequences ~ N^(2/3), N
without embeddings. Warm-up and decay keep their shares of a run; text, vocabulary and length stay as they are.
Imports no torch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import gcd, log
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from parallel.config import ActivationCheckpointingConfig, Float8Config, MeshConfig, PipelineConfig
from parallel.errors import UserError
from recipes.checkpoint.config import CheckpointConfig
from recipes.metrics.config import ProfileConfig
from recipes.optimization.config import OptimizerConfig
from recipes.recipe.load import shown
from recipes.recipe.schema import Recipe

UNIT = 8
"""Widths are multiples of it."""
FINE = 64
"""Widths of heads up to this are only even: else they would be too far from their share."""
LARGEST, SMALLEST = 1 / 8, 1 / 256
"""Shares of the recipe's parameters that the rungs have unless they are named."""
WINDOWS = 4
"""Validations of a trunk up to the branch of its shortest run."""
MOST_DECAY = 0.9
"""Of a run: with a longer decay, no trunk is worth sharing."""


@dataclass(frozen=True)
class Rung:
    """A small model."""

    name: str
    model: ModelConfig

    @property
    def parameters(self) -> int:
        return self.model.non_embedding_params()


@dataclass(frozen=True)
class Budget:
    """A run of some tokens, as the ordinary runs that it consists of."""

    rung: Rung
    seed: int
    recipes: tuple[Recipe, ...]
    """A trunk and the fork that ends it, or one run; each is trained to its run.steps unless `steps` is less."""
    steps: int
    tries: float = 0.0
    """The multiple of the rung's learning rate that this run only tries; 0: it is a run of the law."""

    @property
    def tokens(self) -> int:
        batch = self.recipes[-1].batch
        return self.steps * batch.global_batch_size * batch.sequence_length

    @property
    def flops(self) -> float:
        return float(self.tokens) * self.rung.model.flops_per_token(self.recipes[-1].batch.sequence_length, "causal")


def scaled(model: ModelConfig, parameters: int) -> ModelConfig:
    """A model of about so many parameters without embeddings, of the same shape as this one."""
    factor = (parameters / model.non_embedding_params()) ** (1 / 3)
    layers = max(1, round(model.layers * factor))
    key_value_heads = max(1, round(model.key_value_heads * factor))
    heads = key_value_heads * (model.heads // model.key_value_heads)

    def of_width(width: int) -> ModelConfig:
        share = width / model.width
        head_width = model.head_width * model.heads * share / heads
        unit = UNIT if head_width > FINE else 2  # some kernels of attention want multiples of 8
        head_width = unit * max(1, round(head_width / unit))
        return replace(
            model.shortened(layers),
            name="custom",
            config="",
            width=width,
            heads=heads,
            key_value_heads=key_value_heads,
            head_width=head_width,
            feed_forward_width=max(UNIT, UNIT * round(model.feed_forward_width * share / UNIT)),
            expert_width=max(UNIT, UNIT * round(model.expert_width * share / UNIT)) if model.experts else 1,
            dense_layers=min(round(model.dense_layers * factor), layers - 1),
            attention_scale_width=head_width if model.attention_scale_width else 0,
        )

    near = round(model.width * factor / UNIT)
    widths = [UNIT * number for number in range(max(1, near // 3), 3 * near + 3)]
    return min(map(of_width, widths), key=lambda candidate: abs(log(candidate.non_embedding_params() / parameters)))


def require_scalable(recipe: Recipe, path: Path) -> None:
    """Raises UserError if no ladder can be made of this recipe."""
    problem = ""
    if recipe.model.by_transformers:
        problem = "is a model of transformers, whose shape is not ours to scale; name a size of models/sizes.py"
    elif part := recipe.model.uncounted():
        problem = f"has model.{part}, which does not say its costs, so the FLOPs of rungs are not known"
    elif recipe.model.attention == "latent":
        problem = 'has model.attention = "latent", whose latents no rule of ours makes smaller'
    elif recipe.model.weights or recipe.run.continue_from:
        problem = 'continues from trained weights, but rungs start at random; write model.weights = ""'
    elif recipe.stages:
        problem = "has stages, but a ladder predicts one text and length; write those of one stage as a recipe"
    elif recipe.schedule.steps:
        problem = f"ends before its schedule (schedule.steps = {recipe.schedule.steps}), and rungs do not; write 0"
    elif not (recipe.data.validation_fraction or recipe.validation.source or recipe.validation.sources):
        problem = "has no text to validate on; write data.validation_fraction or validation.source"
    if problem:
        raise UserError(f"{shown(path)} {problem}")


def rung_sizes(recipe: Recipe, rungs: int) -> list[int]:
    """Parameters of so many rungs, in equal ratios, the smallest first."""
    parameters, ratio = recipe.model.non_embedding_params(), LARGEST / SMALLEST
    return [round(parameters * SMALLEST * ratio ** (number / max(1, rungs - 1))) for number in range(rungs)]


def budgets(
    recipe: Recipe,
    parameters: Sequence[int],
    *,
    folder: Path,
    tokens: Sequence[float],
    per_parameter: bool,
    seeds: int,
    rates: Collection[float] = (),
    factor: float = 1.0,
    processes: int = 1,
) -> list[Budget]:
    """The runs of a ladder: those that try rates, then all others, those of a rung and seed one after another.

    Args:
        recipe: the large run.
        parameters: of each rung, without embeddings.
        folder: of the ladder.
        tokens: of each run of a rung, ascending; per_parameter: times its parameters.
        seeds: of every rung: the recipe's and those that follow it.
        rates: factors of the learning rate that three of the rungs try on their shortest run.
        factor: of the learning rate of all other runs.
        processes: which share a batch.
    Raises:
        UserError: two rungs come out as the same model.
    """
    models = [scaled(recipe.model, size) for size in parameters]
    counts = [model.non_embedding_params() / 1e6 for model in models]
    names = [f"{count:.3g}M" if count < 1000 else f"{count / 1000:.3g}B" for count in counts]
    if len({*names}) < len(names):
        raise UserError(f"two of the rungs {list(parameters)} come out as {', '.join(names)}; name fewer, or others")
    rungs = [Rung(name, model) for name, model in zip(names, models, strict=True)]
    tried = {rungs[0].name, rungs[len(rungs) // 2].name, rungs[-1].name} if rates else set()
    trials, runs = [], []
    for rung in rungs:
        small = _of_rung(recipe, rung, folder=folder, processes=processes)
        sequence = small.batch.global_batch_size * small.batch.sequence_length
        steps = [max(WINDOWS, round(one * (rung.parameters if per_parameter else 1) / sequence)) for one in tokens]
        if len(set(steps)) < len(steps):
            raise UserError(
                f"two lengths of rung {rung.name} come out as {steps} steps; write lengths that differ more"
            )
        for tries in sorted(rates) if rung.name in tried else ():
            other = replace(small, optimizer=_with_rate(small.optimizer, tries))
            (one,) = _of_seed(other, rung, recipe.run.seed, steps[:1], large=recipe, forks=False)
            run = replace(one.recipes[0].run, name=f"{one.recipes[0].run.name}-rate{tries:g}")
            trials.append(replace(one, recipes=(replace(one.recipes[0], run=run),), tries=tries))
        small = replace(small, optimizer=_with_rate(small.optimizer, factor))
        for seed in range(recipe.run.seed, recipe.run.seed + seeds):
            runs += _of_seed(small, rung, seed, steps, large=recipe)
    return trials + runs


def _of_rung(recipe: Recipe, rung: Rung, *, folder: Path, processes: int) -> Recipe:
    """What all runs of a rung share."""
    ratio = rung.parameters / recipe.model.non_embedding_params()
    asked = recipe.batch.global_batch_size * ratio ** (2 / 3)
    micro = min(recipe.batch.micro_batch_size, max(1, round(asked / processes)))
    sequences = max(1, round(asked / micro / processes)) * micro * processes
    batches = -(-recipe.validation.batches * recipe.batch.global_batch_size // sequences)  # the same text
    return replace(
        recipe,
        run=replace(recipe.run, output=str(folder / "runs"), continue_from="", hardware=""),
        model=rung.model,
        batch=replace(recipe.batch, global_batch_size=sequences, micro_batch_size=micro),
        mesh=MeshConfig(),
        pipeline=PipelineConfig(),
        float8=Float8Config(),
        activation_checkpointing=ActivationCheckpointingConfig(),
        optimizer=_with_rate(recipe.optimizer, ratio ** (-1 / 3)),
        checkpoint=CheckpointConfig(keep=1),
        validation=replace(recipe.validation, batches=batches, sample_tokens=0, tasks=(), average=0, ladder=""),
        profile=ProfileConfig(),
    )


def _of_seed(
    small: Recipe, rung: Rung, seed: int, steps: Sequence[int], *, large: Recipe, forks: bool = True
) -> list[Budget]:
    """The runs of a rung with one seed: the trunk of a constant rate, and a fork that decays for each length. Where the
    rate falls all the time, or without forks, a whole run for each."""
    schedule, total = large.schedule, large.run.steps
    warmup, decay = (one / total for one in schedule.phases(total))
    decay = decay if schedule.kind == "wsd" else 0.0

    def run(name: str, length: int, kind: Any, *, warm: int, cool: int, every: int, keep: int, start: str) -> Recipe:
        run = replace(small.run, name=f"{rung.name}-seed{seed}{name}", seed=seed, steps=length, continue_from=start)
        return replace(
            small,
            run=run,
            schedule=replace(schedule, kind=kind, warmup_steps=warm, decay_steps=cool),
            checkpoint=replace(small.checkpoint, every=keep or every, keep_every=keep),
            validation=replace(small.validation, every=every),
        )

    runs = []
    if not forks or schedule.kind not in ("wsd", "constant") or decay > MOST_DECAY:
        for end in steps:
            warm, cool, every = round(warmup * end), round(decay * end), -(-end // WINDOWS)
            name = f"-{end}steps"
            whole = run(name, end, schedule.kind, warm=warm, cool=cool, every=every, keep=0, start="")
            runs.append(Budget(rung, seed, (whole,), end))
        return runs
    every = max(1, round(steps[0] * (1 - decay) / WINDOWS))
    branches = [every * max(1, round(one * (1 - decay) / every)) for one in steps]
    warm, keep = round(warmup * steps[0]), gcd(*branches)
    trunk = run("", branches[-1], "constant", warm=warm, cool=0, every=every, keep=keep, start="")
    for branch in branches:
        cool = round(branch * decay / (1 - decay))
        end, start = branch + cool, f"{trunk.run.folder}@{branch}"
        fork = run(f"-{end}steps", end, "wsd", warm=warm, cool=cool, every=every, keep=keep, start=start)
        runs.append(Budget(rung, seed, (trunk, fork) if cool else (trunk,), end))
    return runs


def _with_rate(optimizer: OptimizerConfig, factor: float) -> OptimizerConfig:
    return replace(optimizer, lr=optimizer.lr * factor, matrix_lr=optimizer.matrix_lr * factor)
