"""The losses of a validation: of the weights, and of their average with the checkpoints before."""

from collections.abc import Sequence

from recipes.evaluation.losses import mean_loss
from recipes.training.build_run import Run


def validate(run: Run) -> dict[str, float]:
    """Record the losses of this step, also of its average with the checkpoints before if its stage has enough.

    Returns those of its own weights, by the names of the texts.
    """
    losses, built, step = _losses(run), run.built, run.process.clock.step
    every, count = run.recipe.checkpoint.every, run.recipe.validation.average
    others = [other for other in range(every, step, every)[1 - count :] if other > run.stage.first] if count else []
    if run.checkpoints and len(others) == count - 1:
        from recipes.checkpoint.average import averaged

        run.checkpoints.finish()
        paths = [run.checkpoints.path(other) for other in others]
        with averaged(built.model, built.optimizer, paths, float8_all_gather=built.float8_all_gather) as problem:
            if problem:
                run.process.console.log(f"step {step:>6}  NOT AVERAGED: {problem}")
            else:
                _losses(run, averaged=[*others, step])
    return losses


def _losses(run: Run, averaged: Sequence[int] = ()) -> dict[str, float]:
    losses, clock = dict[str, float](), run.process.clock
    for name, text in run.loader.validation_batches(run.recipe.validation.batches).items():
        losses[name] = mean_loss(run.built.model, clock.with_progress(text), mesh=run.built.mesh)
        run.recorder.log_validation(clock.step, name, losses[name], averaged=averaged)
    return losses
