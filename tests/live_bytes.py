"""How many bytes live at once during one real training step, counted storage by storage on fake tensors.

The step is that of a run, as rank 0 of processes that do not exist. FSDPMemTracker of torch, with which a test compares
this, refuses more than one micro-batch.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.decoder import Decoder
from parallel.config import MeshDegrees
from parallel.dist import World
from parallel.experts import with_experts
from parallel.fsdp import compute_with_whole_shards, without_idle_resharding
from parallel.mesh import Mesh, build_mesh
from parallel.order import parallelize
from parallel.passes import Passes
from recipes.metrics.clock import RunClock
from recipes.optimization.balance import Balance
from recipes.optimization.optimizer import build_optimizer
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.schema import Recipe
from recipes.training.build import Built
from recipes.training.build import build as build_for_run
from recipes.training.step import train_step

CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """While entered, follows every storage from the operator that makes it to its end, and through its resizing."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.moment = self.fullest = "start"
        self.note: Callable[[], None] = lambda: None

    def __enter__(self) -> "LiveBytes":
        resize = torch.UntypedStorage.resize_  # no operator: FSDP frees and allocates with it

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._set(storage, size) if storage._cdata in self._sizes else None
            return result

        self._patch = patch.object(torch.UntypedStorage, "resize_", resized)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:  # in truth it returns its argument
            return args[0]
        result = func(*args, **(kwargs or {}))
        self.follow(*tree_leaves(result))
        return result

    def follow(self, *values: Any) -> None:
        """Count the storages of the tensors among these values."""
        for value in values:
            if isinstance(value, Tensor) and value.device == CPU:
                storage = storage_of(value)
                if storage._cdata not in self._sizes:
                    weakref.finalize(storage, self._forget, storage._cdata)
                    self._set(storage, storage.nbytes())

    def divided(self, tensors: Mapping[str, Iterable[Tensor | None]], *, rest: str) -> dict[str, int]:
        """Bytes that live now, by name; a storage that has several is counted under the first one."""
        sizes = dict(self._sizes)
        found = {}
        for name, several in tensors.items():
            storages = {storage_of(tensor)._cdata for tensor in several if tensor is not None}
            found[name] = sum(sizes.pop(storage, 0) for storage in storages)
        return found | {rest: sum(sizes.values())}

    def restart(self) -> None:
        """Forget the peak, not what lives."""
        self.peak = 0

    def _set(self, storage: torch.UntypedStorage, size: int) -> None:
        self.now += size - self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = size
        if self.now > self.peak:
            self.peak, self.fullest = self.now, self.moment
            self.note()

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory behind a tensor; of a DTensor, behind this process's part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


@contextmanager
def fake_processes(count: int) -> Iterator[None]:
    """Make this process rank 0 of so many; the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds the names of groups


def build(recipe: Recipe, mesh: Mesh) -> Built:
    """The recipe's model and optimizer on the CPU, without values where fake tensors are on."""
    fsdp = without_idle_resharding(mesh, recipe.fsdp, float8_gathers=recipe.float8.all_gather)
    with unset_fake_temporarily():  # a mesh looks for this process in a tensor
        mesh = with_experts(mesh) if recipe.model.experts else mesh
        with torch.device("meta"):
            model = Decoder(recipe.model, loss_chunks=recipe.batch.loss_chunks)
        report = parallelize(
            model,
            mesh,
            float8=recipe.float8,
            activation_checkpointing=recipe.activation_checkpointing,
            compile=recipe.compile,
            fsdp=fsdp,
            layout=replace(recipe.mesh, overlap_tensor=False),
        )
    model.to_empty(device="cpu")
    compute_with_whole_shards(model, mesh, fsdp)
    return Built(
        mesh=mesh,
        model=model,
        passes=Passes(model, mesh, reshards=fsdp.reshard_after_forward, has_z_loss=False),
        optimizer=build_optimizer(model, recipe.optimizer, mesh, dtype=getattr(torch, fsdp.param_dtype)),
        parameters=tuple(model.parameters()),
        roles={},
        balance=Balance(model, mesh, recipe.experts, whole=recipe.model) if recipe.model.experts else None,
        attention="",
        notes_rows=False,
        grad_clip=recipe.optimizer.grad_clip,
        float8_all_gather=recipe.float8.all_gather,
        report=tuple(report),
    )


def tracked_step(
    recipe: Recipe,
    processes: int,
    nodes: int = 1,
    live: LiveBytes | None = None,
    *,
    degrees: MeshDegrees | None = None,
) -> LiveBytes:
    """The second step of a run of this recipe."""
    live = live or LiveBytes()
    with fake_processes(processes):
        mesh = build_mesh(degrees or recipe.mesh.fit(processes, nodes=nodes), device_type="cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            _track(recipe, build(recipe, mesh), live)
    return live


def _track(recipe: Recipe, built: Built, live: LiveBytes) -> None:
    if built.mesh.pipeline is None:
        _name_moments(cast(Decoder, built.model), live)
    built.optimizer.register_step_pre_hook(lambda *_: setattr(live, "moment", "optimizer"))
    batch = recipe.batch
    micro = batch.global_batch_size // built.mesh.degrees.data_parallel // batch.micro_batch_size
    shape = batch.micro_batch_size, batch.sequence_length
    batches = [(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), None)] * micro
    live.follow(*built.parameters, *moments_of(built), *batches[0])
    guard = StepGuard(built.mesh, device=CPU, max_skipped_steps=10)
    for step in (1, 2):
        live.restart()
        live.moment = "start"
        with live:
            train_step(built, batches, step=step, learning_rate=1e-3, guard=guard, clock=RunClock(CPU))


def moments_of(built: Built) -> list[torch.Tensor]:
    """What the optimizer keeps of the parameters."""
    return [tensor for state in built.optimizer.state.values() for tensor in state.values()]


def tracked_stage(recipe: Recipe, world: World) -> LiveBytes:
    """The second step of a run of a pipeline as this process takes it, with values, together with the others."""
    live = LiveBytes()
    _track(recipe, build_for_run(recipe, world), live)
    return live


def _name_moments(model: Decoder, live: LiveBytes) -> None:
    """Follow which part of the model is computing."""

    def says(name: str) -> Callable[..., None]:
        def set_moment(*_: Any) -> None:
            live.moment = name

        return set_moment

    model.register_forward_pre_hook(says("forward"))
    model.loss.register_forward_pre_hook(says("loss"))
    for name, module in [
        ("loss backward", model.loss),
        ("head", model.tied_head or model.lm_head),
        ("norm", model.norm),
    ]:
        module.register_forward_hook(
            lambda module, inputs, output, name=name: output.register_hook(says(name)) and None
        )
    for layer, block in enumerate(model.blocks):
        block.register_forward_hook(
            lambda module, inputs, output, layer=layer: (
                tree_leaves(output)[0].register_hook(says(f"backward {layer}")) and None
            )
        )
    model.embedding.register_forward_hook(
        lambda module, inputs, output: output.register_hook(says("embedding")) and None
    )
