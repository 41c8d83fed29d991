"""What a run makes of its model: losses on held-out text, also of averaged weights; at its end, a sample and files."""

from collections.abc import Callable, Sequence

from parallel.dist import on_main
from recipes.evaluation.losses import mean_loss
from recipes.files.layout import EXPORT
from recipes.training.build_run import Run
from recipes.training.run_folder import own_checkpoint

SAMPLES = 6
"""Of a run, about: each token of one is a forward pass, and a run may validate a thousand times."""


def validate(run: Run) -> dict[str, float]:
    """Record the losses of this step, also of its average with the checkpoints before if its stage has enough.

    Returns those of its own weights, by the names of the texts.
    """
    losses, built, step, recipe = _losses(run), run.built, run.process.clock.step, run.stage.recipe
    every, count = recipe.checkpoint.every, recipe.validation.average
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
    before, steps = step - recipe.validation.every, recipe.run.steps
    if step < steps and SAMPLES * step // steps > SAMPLES * before // steps:
        _sample(run)
    return losses


def _losses(run: Run, averaged: Sequence[int] = ()) -> dict[str, float]:
    losses, clock = dict[str, float](), run.process.clock
    for name, text in run.loader.validation_batches(run.stage.recipe.validation.batches).items():
        losses[name] = mean_loss(run.built.model, clock.with_progress(text), mesh=run.built.mesh)
        run.recorder.log_validation(clock.step, name, losses[name], averaged=averaged)
    return losses


def _sample(run: Run) -> None:
    """Write a sample to the log, if the recipe asks for one."""
    recipe, device = run.stage.recipe, run.process.world.device
    if count := recipe.validation.sample_tokens:
        from recipes.evaluation.evaluate import show_sample

        model, seed, log = run.built.model, recipe.run.seed, run.process.console.log
        show_sample(model, run.loader, recipe.batch, count, device=device, seed=seed, log=log)


def write_results(run: Run, *, saved: bool, write_report: Callable[[], None]) -> None:
    """Write a sample to the log and the weights to files, if the recipe asks for them. All processes must call it.

    saved: whether the last checkpoint is, of which weights are exported.
    """
    recipe, world = run.stage.recipe, run.process.world
    _sample(run)
    if recipe.checkpoint.export_hf and saved:
        write_report()  # its curve goes with the export
        from recipes.weights.convert import export_checkpoint

        checkpoint = own_checkpoint(recipe, recipe.run.steps)
        on_main(world, lambda: export_checkpoint(checkpoint, recipe.run.folder / EXPORT, replace=True))
