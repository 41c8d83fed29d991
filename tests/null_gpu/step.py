"""Step a recipe at its real size on the null GPU, as rank 0 of its processes: `step.py RECIPE PROCESSES OUT ...`.

The other ranks do not exist, and NCCL computes nothing, so that nothing waits for them. Further arguments go to the
recipe. OUT gets what was seen, as JSON. suite.py starts this file in the environment of a NullGpu.
"""

import ctypes
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch._inductor.graph import GraphLowering
from torch.distributed import ProcessGroup

import parallel.mesh
from models.documents import Documents
from models.encoder_decoder import EncoderDecoderInputs
from parallel.determinism import repeat_bits
from parallel.dist import World, communication_backend, let_segments_grow, records_collectives
from parallel.mesh import Mesh
from parallel.messages import Messages
from parallel.nodes import arrange
from recipes.data.batches import MicroBatch
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.plan.memory import predict
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.training.process import NO_RECORD
from recipes.training.step import train_step
from tests.null_gpu.calls import along_axes, read_log
from tests.null_gpu.generated import count
from tests.null_gpu.planned import planned

ROOT = str(Path(__file__).resolve().parents[2])
STEPS = 4
MICRO_BATCHES = 3
"""At most: further ones of a step repeat the second."""
DOCUMENT = 512
"""Tokens of each document, where attention stays inside them."""
PER_NODE = 8


def main(arguments: list[str]) -> None:
    """Step the recipe and write what was seen; of what did not finish, only what was predicted."""
    path, size, out, *overrides = arguments
    codes: list[str] = []
    GraphLowering.save_output_code = staticmethod(codes.append)
    log = Path(os.environ["NULL_GPU_LOG"] + ".0")
    stub = ctypes.CDLL("libcuda.so.1")
    processes, recipe = int(size), load(path, overrides, elsewhere=True)
    degrees = recipe.mesh.fit(processes, nodes=-(-processes // PER_NODE))
    batch = recipe.batch
    micro_batches = min(
        MICRO_BATCHES, max(1, batch.global_batch_size // degrees.data_parallel // batch.micro_batch_size)
    )
    whole = degrees.data_parallel * batch.micro_batch_size * micro_batches
    recipe = replace(recipe, batch=replace(batch, global_batch_size=whole))
    if recipe.attention.backend == "cudnn":
        recipe = replace(recipe, attention=replace(recipe.attention, backend="auto"))
    seen: dict[str, Any] = {"ranks": processes, "micro_batches": micro_batches}
    seen["predicted"] = predict(recipe, degrees, context=False).peak
    Path(out).write_text(json.dumps(seen), encoding="utf-8")
    repeat_bits(recipe.run.deterministic)
    world = alone_of(processes)
    built = build(recipe, world)
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN brings a CUDA runtime of its own, which wants a driver
    seen |= stepped(stub, recipe, built, world, micro_batches)
    seen |= {"attention": built.attention, "communication": communication_backend("cuda")}
    if processes > 1 and not records_collectives():
        raise RuntimeError(NO_RECORD)
    axes = {axis: group for axis, group in groups_of(built.mesh).items() if group.size() > 1}
    seen["communicators"] = len(read_log(log.read_text().splitlines()).sizes)
    for axis, group in axes.items():  # a message along each axis tells which communicator is that axis
        stub.null_gpu_note(f"axis {axis}".encode())
        dist.all_reduce(torch.zeros(1, device=world.device), group=group)
    logged = read_log(log.read_text().splitlines())
    names = {logged.phases[f"axis {axis}"][0].group: axis for axis in reversed(axes)}
    calls = logged.phases[f"step {STEPS}"]
    seen["sent"] = {axis: sent._asdict() for axis, sent in along_axes(calls, names, logged.sizes).items()}
    seen["planned"] = {axis: sent._asdict() for axis, sent in planned(recipe, degrees).items()}
    seen["generated"] = [count(code) for code in codes if "async_compile.triton(" in code]
    seen["calls"] = Counter(f"{names.get(call.group)} {call.kind} {call.elements} {call.type}" for call in calls)
    Path(out).write_text(json.dumps(seen), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # without destroying process groups, which waits for ranks that do not exist


def stepped(stub: ctypes.CDLL, recipe: Recipe, built: Any, world: World, count: int) -> dict[str, Any]:
    """What was seen of the last of STEPS steps; "grown" is what it holds more than the one before, in bytes."""
    guard = StepGuard(built.mesh, device=world.device, max_skipped_steps=recipe.run.max_skipped_steps)
    clock, places, held, now = RunClock(world.device), Counter[str](), 0, 0
    for step in range(1, STEPS + 1):
        micro_batches = [micro_batch(recipe, world.device) for _ in range(count)]
        torch.cuda.reset_peak_memory_stats()
        retries, held = torch.cuda.memory_stats()["num_alloc_retries"], now
        stub.null_gpu_note(f"step {step}".encode())
        before = counters(stub)
        with naming_waits(places) if step == STEPS else warnings.catch_warnings():
            train_step(built, micro_batches, step=step, learning_rate=1e-4, guard=guard, clock=clock)
        counted = {name: value - before[name] for name, value in counters(stub).items()}
        stub.null_gpu_note(b"between steps")
        now = torch.cuda.memory_allocated()
    stats = torch.cuda.memory_stats()
    peaks = {name: stats[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved")}
    return {**peaks, "retries": stats["num_alloc_retries"] - retries, "grown": now - held, **counted, "places": places}


def counters(stub: ctypes.CDLL) -> dict[str, int]:
    """Kernels launched, waits of the host for the device and copies to the host, until now."""
    stub.null_gpu_counter.restype = ctypes.c_long
    return {name: stub.null_gpu_counter(which) for which, name in enumerate(("launches", "waits", "copies"))}


def alone_of(processes: int) -> World:
    """Rank 0 of so many, without the others."""
    let_segments_grow()
    torch.cuda.set_device(0)
    dist.distributed_c10d._store_based_barrier = lambda *arguments, **named: None
    dist.init_process_group("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=processes)
    cast(ProcessGroup, dist.group.WORLD).bound_device_id = None  # torch 2.15 would split it: sizes that no rank knows
    parallel.mesh.share_timeout = lambda groups: None  # fake groups have none
    nodes = arrange([(f"node{rank // PER_NODE}", 0) for rank in range(processes)])
    return World(0, processes, torch.device("cuda", 0), cast(Messages, None), nodes)


def micro_batch(recipe: Recipe, device: torch.device) -> MicroBatch:
    """A micro-batch of tokens, as the recipe's loader would give it."""
    tokens = torch.ones(recipe.batch.micro_batch_size, recipe.batch.sequence_length, dtype=torch.int64)
    tokens[:, DOCUMENT - 1 :: DOCUMENT] = 0
    if recipe.model.is_encoder_decoder:
        answers = tokens[:, :1].expand(-1, recipe.data.answer_length).contiguous()
        inputs = EncoderDecoderInputs(tokens, torch.ones_like(tokens, dtype=torch.bool), answers)
        return inputs.pin_memory().to(device), answers.to(device), None
    on_device = tokens.pin_memory().to(device, non_blocking=True)
    documents = None
    if recipe.data.document_mask:
        documents = Documents.of(tokens, end_of_document=0).pin_memory().to(device)
    return on_device, on_device.clone(), documents


def groups_of(mesh: Mesh) -> dict[str, ProcessGroup]:
    """Axis -> its group. Of two names of one group, the first counts."""
    groups = {"shard": mesh.fsdp.get_group(mesh.fsdp.ndim - 1), "replicate": mesh.replicate_group}
    groups |= {axis: part.get_group() for axis, part in (("tensor", mesh.tensor), ("context", mesh.context)) if part}
    return groups | {"data": mesh.data_group, "loss": mesh.loss_group}


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
        torch.cuda.set_sync_debug_mode("warn")
        yield
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main(sys.argv[1:])
