"""What a run says when a device or the host runs out of memory: what to write into the recipe. Imported only then."""

import errno
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from models.transformers_config import TransformersConfig
from parallel.dist import World
from parallel.errors import UserError
from parallel.heartbeats import is_first_of_all
from recipes.cluster.reports import add_failure
from recipes.files.exit_codes import OUT_OF_MEMORY
from recipes.files.layout import RECIPE
from recipes.files.screen import tell
from recipes.metrics.clock import START, RunClock
from recipes.plan.memory import predict
from recipes.plan.sizes import Sizes
from recipes.recipe.fields import toml, with_values
from recipes.recipe.rules import violations
from recipes.recipe.rules_mesh import require_fits_world
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
        add_failure(folder, "\n".join([*lines, *details]), clock, rank=world.rank, code=OUT_OF_MEMORY)


def _advice(recipe: Recipe, world: World, *, on_host: bool, started: bool = True) -> list[str]:
    """started: whether steps were taken; before that, only the state of the model and the optimizer is in memory."""
    offloads = on_host and world.device.type != "cpu"
    found = [*(host_remedies(recipe) if offloads else remedies(recipe, world))]
    found = [remedy for remedy in found if started or offloads or remedy[0] in STATE]
    # The peak of a model of transformers is counted in a process of its own: --check predicts it.
    is_planned = not isinstance(recipe.model, TransformersConfig) and not recipe.model.uncounted(by_plan=True)
    if not on_host and world.device.type == "cuda" and is_planned:
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
    for key, values, effect in _ways(recipe, world):
        for value in values:
            if _is_accepted(_changed(recipe, key, value), world):
                yield key, value, effect.format(value=value)
                break


def _ways(recipe: Recipe, world: World) -> Iterator[tuple[str, Sequence[object], str]]:
    """Fields, the values to try in this order, and what they do, of which the rules may refuse some."""
    batch, fsdp, mesh = recipe.batch, recipe.fsdp, recipe.mesh
    micro, degrees = batch.micro_batch_size, mesh.fit(world.size, nodes=len(world.nodes))
    smaller = [size for size in range(micro // 2, 0, -1) if micro % size == 0]
    yield "batch.micro_batch_size", smaller, f"instead of {micro}: less at a time, in the same global batch"
    if batch.loss_chunks < 16 and not recipe.compile.enabled:  # compiled, the loss holds no copy of the logits
        yield "batch.loss_chunks", [max(4, 2 * batch.loss_chunks)], "holds the logits of one chunk only"
    checkpointing = recipe.activation_checkpointing
    if len(checkpointing.recomputed(recipe.model.layers)) in range(1, recipe.model.layers):
        yield "activation_checkpointing.blocks", ["all"], "recomputes activations of every block in the backward pass"
    modes = ["none", "selective", "full"]
    if recipe.compile.enabled and recipe.float8.recipe != "none" and checkpointing.mode == "none":
        modes.remove("selective")  # keeps as much as "none" does
    later = modes[modes.index(checkpointing.mode) + 1 :]
    yield "activation_checkpointing.mode", later, "recomputes activations in the backward pass"
    if not fsdp.reshard_after_forward and Sizes(recipe, degrees).gathered_block:  # else shards compute
        yield "fsdp.reshard_after_forward", [True], "frees the gathered weights after the forward pass"
    if fsdp.prefetch > 1:
        yield "fsdp.prefetch", [1], "gathers the weights of fewer blocks ahead"
    if degrees.replicate > 1:
        effect = "with mesh.replicate = 1: each process holds a smaller part of the state"
        yield "mesh.shard", [degrees.data_parallel], effect
    also = "" if mesh.shard in (-1, "node") else "with mesh.shard = -1: "
    for axis, shared in (("context", "every sequence"), ("tensor", "every matrix")):
        effect = f"{also}{{value}} processes share {shared} and its activations"
        yield f"mesh.{axis}", [2 * getattr(mesh, axis)], effect
    if recipe.optimizer.state_dtype != "bfloat16":
        yield "optimizer.state_dtype", ["bfloat16"], f"halves the moments; {OTHER_RUN}"
    if world.device.type == "cuda" and not fsdp.cpu_offload:
        yield "fsdp.cpu_offload", [True], "keeps the sharded state in host memory; slow"
    if half := batch.sequence_length // 2:
        yield "batch.sequence_length", [half], OTHER_RUN


def _is_accepted(recipe: Recipe, world: World) -> bool:
    """Whether these processes can train the recipe."""
    try:
        require_fits_world(recipe.mesh, recipe.batch, nodes=world.nodes, pipeline=recipe.pipeline)
    except UserError:
        return False
    return not any(violations(recipe, None, processes=world.size, nodes=len(world.nodes), elsewhere=True))


def host_remedies(recipe: Recipe) -> Iterator[Remedy]:
    """What saves memory of the host of GPUs."""
    if recipe.checkpoint.every and recipe.checkpoint.asynchronous:
        yield "checkpoint.asynchronous", False, "copies nothing to host memory for a save"
    if recipe.fsdp.cpu_offload:
        yield "fsdp.cpu_offload", False, "keeps the sharded state on the GPUs"
