"""Rules of weights to start from, and of a config.json that defines the model. Imports no torch."""

from collections.abc import Collection, Iterator

from models.config import FROM_CONFIG, FROM_WEIGHTS, ModelConfig
from recipes.files.layout import CHECKPOINTS
from recipes.recipe.fields import Violation, refusal_of, toml
from recipes.weights.description import differences, upcycling_problems
from recipes.weights.locate import InitialWeights


def weights_fit(model: ModelConfig, initial: InitialWeights, *, written: Collection[str]) -> Iterator[Violation]:
    """The weights to start from are intact and have the shape of this model.

    Only rope_theta may differ, if the recipe writes a larger one itself: that is how a context is extended.
    """
    if not model.weights:
        return
    if refused := refusal_of(lambda: initial.found.is_checkpoint or initial.found.stored_tensors):
        yield "model.weights", refused
        return
    weights = initial.found
    if weights.model.by_transformers and not model.by_transformers:
        remedy = f'write name = "{FROM_WEIGHTS}"'
        yield "model.name", f"is a size of our decoder, but {weights.path} holds a model of transformers; {remedy}"
        return
    stored, is_own = initial.outside_of_stages(), weights.path.parent == initial.run_folder / CHECKPOINTS
    if model.upcycle and not is_own:  # of this run, they have been upcycled already
        yield from ((f"model.{field}", message) for field, message in upcycling_problems(model, stored))
    for field, theirs in differences(model, stored):
        remedy = 'write that, or omit it and write name = "from_weights"'
        if field == "rope_theta":
            if "model.rope_theta" in written and model.rope_theta > theirs:
                continue
            remedy += ", or a larger value to extend the context"
        elif field == "experts" and not theirs and not is_own:
            remedy += ", or upcycle = true, which starts each expert as the dense feed-forward"
        yield f"model.{field}", f"is {toml(theirs)} in the weights of {weights.path}; {remedy}"


def config_fits(model: ModelConfig, initial: InitialWeights, *, written: Collection[str]) -> Iterator[Violation]:
    """model.config is read, and is still what the run's checkpoints were trained with."""
    if not model.config or model.name != FROM_CONFIG or model.weights:
        return
    if refusal_of(lambda: initial.configured) or refusal_of(initial.model):
        return  # a resumed run needs it no more; otherwise loading has reported it
    now, trained = initial.configured, initial.model()
    if type(now) is not type(trained):
        yield "model.config", "is another model than that of the run's checkpoints; restore it, or change run.name"
        return
    changed = [(key, theirs) for key, theirs in differences(now, trained) if f"model.{key}" not in written]
    if changed:
        then = ", ".join(f"{key} = {theirs!r}" for key, theirs in changed)
        yield "model.config", f"the run's checkpoints were trained with {then}; restore that, or change run.name"
