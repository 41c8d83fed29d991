"""Step a recipe at its real size on the null GPU, as rank 0 of its processes: `step.py RECIPE PROCESSES OUT ...`.

The other ranks do not exist, and NCCL computes nothing, so that nothing waits for them. Further arguments go to the
recipe. OUT gets what was seen, as JSON. suite.py starts this file in the environment of a NullGpu.
"""

import ctypes
import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch.distributed import ProcessGroup

import parallel.mesh
from models.documents import Documents
from models.encoder_decoder import EncoderDecoderInputs
from parallel.dist import World, let_segments_grow
from parallel.mesh import Mesh
from parallel.messages import Messages
from parallel.nodes import arrange
from recipes.data.batches import MicroBatch
from recipes.lab.null_gpu.calls import along_axes, read_log
from recipes.lab.null_gpu.planned import planned
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.plan.memory import predict
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.training.step import train_step

STEPS = 4
MICRO_BATCHES = 3
"""At most: further ones of a step repeat the second."""
DOCUMENT = 512
"""Tokens of each document, where attention stays inside them."""
PER_NODE = 8
ROOT = str(Path(__file__).resolve().parents[3])


class Stub:
    """The null GPU under this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.null_gpu_counter.restype = ctypes.c_long

    def counters(self) -> dict[str, int]:
        """Kernels launched, waits of the host for the device and copies to the host, until now; bytes taken."""
        names = ("launches", "waits", "to_host", "bytes")
        return {name: self._library.null_gpu_counter(which) for which, name in enumerate(names)}

    def note(self, text: str) -> None:
        """Write this line into the log of calls."""
        self._library.null_gpu_note(text.encode())


def main(arguments: list[str]) -> None:
    """Step the recipe and write what was seen."""
    path, processes, out, *overrides = arguments
    log = Path(os.environ["NULL_GPU_LOG"] + ".0")
    stub, recipe, world = Stub(), load(path, overrides), alone_of(int(processes))
    degrees = recipe.mesh.fit(world.size, nodes=len(world.nodes))
    batch = recipe.batch
    count = min(MICRO_BATCHES, max(1, batch.global_batch_size // degrees.data_parallel // batch.micro_batch_size))
    whole = degrees.data_parallel * batch.micro_batch_size * count
    recipe = replace(recipe, batch=replace(batch, global_batch_size=whole))
    if recipe.attention.backend in ("auto", "cudnn"):  # cuDNN brings a CUDA runtime of its own, which wants a driver
        recipe = replace(recipe, attention=replace(recipe.attention, backend="flash"))
    began = time.monotonic()
    built = build(recipe, world)
    building = {"seconds": time.monotonic() - began, "allocated": torch.cuda.max_memory_allocated()}
    guard = StepGuard(built.mesh, device=world.device, max_skipped_steps=recipe.run.max_skipped_steps)
    clock = RunClock(world.device)
    steps, places = [], Counter[str]()
    with naming_waits(places):
        for step in range(1, STEPS + 1):
            micro_batches = [micro_batch(recipe, world.device) for _ in range(count)]
            torch.cuda.reset_peak_memory_stats()
            stub.note(f"step {step}")
            before, began = stub.counters(), time.monotonic()
            torch.cuda.set_sync_debug_mode("warn" if step > 2 else "default")
            train_step(built, micro_batches, step=step, learning_rate=1e-4, guard=guard, clock=clock)
            torch.cuda.set_sync_debug_mode("default")
            counted = {name: value - before[name] for name, value in stub.counters().items()}
            steps.append({"seconds": time.monotonic() - began, **counted, **memory()})
            stub.note("between steps")
    axes = {axis: group for axis, group in groups_of(built.mesh).items() if group.size() > 1}
    communicators = len(read_log(log.read_text().splitlines()).sizes)
    for axis, group in axes.items():  # a message along each axis tells which communicator is that axis
        stub.note(f"axis {axis}")
        dist.all_reduce(torch.zeros(1, device=world.device), group=group)
    seen = read_log(log.read_text().splitlines())
    names = {seen.phases[f"axis {axis}"][0].group: axis for axis in reversed(axes)}
    sent = along_axes(seen.phases[f"step {STEPS}"], names, seen.sizes)
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "recipe": Path(path).stem,
        "overrides": overrides,
        "processes": world.size,
        "mesh": vars(degrees),
        "micro_batches": count,
        "report": list(built.report),
        "building": building,
        "steps": steps,
        "places": dict(places),
        "communicators": communicators,
        "predicted": predicted(recipe, built.mesh),
        "sent": {axis: one._asdict() for axis, one in sent.items()},
        "planned": {axis: one._asdict() for axis, one in planned(recipe, degrees).items()},
        "calls": Counter(
            f"{names.get(call.group)} {call.kind} {call.elements} {call.type}" for call in seen.phases[f"step {STEPS}"]
        ),
    }
    Path(out).write_text(json.dumps(result, indent=1), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # without destroying process groups, which waits for ranks that do not exist


def alone_of(processes: int) -> World:
    """Rank 0 of so many, without the others."""
    let_segments_grow()
    torch.cuda.set_device(0)
    dist.distributed_c10d._store_based_barrier = lambda *arguments, **named: None
    dist.init_process_group("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=processes)
    parallel.mesh._share_timeout = lambda groups: None  # fake groups have none
    nodes = arrange([(f"node{rank // PER_NODE}", 0) for rank in range(processes)])
    return World(0, processes, torch.device("cuda", 0), cast(Messages, None), nodes)


def micro_batch(recipe: Recipe, device: torch.device) -> MicroBatch:
    """A micro-batch of tokens, as the recipe's loader would give it."""
    shape = (recipe.batch.micro_batch_size, recipe.batch.sequence_length)
    tokens = torch.ones(shape, dtype=torch.int64)
    tokens[:, DOCUMENT - 1 :: DOCUMENT] = 0
    on_device = tokens.pin_memory().to(device, non_blocking=True)
    if recipe.model.is_encoder_decoder:
        mask = torch.ones(shape, dtype=torch.bool)
        inputs = EncoderDecoderInputs(tokens, mask, tokens).pin_memory().to(device)
        return inputs, on_device, None
    documents = None
    if recipe.data.document_mask:
        documents = Documents.of(tokens, end_of_document=0).pin_memory().to(device)
    return on_device, on_device.clone(), documents


def memory() -> dict[str, int]:
    """Bytes: the most since the statistics were reset, and now."""
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "held": stats["allocated_bytes.all.current"],
        "retries": stats["num_alloc_retries"],
    }


def predicted(recipe: Recipe, mesh: Mesh) -> dict[str, Any]:
    """What the plan says of the allocator's memory, and of all."""
    inside = predict(recipe, mesh.degrees, context=False)
    return {"allocated": inside.peak, "fullest": inside.fullest, "whole": predict(recipe, mesh.degrees).peak}


def groups_of(mesh: Mesh) -> dict[str, ProcessGroup]:
    """Axis -> its group. Of two names of one group, the first counts."""
    found = {"shard": mesh.fsdp.get_group(mesh.fsdp.ndim - 1), "replicate": mesh.replicate_group}
    found |= {axis: one.get_group() for axis, one in (("tensor", mesh.tensor), ("context", mesh.context)) if one}
    return found | {"data": mesh.data_group, "loss": mesh.loss_group}


@contextmanager
def naming_waits(places: Counter[str]) -> Iterator[None]:
    """Inside, count by place in our code where torch warns that the host waits for the device."""

    def show(message: Warning | str, *ignored: Any, **named: Any) -> None:
        if "called a synchronizing" in str(message):
            frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(ROOT)]
            frames = [frame for frame in frames if frame.filename != __file__]
            places[" < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:][::-1])] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


if __name__ == "__main__":
    main(sys.argv[1:])
