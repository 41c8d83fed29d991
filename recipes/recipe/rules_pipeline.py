"""Rules about the stages of a pipeline. Imports no torch."""

from collections.abc import Iterator

from parallel.config import PipelineConfig
from recipes.recipe.fields import Violation
from recipes.recipe.rules_experts import older_than
from recipes.recipe.rules_mesh import enough_micro_batches
from recipes.recipe.schema import Recipe


def stages_can_run(recipe: Recipe, *, processes: int | None, nodes: int | None) -> Iterator[Violation]:
    """The model can be cut into the stages of the schedule, and what is around it can be combined with that."""
    if recipe.model.by_transformers:
        from models.tensor_plan import name_of

        name = name_of(recipe.model.settings)
        yield "mesh.pipeline", f"{name} of transformers cannot be cut into stages, only our own decoder can; write 1"
        return
    if found := [*stages_fit(recipe.pipeline, degree=recipe.mesh.pipeline, layers=recipe.model.layers)]:
        yield from found
        return
    yield from backward_can_split(recipe)
    world = {"processes": processes, "nodes": nodes}
    yield from enough_micro_batches(recipe.pipeline, mesh=recipe.mesh, batch=recipe.batch, **world)
    if recipe.float8.sample_every:
        yield "float8.sample_every", "does not work with mesh.pipeline > 1 yet; write 0"


def stages_fit(pipeline: PipelineConfig, *, degree: int, layers: int) -> Iterator[Violation]:
    """Every stage has a block or more, and every process as many stages as the schedule asks for."""
    runs, schedule = pipeline.runs, pipeline.schedule
    if schedule in ("1f1b", "gpipe") and runs != 1:
        rule = f'"{schedule}" has one stage on each process'
        yield "pipeline.stages_per_rank", f'{rule}; write 1, or schedule = "interleaved"'
    elif schedule == "zbv" and runs != 2:
        yield "pipeline.stages_per_rank", '"zbv" has two stages on each process; write 2'
    elif schedule.startswith("interleaved") and runs == 1:
        rule = f'"{schedule}" needs several stages on each process'
        yield "pipeline.stages_per_rank", f'{rule}; write 2 or more, or schedule = "1f1b"'
    elif degree * runs > layers:
        stages = f"{degree} x {runs} stages" if runs > 1 else f"{degree} stages"
        yield "mesh.pipeline", f"{layers} blocks cannot be {stages}; write {max(1, layers // runs)} or less"
    elif (split := pipeline.split) and (len(split) != degree * runs or sum(split) != layers or min(split) < 1):
        rule = f"must be {degree * runs} numbers of 1 or more that add up to model.layers = {layers}"
        yield "pipeline.split", f"{rule}, not {len(split)} that add up to {sum(split)}; [] balances them"


def backward_can_split(recipe: Recipe) -> Iterator[Violation]:
    """Schedules that compute gradients of weights later need the weights and the graph then.

    With resharding, torch 2.11 to 2.13 has lost gradients in silence; with selective checkpointing it fails in the
    first step. Its schedules do not support compiled modules, and do not see that blocks are.
    """
    if not recipe.pipeline.splits_backward:
        return
    if old := older_than(2, 12):
        # Its torch.autograd.grad() fails behind functions of Python, such as float8's; "zbv" also begins with a message
        # from each process to itself, which gloo did not have.
        yield "pipeline.schedule", f'"{recipe.pipeline.schedule}" {old}; write "interleaved"'
    name = f'pipeline.schedule = "{recipe.pipeline.schedule}"'
    remedy = 'or schedule = "interleaved"'
    if recipe.fsdp.reshard_after_forward:
        rule = f"frees weights that {name} still needs for their gradients"
        yield "fsdp.reshard_after_forward", f"{rule}; write false, {remedy}"
    if recipe.compile.enabled:
        yield "compile.enabled", f"{name} cannot split the backward pass of compiled blocks; write false, {remedy}"
    if recipe.activation_checkpointing.mode == "selective":
        rule = f"recomputes blocks once, but {name} needs that twice"
        yield "activation_checkpointing.mode", f'"selective" {rule}; write "none" or "full", {remedy}'
