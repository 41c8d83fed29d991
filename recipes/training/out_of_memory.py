"""What a run says when a device or the host runs out of memory: what to write into the recipe. Imported only then."""

import errno
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from models.transformers_config import TransformersConfig
from parallel.dist import World
from parallel.errors import UserError
from parallel.heartbeats import is_first_of_all
from recipes.files.atomic import Lines, utc_now
from recipes.files.layout import LOG_FILE, RECIPE
from recipes.files.screen import tell
from recipes.metrics.clock import START, RunClock
from recipes.plan.memory import predict
from recipes.plan.sizes import Sizes
from recipes.recipe.fields import toml, with_values
from recipes.recipe.rules_mesh import float8_fits_tensor, gather_has_a_kernel, mesh_divides_model, require_fits_world
from recipes.recipe.rules_optimizer import moments_can_move
from recipes.recipe.schema import Recipe

SAYS_SO = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|_ALLOC_FAILED|bad_alloc", re.I)
"""Texts of the RuntimeErrors of CUDA's libraries, NCCL, compiled code, and torch's allocator on the CPU."""
OF_THE_HOST = re.compile(r"can't allocate memory|cannot allocate memory|bad_alloc", re.I)
SNAPSHOTS = "out-of-memory"
"""Folder in the run's folder: what each GPU's memory held, for https://pytorch.org/memory_viz."""
OTHER_RUN = "changes the results, so with another run.name"

STATE = ("mesh.shard", "optimizer.state_dtype", "fsdp.cpu_offload")
"""Fields that save memory also before the first step."""

Remedy = tuple[str, object, str]
"""A field, the value to write, and what that does."""


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error that says that memory ran out: this one or one of its causes, or None."""
    while error is not None:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        known = known or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        if known or (isinstance(error, RuntimeError) and SAYS_SO.search(str(error))):
            return error
        error = error.__cause__
    return None


def report(error: BaseException, recipe: Recipe, world: World, clock: RunClock) -> None:
    """Print what ran out where, and what helps; add the traceback and the state of the memory to the run's log.txt.

    Nothing that fails here is raised: the run ends because of `error`.
    """
    on_host = world.device.type == "cpu" or isinstance(error, (MemoryError, OSError))
    on_host = on_host or bool(OF_THE_HOST.search(str(error)))
    when = "at the start" if clock.now == START else f"after {clock.step} steps"
    said = (str(error).splitlines() or [""])[0] or type(error).__name__
    what = "the host" if on_host else str(world.device)
    lines = [f"OUT OF MEMORY: {what} of rank {world.rank} on {world.node_of(world.rank)}, {when}: {said}"]
    first = True
    with suppress(RuntimeError, UserError):  # the store may be gone
        first = is_first_of_all(world, "out of memory")
    if first:  # the other ranks would say the same
        lines += _advice(recipe, world, on_host=on_host, started=clock.now != START)
    for line in lines:
        tell(line)  # whatever has become of the screen
    folder = recipe.run.folder
    if (folder / RECIPE).is_file():  # otherwise the run has not begun
        details = "".join(traceback.format_exception(error)).splitlines()
        if world.device.type == "cuda":
            with suppress(Exception):
                details += torch.cuda.memory_summary(abbreviated=True).splitlines()
                # The traceback keeps most of what the step held. Where each block was allocated is not in the snapshot:
                # recording that costs time at every allocation of every step.
                snapshot = folder / SNAPSHOTS / f"rank-{world.rank}.pickle"
                snapshot.parent.mkdir(exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(snapshot))
                lines.append(f"  what the memory held: {snapshot}")
                tell(lines[-1])
        Lines(folder / LOG_FILE, log=lambda line: None).append(f"{utc_now()} {lines[0]}", *lines[1:], *details)


def _advice(recipe: Recipe, world: World, *, on_host: bool, started: bool = True) -> list[str]:
    """started: whether steps were taken; before that, only the state of the model and the optimizer is in memory."""
    offloads = on_host and world.device.type != "cpu"
    found = [*(host_remedies(recipe) if offloads else remedies(recipe, world))]
    found = [remedy for remedy in found if started or offloads or remedy[0] in STATE]
    # The peak of a model of transformers is counted in a process of its own: --check predicts it.
    if not on_host and world.device.type == "cuda" and not isinstance(recipe.model, TransformersConfig):
        found = [*_with_peaks(found, recipe, world)]
    lines = [(f"{key} = {toml(value)}", effect) for key, value, effect in found]
    if recipe.mesh.expert > 1 and started:
        lines.append(("experts.balance", "uneven loads fill some processes: see expert_load/largest in metrics.jsonl"))
    lines += [("NPROC, nodes", "more of them, with mesh.shard = -1: each process holds a smaller part of the state")]
    width = max(len(field) for field, _ in lines)
    return [
        "  write into the recipe, in this order until it fits:",
        *(f"  {field:<{width}}  {effect}" for field, effect in lines),
    ]


def _with_peaks(found: Sequence[Remedy], recipe: Recipe, world: World) -> Iterator[Remedy]:
    """The remedies with what they change, as in "predicted: 70.1 instead of 92.3 GB", without those that need more.

    Smaller micro-batches need more where they are the first to accumulate gradients, which are then whole.
    """
    before = _peak(recipe, world)
    for key, value, effect in found:
        after = _peak(_changed(recipe, key, value), world)
        if after <= before:
            yield key, value, f"{effect} (predicted: {after / 1e9:.1f} instead of {before / 1e9:.1f} GB)"


def _peak(recipe: Recipe, world: World) -> int:
    return predict(recipe, recipe.mesh.fit(world.size, nodes=len(world.nodes))).peak


def _changed(recipe: Recipe, key: str, value: object) -> Recipe:
    """The recipe with this remedy."""
    values = {key: value}
    if key == "mesh.shard":
        values["mesh.replicate"] = 1
    elif key.startswith("mesh.") and recipe.mesh.shard != "node":
        values["mesh.shard"] = -1
    return with_values(recipe, values)


def remedies(recipe: Recipe, world: World) -> Iterator[Remedy]:
    """What saves memory of a device and is not at its end in this recipe; first what costs least."""
    batch, fsdp = recipe.batch, recipe.fsdp
    micro = batch.micro_batch_size
    smaller = (size for size in range(micro // 2, 0, -1) if micro % size == 0)
    fitting = (size for size in smaller if _fits(_changed(recipe, "batch.micro_batch_size", size), world))
    if size := next(fitting, None):
        yield "batch.micro_batch_size", size, f"instead of {micro}: less at a time, in the same global batch"
    if batch.loss_chunks < 16 and not recipe.compile.enabled:  # compiled, the loss holds no copy of the logits
        yield "batch.loss_chunks", max(4, 2 * batch.loss_chunks), "holds the logits of one chunk only"
    checkpointing = recipe.activation_checkpointing
    if len(checkpointing.recomputed(recipe.model.layers)) in range(1, recipe.model.layers):
        yield "activation_checkpointing.blocks", "all", "recomputes activations of every block in the backward pass"
    degrees = recipe.mesh.fit(world.size, nodes=len(world.nodes))
    splits = degrees.pipeline > 1 and recipe.pipeline.splits_backward  # needs gathered weights, and no "selective"
    same = recipe.compile.enabled and recipe.float8.recipe != "none"  # "selective" keeps what "none" does
    modes = ("none", "full") if splits or (same and checkpointing.mode == "none") else ("none", "selective", "full")
    if later := modes[modes.index(checkpointing.mode) + 1 :]:
        yield "activation_checkpointing.mode", later[0], "recomputes activations in the backward pass"
    if not (fsdp.reshard_after_forward or splits) and Sizes(recipe, degrees).gathered_block:  # else shards compute
        yield "fsdp.reshard_after_forward", True, "frees the gathered weights after the forward pass"
    if fsdp.prefetch > 1:
        yield "fsdp.prefetch", 1, "gathers the weights of fewer blocks ahead"
    if degrees.replicate > 1:
        whole = degrees.data_parallel
        yield "mesh.shard", whole, "with mesh.replicate = 1: each process holds a smaller part of the state"
    yield from _parts(recipe, world)
    halved = replace(recipe.optimizer, state_dtype="bfloat16")
    if halved != recipe.optimizer and not any(moments_can_move(halved)):
        yield "optimizer.state_dtype", "bfloat16", f"halves the moments; {OTHER_RUN}"
    if world.device.type == "cuda" and not fsdp.cpu_offload and not recipe.optimizer.facts.orthogonalizes:
        yield "fsdp.cpu_offload", True, "keeps the sharded state in host memory; slow"
    half = batch.sequence_length // 2
    if half and _fits(_changed(recipe, "batch.sequence_length", half), world):
        yield "batch.sequence_length", half, f"{OTHER_RUN}"


def _parts(recipe: Recipe, world: World) -> Iterator[Remedy]:
    """More parts of sequences or matrices, where these processes can have them."""
    also = "" if recipe.mesh.shard in (-1, "node") else "with mesh.shard = -1: "
    for axis, parts in (("context", "every sequence"), ("tensor", "every matrix")):
        degree = 2 * getattr(recipe.mesh, axis)
        if _fits(_changed(recipe, f"mesh.{axis}", degree), world):
            yield f"mesh.{axis}", degree, f"{also}{degree} processes share {parts} and its activations"


def _fits(recipe: Recipe, world: World) -> bool:
    """Whether these processes can share the recipe."""
    mesh, batch, float8 = recipe.mesh, recipe.batch, recipe.float8
    known = {"processes": world.size, "nodes": len(world.nodes)}
    try:
        require_fits_world(mesh, batch, nodes=world.nodes, pipeline=recipe.pipeline)
    except UserError:
        return False
    found = mesh_divides_model(mesh, model=recipe.model, batch=batch, float8=float8, **known)
    others = [
        *float8_fits_tensor(mesh, float8=float8),
        *gather_has_a_kernel(mesh, attention=recipe.attention, model=recipe.model),
    ]
    return not [*found, *others]


def host_remedies(recipe: Recipe) -> Iterator[Remedy]:
    """What saves memory of the host of GPUs."""
    if recipe.checkpoint.every and recipe.checkpoint.asynchronous:
        yield "checkpoint.asynchronous", False, "copies nothing to host memory for a save"
    if recipe.fsdp.cpu_offload:
        yield "fsdp.cpu_offload", False, "keeps the sharded state on the GPUs"
