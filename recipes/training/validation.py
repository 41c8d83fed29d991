"""The losses of a validation: of the weights, and of their average with the checkpoints before."""

from collections.abc import Sequence

from recipes.evaluation.losses import mean_loss
from recipes.training.build_run import Run


def validate(run: Run) -> dict[str, float]:
    """Record the losses of this step. Returns those of the weights, by the names of the texts."""
    losses = _losses(run)
    if run.recipe.validation.average:
        _validate_average(run)
    return losses


def _losses(run: Run, averaged: Sequence[int] = ()) -> dict[str, float]:
    losses, clock = dict[str, float](), run.process.clock
    for name, text in run.loader.validation_batches(run.recipe.validation.batches).items():
        losses[name] = mean_loss(run.built.model, clock.with_progress(text), mesh=run.built.mesh)
        run.recorder.log_validation(clock.step, name, losses[name], averaged=averaged)
    return losses


def _validate_average(run: Run) -> None:
    """Record the losses of the average of this step's weights and the checkpoints before, once there are enough."""
    from recipes.checkpoint.average import averaged

    every, count, step = run.recipe.checkpoint.every, run.recipe.validation.average, run.process.clock.step
    others = range(every, step, every)[1 - count :]
    if run.checkpoints is None or len(others) < count - 1:
        return
    run.checkpoints.finish()
    built, paths = run.built, [run.checkpoints.path(other) for other in others]
    with averaged(built.model, built.optimizer, paths, float8_all_gather=built.float8_all_gather) as problem:
        if problem:
            run.process.console.log(f"step {step:>6}  NOT AVERAGED: {problem}")
        else:
            _losses(run, averaged=[*others, step])
