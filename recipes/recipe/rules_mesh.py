"""Rules about the layout of the processes. Imports no torch."""

from collections.abc import Iterator, Sequence

from parallel.config import MeshConfig, PipelineConfig
from parallel.errors import UserError, listed
from parallel.nodes import Node, require_like_nodes, require_neighbours
from recipes.data.config import BatchConfig
from recipes.recipe.fields import Problem, Violation, refusal

ONE_STAGE_EACH = PipelineConfig()
"""1F1B, the default order of a pipeline."""


def require_fits_world(
    mesh: MeshConfig, batch: BatchConfig, *, nodes: Sequence[Node], pipeline: PipelineConfig = ONE_STAGE_EACH
) -> None:
    """Raises one UserError with everything about the layout that does not fit the processes of these nodes."""
    if mesh.shard == "node":
        require_like_nodes(nodes)
    require_neighbours(nodes, tensor=mesh.tensor)
    processes = sum(len(node.ranks) for node in nodes)
    broken = [
        *mesh_fits(mesh, processes=processes, nodes=len(nodes)),
        *tensor_groups_fit_nodes(mesh, nodes=nodes),
        *batch_divides(batch, mesh=mesh, processes=processes, nodes=len(nodes)),
    ]
    if mesh.pipeline > 1:
        broken += enough_micro_batches(pipeline, mesh=mesh, batch=batch, processes=processes, nodes=len(nodes))
    if broken:
        problems = [Problem(key, message) for key, message in broken]
        raise refusal(problems, where=f"the recipe on {processes} processes")


def mesh_fits(mesh: MeshConfig, *, processes: int | None, nodes: int | None) -> Iterator[Violation]:
    """The product of the degrees is the number of processes."""
    try:
        mesh.fit(processes, nodes=nodes)
    except UserError as error:
        for line in str(error).splitlines():  # "mesh.tensor = 2: what is wrong" or "mesh: what is wrong"
            place, _, message = line.partition(": ")
            yield place.partition(" ")[0], message


def batch_divides(
    batch: BatchConfig, *, mesh: MeshConfig, processes: int | None, nodes: int | None
) -> Iterator[Violation]:
    """Every process runs the same number of full micro-batches in every step."""
    try:
        data_parallel = mesh.fit(processes, nodes=nodes).data_parallel
    except UserError:  # mesh_fits reports it
        data_parallel = 1
    batch_size, micro = batch.global_batch_size, batch.micro_batch_size
    unit = micro * data_parallel
    if batch_size % unit == 0:
        return
    arithmetic = f"micro_batch_size = {micro}"
    if data_parallel > 1:
        arithmetic = f"micro_batch_size {micro} x {data_parallel} data-parallel processes = {unit}"
    below = batch_size // unit * unit
    multiples = [size for size in (below, below + unit) if size]
    message = f"must be a multiple of {arithmetic}; write {listed(multiples, last='or')}"
    if batch_size % data_parallel == 0:
        share = batch_size // data_parallel
        few = min(share, 4 * micro, 10_000)  # far from what was written, there are too many to look for
        divisors = (size for size in range(1, few + 1) if share % size == 0)
        nearest = sorted(sorted(divisors, key=lambda size: abs(size - micro))[:4])
        message += f", or a micro_batch_size of {listed(nearest, last='or')}"
    yield "batch.global_batch_size", message


def why_not_inside(tensor: int, sizes: Sequence[tuple[str, int]]) -> str | None:
    """Why tensor groups, which exchange activations several times per block, would leave nodes: (name, processes)."""
    uneven = next(((name, size) for name, size in sizes if size % tensor), None)
    if len(sizes) == 1 or uneven is None:
        return None
    return f"groups of {tensor} neighbouring processes would cross nodes: {uneven[0]} has {uneven[1]} of them"


def tensor_groups_fit_nodes(mesh: MeshConfig, *, nodes: Sequence[Node]) -> Iterator[Violation]:
    """Tensor groups stay inside the nodes that there are when a run starts."""
    sizes = [(node.name, len(node.ranks)) for node in nodes]
    if rule := why_not_inside(mesh.tensor, sizes):
        degrees = range(1, min(mesh.tensor, *(size for _, size in sizes)) + 1)
        divisors = [degree for degree in degrees if not why_not_inside(degree, sizes)]
        yield "mesh.tensor", f"{rule}; write {listed(divisors, last='or')}"


def enough_micro_batches(
    pipeline: PipelineConfig, *, mesh: MeshConfig, batch: BatchConfig, processes: int | None, nodes: int | None
) -> Iterator[Violation]:
    """Every stage has something to do, and interleaved schedules have equal rounds of micro-batches."""
    degree, schedule = mesh.pipeline, pipeline.schedule
    try:
        share = mesh.fit(processes, nodes=nodes).data_parallel * batch.micro_batch_size
    except UserError:  # mesh_fits reports it
        return
    if batch.global_batch_size % share:  # batch_divides reports it
        return
    count = batch.global_batch_size // share
    key, has = "batch.global_batch_size", f"is {count} micro-batches for each data-parallel process"
    if count < degree:
        yield key, f"{has}, but mesh.pipeline {degree} needs {degree} or more; write {degree * share} or more"
    elif schedule.startswith("interleaved") and count % (count // degree):
        sizes = [number * share for number in (count // degree * degree, (count // degree + 1) * degree)]
        rule = f'{has}, which "{schedule}" cannot divide into {count // degree} equal rounds'
        yield key, f"{rule}; write {listed(sizes, last='or')}"
