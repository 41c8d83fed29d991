"""Rules about routed experts and the axis that divides them, and about the stages of a pipeline. Imports no torch."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version

from parallel.errors import listed
from recipes.recipe.conflicts import conflicts
from recipes.recipe.fields import Violation
from recipes.recipe.rules_mesh import enough_micro_batches, mesh_fits
from recipes.recipe.schema import Recipe


def experts_can_run(recipe: Recipe, *, processes: int | None, nodes: int | None) -> Iterator[Violation]:
    """What holds for a model with experts, and for a mesh that divides them."""
    model, mesh = recipe.model, recipe.mesh
    if model.experts % mesh.expert:
        possible = [
            degree
            for degree in range(1, min(mesh.expert, model.experts + 1))
            if model.experts % degree == 0
            and not any(mesh_fits(replace(mesh, expert=degree), processes=processes, nodes=nodes))
        ]
        rule = f"{mesh.expert} processes cannot share model.experts = {model.experts} equally"
        yield "mesh.expert", f"{rule}; write {listed(possible or [1], last='or')}"
    narrow = {field for field, *_ in model.uneven_rows("float32")}
    for field, rule, width in model.uneven_rows(recipe.fsdp.param_dtype):
        remedy = f"write {width}"
        if model.weights:  # the weights say how wide it is: upcycling_problems(), weights_fit()
            remedy = "take other weights" if field in narrow else 'write fsdp.param_dtype = "float32"'
        if field != "expert_width" or not model.upcycle or model.expert_width == model.feed_forward_width:
            yield f"model.{field}", f"{rule}; {remedy}"
    if mesh.expert > 1 or mesh.tensor > 1:
        yield from fsdp_has_several_meshes(recipe, "mesh.expert" if mesh.expert > 1 else "mesh.tensor")


def fsdp_has_several_meshes(recipe: Recipe, axis: str) -> Iterator[Violation]:
    """FSDP shards experts over another mesh than the rest of a block, and then replaces no reduction."""
    if old := older_than(2, 12):
        yield axis, f"in a model with experts {old}; write 1"
    rule = f"does not work in a model with experts and {axis} > 1"
    if recipe.fsdp.reduce_dtype != "float32":
        yield "fsdp.reduce_dtype", f'"{recipe.fsdp.reduce_dtype}" {rule}; write "float32"'
    if recipe.fsdp.symmetric_memory:
        yield "fsdp.symmetric_memory", f"{rule}; write false"


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


def older_than(*release: int) -> str:
    """What is said of a torch that is older than this release, such as (2, 12); "" if the installed one is not."""
    installed = version("torch")
    if tuple(map(int, installed.split(".")[:2])) >= release:
        return ""
    return f"needs torch {'.'.join(map(str, release))} or later, and this is {installed}"
