"""Rules about the axes of the mesh: what processes of a tensor or context group share equally, experts, stages of a
pipeline; and about float8. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version

from models.config import ModelConfig
from models.hf import inside_block, parameter_shapes
from models.registry import PLACES
from parallel.config import Float8Config, MeshConfig
from parallel.errors import listed
from parallel.float8_limits import UNIT, fit, why_not_excluded, why_not_shared
from recipes.data.config import BatchConfig
from recipes.recipe.conflicts import conflicts
from recipes.recipe.fields import Violation
from recipes.recipe.rules_mesh import enough_micro_batches, mesh_fits, why_not_inside
from recipes.recipe.schema import Recipe


def mesh_divides_model(
    mesh: MeshConfig,
    *,
    model: ModelConfig,
    batch: BatchConfig,
    float8: Float8Config,
    processes: int | None,
    nodes: int | None,
) -> Iterator[Violation]:
    """Every process of a tensor or context group has an equal part: of matrices, vocabulary, heads, tokens."""
    tensor, context, sizes = mesh.tensor, mesh.context, like_nodes(processes, nodes)
    if refused := [*transformers_refuse(mesh, model=model)]:
        yield from refused
        return
    rule = why_not_cut(tensor, model=model, float8=float8) or why_not_inside(tensor, sizes)
    if rule:
        possible = [
            replace(mesh, tensor=degree)
            for degree in range(1, min(tensor, model.key_value_heads + 1))
            if not why_not_cut(degree, model=model, float8=float8) and not why_not_inside(degree, sizes)
        ]
        best = [
            other
            for other in possible
            if not (mesh.context_by == "heads" and model.heads // other.tensor % context)
            and not any(mesh_fits(other, processes=processes, nodes=nodes))
        ]
        remedy = f"write {listed([other.tensor for other in best or possible], last='or')}"
        unit = UNIT * tensor  # float8 needs that of a head
        if "model.vocabulary" in rule and not model.weights:
            key = "vocab_size in config.json" if model.by_transformers else "model.vocabulary"
            padded = model.vocabulary + -model.vocabulary % unit
            remedy += f", or {key} = {padded}, with rows that no token has"
        yield "mesh.tensor", f"{rule}; {remedy}"
        return
    heads = model.heads // tensor
    if mesh.context_by == "heads" and heads % context:
        divisors = [degree for degree in range(1, min(heads + 1, context)) if heads % degree == 0]
        rule = f"{context} processes cannot share {heads} heads{' per tensor rank' if tensor > 1 else ''} equally"
        yield "mesh.context", f'{rule}; write {listed(divisors, last="or")}, or context_by = "gather"'
        return
    yield from tokens_divide(batch, mesh=mesh, float8=float8)
    yield from float8_rows_divide(mesh, float8=float8, model=model, processes=processes, nodes=nodes)


def transformers_refuse(mesh: MeshConfig, *, model: ModelConfig) -> Iterator[Violation]:
    """Tensor parallelism cuts only those models of transformers that it was tried with; nothing else cuts any."""
    if not model.by_transformers:
        return
    from models.tensor_plan import name_of, why_not_cut

    if mesh.tensor > 1 and (reason := why_not_cut(model.settings)):
        yield "mesh.tensor", f"{reason}; write 1"
    elif mesh.tensor > 1 and model.dropout:
        yield "mesh.tensor", "processes of a group would drop other numbers; write 1, or model.dropout = false"
    if mesh.context > 1:
        reason = f"{name_of(model.settings)} of transformers sees whole rows only"
        yield "mesh.context", f"{reason}; write 1"


def why_not_cut(tensor: int, *, model: ModelConfig, float8: Float8Config) -> str | None:
    """Why so many processes cannot have an equal part of each matrix; None if they can."""
    for name in ("key_value_heads", "feed_forward_width", "vocabulary"):
        if getattr(model, name) % tensor:
            return f"{tensor} processes cannot share model.{name} = {getattr(model, name)} equally"
    unit = tensor * (UNIT if float8.recipe != "none" else 1)
    for place in PLACES:
        part = model.part(place)
        for name, shape in part.matrices(model, 0).items():
            if name in (*(part.column or ()), *part.row) and (width := shape[name in part.row]) % unit:
                return f"{tensor} processes cannot share the {width} of {place}.{name} by {unit // tensor}"
    for field, (name, width) in _widths(model, float8).items() if float8.recipe != "none" else ():
        if fit([width]) and not fit([width // tensor]):  # float8_fits reports the others
            name = "model.vocabulary" if field == "vocabulary" else name
            return f"float8 needs parts that are multiples of {UNIT}, but {name} {width} / {tensor} is not"
    return None


def _widths(model: ModelConfig, float8: Float8Config) -> dict[str, tuple[str, int]]:
    """Field -> (in words, elements) of the sides of matrices in float8 that tensor groups cut."""
    widths = {
        "feed_forward_width": ("feed_forward_width", model.feed_forward_width),
        "heads": ("heads x head_width", model.heads * model.head_width),
        "key_value_heads": ("key_value_heads x head_width", model.key_value_heads * model.head_width),
    }
    if not model.tied_embeddings and "lm_head" not in float8.exclude:
        widths["vocabulary"] = ("vocabulary, the width of lm_head,", model.vocabulary)
    return widths


def like_nodes(processes: int | None, nodes: int | None) -> list[tuple[str, int]]:
    """(name, processes) of every node, if the numbers are known and the nodes alike."""
    if not processes or not nodes or processes % nodes:
        return []
    return [(f"node {node}", processes // nodes) for node in range(nodes)]


def tokens_divide(batch: BatchConfig, *, mesh: MeshConfig, float8: Float8Config) -> Iterator[Violation]:
    """Every process of a tensor or context group has an equal part of the tokens, and float8 multiples of 16.

    Gradients of weights are products over the tokens of a micro-batch, which a tensor group gathers before.
    """
    length, micro, context, tensor = batch.sequence_length, batch.micro_batch_size, mesh.context, mesh.tensor
    unit, factors = context * tensor, f"mesh.context {context} x mesh.tensor {tensor}"
    if context > 1 and mesh.context_by == "gather":  # each process has two chunks of a row
        unit, factors = 2 * unit, f"2 x {factors}"
    in_float8 = float8.recipe != "none" and not float8.emulate
    best = math.lcm(unit, UNIT * context // math.gcd(UNIT, micro)) if in_float8 else unit
    if length % unit:
        rule = f"must be a multiple of {factors} = {unit}"
        yield "batch.sequence_length", f"{rule}; write {length + -length % best}"
    elif length % best:
        own = f"sequence_length {length}" + (f" / mesh.context {context}" if context > 1 else "")
        rule = f"float8 needs a multiple of {UNIT} tokens per micro-batch, but micro_batch_size {micro} x {own} is not"
        yield "batch.sequence_length", f'{rule}; write {length + -length % best}, or float8.recipe = "none"'


def float8_rows_divide(
    mesh: MeshConfig, *, float8: Float8Config, model: ModelConfig, processes: int | None, nodes: int | None
) -> Iterator[Violation]:
    """FSDP gathers weights in float8 without padding, so each process has as many rows of each matrix.

    The matrices of a model of transformers are known when it is built: parallel/float8.py looks at them.
    """
    if not float8.all_gather or model.by_transformers or any(mesh_fits(mesh, processes=processes, nodes=nodes)):
        return
    degrees = mesh.fit(processes, nodes=nodes)
    linears = {name: shape[0] for name, shape in inside_block(replace(model, experts=0), 0).items() if len(shape) > 1}
    every = {name.split(".")[-2]: count for name, count in linears.items()}
    rows = {name: count for name, count in every.items() if name not in float8.plain_linears}
    if not model.tied_embeddings and "lm_head" not in float8.exclude:
        rows["lm_head"] = model.vocabulary
    if not (rule := why_not_shared(rows, degrees.shards)):
        return
    possible = [degree for degree in range(2, degrees.shard) if degrees.shard % degree == 0]
    fitting = [degree for degree in possible if not why_not_shared(rows, degree * degrees.context)]
    larger = f"mesh.shard = {fitting[-1]} with mesh.replicate = -1, or " if fitting and processes else ""
    yield "float8.all_gather", f"{rule}; write {larger}all_gather = false"


def float8_fits(float8: Float8Config, *, model: ModelConfig) -> Iterator[Violation]:
    """Float8 matrix units need widths that are multiples of 16; torchao silently skips other linears.

    Those of a model of transformers are known when it is built: parallel/float8.py counts what it leaves out.
    """
    if float8.recipe == "none" or model.by_transformers:
        return
    # Of our decoder, all matrices but embedding and routers are linears.
    named = [name.rpartition(".")[0] for name, shape in parameter_shapes(model) if len(shape) > 1]
    named = [name for name in named if not name.startswith(("embedding", "routers"))]
    if refused := why_not_excluded(float8.exclude, named):
        yield "float8.exclude", refused
    elif all({*name.split(".")} & {*float8.exclude} for name in named):
        yield "float8.exclude", 'leaves no linear to convert; exclude less, or write recipe = "none"'
    widths = {"width": ("width", model.width)} | _widths(model, float8)
    for field, (words, width) in widths.items():
        if not fit([width]):
            remedy = f'change it to {width + -width % UNIT}, or write float8.recipe = "none"'
            yield f"model.{field}", f"float8 needs {words} = {width} to be a multiple of {UNIT}; {remedy}"


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
