"""Rules about models that a config.json defines, above all those of transformers. Imports no torch."""

from collections.abc import Collection, Iterator

from models.config import FROM_CONFIG, ModelConfig
from models.transformers_config import TransformersConfig
from recipes.recipe.fields import Violation, refusal_of
from recipes.recipe.schema import Recipe
from recipes.weights.description import differences
from recipes.weights.locate import InitialWeights


def config_fits(model: ModelConfig, initial: InitialWeights | None, *, written: Collection[str]) -> Iterator[Violation]:
    """model.config is read, and is still what the run's checkpoints were trained with."""
    if not model.config or initial is None:
        return
    if model.name != FROM_CONFIG or model.weights:
        other = f'name = "{model.name}"' if model.name != FROM_CONFIG else "model.weights"
        yield "model.config", f'has no effect with {other}; remove it, or write name = "{FROM_CONFIG}" without weights'
        return
    if refusal_of(initial.configured) or refusal_of(initial.model):
        return  # a resumed run needs it no more; otherwise loading has reported it
    now, trained = initial.configured(), initial.model()
    if type(now) is not type(trained):
        yield "model.config", "is another model than that of the run's checkpoints; restore it, or change run.name"
        return
    found = [(key, theirs) for key, theirs in differences(now, trained) if f"model.{key}" not in written]
    if found:
        then = ", ".join(f"{key} = {theirs!r}" for key, theirs in found)
        yield "model.config", f"the run's checkpoints were trained with {then}; restore that, or change run.name"


def transformers_fits(recipe: Recipe) -> Iterator[Violation]:
    """What only our decoder has, and what only models of transformers have."""
    model = recipe.model
    if not isinstance(model, TransformersConfig):
        if model.dropout:
            yield "model.dropout", "our decoder has no dropout; write dropout = false"
        return
    backend, length = recipe.attention.backend, recipe.batch.sequence_length
    if backend == "flash3" or (backend in ("flash", "cudnn") and model.is_encoder_decoder):
        yield "attention.backend", f'this model of transformers cannot use "{backend}"; write "auto" or "math"'
    if recipe.data.document_mask and model.is_encoder_decoder:
        yield "data.document_mask", "is for causal models; an encoder-decoder model pads its pairs; write false"
    if model.positions and length > model.positions:
        yield "batch.sequence_length", f"exceeds the {model.positions} positions of the model; write at most that"
