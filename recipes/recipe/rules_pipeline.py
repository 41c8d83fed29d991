"""Rules about the stages of a pipeline. Imports no torch."""

from collections.abc import Iterator

from recipes.recipe.conflicts import conflicts
from recipes.recipe.fields import Violation
from recipes.recipe.rules_experts import older_than
from recipes.recipe.rules_mesh import enough_micro_batches
from recipes.recipe.schema import Recipe


def stages_can_run(recipe: Recipe, *, processes: int | None, nodes: int | None) -> Iterator[Violation]:
    """The model can be cut into the stages of the schedule, and the batch into their micro-batches."""
    pipeline, degree, model = recipe.pipeline, recipe.mesh.pipeline, recipe.model
    if model.by_transformers:
        from models.tensor_plan import name_of

        name = name_of(model.settings)
        yield "mesh.pipeline", f"{name} of transformers cannot be cut into stages, only our own decoder can; write 1"
        return
    number, layers, split = degree * pipeline.runs, model.layers, pipeline.split
    if any(conflicts(recipe, "pipeline.stages_per_rank")):
        pass  # another number of stages may fit
    elif number > layers:
        stages = f"{degree} x {pipeline.runs} stages" if pipeline.runs > 1 else f"{degree} stages"
        yield "mesh.pipeline", f"{layers} blocks cannot be {stages}; write {max(1, layers // pipeline.runs)} or less"
    elif split and (len(split) != number or sum(split) != layers or min(split) < 1):
        rule = f"must be {number} numbers of 1 or more that add up to model.layers = {layers}"
        yield "pipeline.split", f"{rule}, not {len(split)} that add up to {sum(split)}; [] balances them"
    if not split and (part := model.uncounted(by_plan=True)):
        yield "pipeline.split", f"nothing says what model.{part} costs, to balance stages; write the layers of each"
    if pipeline.splits_backward and (old := older_than(2, 12)):
        # Its torch.autograd.grad() fails behind functions of Python, such as float8's; "zbv" also begins with a message
        # from each process to itself, which gloo did not have.
        yield "pipeline.schedule", f'"{pipeline.schedule}" {old}; write "interleaved"'
    yield from enough_micro_batches(pipeline, mesh=recipe.mesh, batch=recipe.batch, processes=processes, nodes=nodes)
