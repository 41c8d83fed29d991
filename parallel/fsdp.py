"""FSDP2: shards parameters, gradients and optimizer states in mixed precision, and fills the shards."""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from models.interface import blocks_of, interface_of
from parallel.config import FSDPConfig
from parallel.dist import all_gather_single, reduce_scatter_single
from parallel.errors import UserError
from parallel.mesh import Mesh


def shard_blocks_and_root(model: nn.Module, mesh: Mesh, config: FSDPConfig) -> str:
    """fully_shard every block, embedding and head of an untied model, then the root, in place. Returns a log line.

    Gradients are summed over the data ranks, not averaged: the step divides the loss by the whole batch's targets.
    """
    interface = interface_of(model)
    if config.symmetric_memory:
        _require_symmetric_memory(mesh)
    # torch 2.13 warns that in-place changes of a view would lose gradients. The first block of a T5 returns one (its
    # position bias), which the others only read: tests compare every gradient with plain transformers.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    options: dict[str, Any] = {
        "mesh": mesh.fsdp,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.param_dtype),
            reduce_dtype=torch.float32,  # micro-batches are added up in it, whatever is sent
            # Activations follow the parameters by themselves; casting would round the float32 rotary tables.
            cast_forward_inputs=False,
        ),
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=mesh.devices.device_type == "cuda") if config.cpu_offload else OffloadPolicy()
        ),
    }
    reshard = config.reshard_after_forward
    _shard_parts(model, mesh, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)

    for unit in units_of(model):
        # Else a factor of one still takes NCCL's slower pre-multiplied sum, which gloo does not have.
        unit.set_force_sum_reduction_for_comms(True)
        # One process has nothing to divide by; experts may be of several nevertheless.
        if mesh.fsdp.size() > 1 or (mesh.experts is not None and mesh.experts.fsdp is not None):
            unit.set_gradient_divide_factor(1.0)
    if config.symmetric_memory:
        for unit in units_of(model):  # after the sum is forced: averages of gradients would go the common way
            unit.set_symm_mem_for_comm()
    else:
        _share_memory_of_messages(model, mesh, config)
    for stack in interface.stacks:
        modules = [model.get_submodule(name) for name in stack]
        units: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
        last = interface.head is not None and stack is interface.stacks[-1]
        order = [*units, cast(FSDPModule, model.get_submodule(cast(str, interface.head)))] if last else units
        for index, unit in enumerate(units):
            # Ask for the next weights before this block computes: a gather waits for all that was asked for before it.
            unit.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + config.prefetch])
            if config.prefetch > 1:  # one block ahead FSDP2 looks by itself in the backward pass
                unit.set_modules_to_backward_prefetch(units[max(0, index - config.prefetch) : index][::-1])

    shard, replicate = mesh.degrees.shards, mesh.degrees.replicate
    zero = "ZeRO-3" if reshard else "ZeRO-2"
    layout = f"{zero} over {shard}" if shard > 1 else "no sharding"
    copies = f" x {replicate} replicas" if replicate > 1 else ""
    offload = ", offloaded to the host" if config.cpu_offload else ""
    offload += ", in symmetric memory" if config.symmetric_memory else ""
    ahead = f", {config.prefetch} blocks gathered ahead" if config.prefetch > 1 else ""
    return f"fsdp: {layout}{copies}, {config.param_dtype} compute, {config.reduce_dtype} reduction{ahead}{offload}"


def _require_symmetric_memory(mesh: Mesh) -> None:
    """Raise UserError where torch or the mesh has no messages in memory that several GPUs see."""
    remedy = "write fsdp.symmetric_memory = false"
    if not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        raise UserError(f"fsdp.symmetric_memory needs torch 2.12 or later, and this is {torch.__version__}; {remedy}")
    if mesh.devices.device_type != "cuda":
        raise UserError(f"fsdp.symmetric_memory needs GPUs, and the device is a {mesh.devices.device_type}; {remedy}")
    if mesh.degrees.shards == 1:
        raise UserError(f"fsdp.symmetric_memory: each process has whole parameters and gathers none; {remedy}")


def _share_memory_of_messages(model: nn.Module, mesh: Mesh, config: FSDPConfig) -> None:
    """Let activations use the memory in which weights are gathered and gradients summed, as soon as these are gone."""
    gather = Gather(mesh.devices.device_type)
    # FSDP2 takes no calls of our own for units over several meshes; they are always in float32 (rules_axes.py).
    several = mesh.experts is not None and mesh.experts.fsdp is not None
    of_several_meshes: set[Any] = set(blocks_of(model)) if several else set()
    for unit in units_of(model):
        if unit not in of_several_meshes:
            unit.set_custom_all_gather(cast(Any, gather))
            unit.set_custom_reduce_scatter(cast(Any, Reduction(gather, mesh, config)))


class Gather:
    """FSDP2's all-gather of a unit's weights, in memory of the stream that computes.

    torch's allocator keeps freed memory for the stream that asked for it, and FSDP2 asks on streams of its own, where
    activations cannot use it. Here, the stream that asks waits for all that was computed before, in whose memory it may
    write. FSDP2 makes the stream that computes wait before it lets go, but not for sums that are added to earlier ones:
    gradients are reduced once between two calls of zero_grad().
    """

    def __init__(self, device_type: str) -> None:
        self._streams: Any = torch.get_device_module(device_type)
        self._computes = self._streams.current_stream()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with self._streams.stream(self._computes):
            memory = torch.empty(size, dtype=dtype, device=device)
        self._streams.current_stream().wait_stream(self._computes)
        return memory

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class Reduction:
    """FSDP2's reduce-scatter of a unit's gradients, in the dtype of messages; FSDP2's own would also add up in it.

    It asks for memory of the message, on the stream that computes, then of the sum, which one process has already.
    """

    _message: Tensor | None = None

    def __init__(self, gather: Gather, mesh: Mesh, config: FSDPConfig) -> None:
        self._of_computation, self._sent = gather.allocate, getattr(torch, config.reduce_dtype)
        self._casts = mesh.degrees.replicate == 1  # else replicas sum in place, in what is sent, and then FSDP2 casts
        self._offloads = config.cpu_offload

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        message, self._message = self._message, None
        if message is None:
            self._message = torch.empty(size, dtype=self._sent, device=device)
            return self._message
        if self._offloads:  # FSDP2 lets go of the sum while this stream copies it to the host
            return torch.empty(size, dtype=self._sent, device=device)
        dtype = dtype if self._casts else self._sent
        if message.shape == torch.Size(size) and message.dtype == dtype:
            return message
        return self._of_computation(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if output_tensor.dtype == input_tensor.dtype:
            return reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        rounded = torch.empty_like(output_tensor, dtype=input_tensor.dtype)
        reduce_scatter_single(rounded, input_tensor, group=group, op=op)
        return output_tensor.copy_(rounded)


def _shard_parts(model: nn.Module, whole: Mesh, *, reshard_after_forward: bool, **options: Any) -> None:
    interface = interface_of(model)
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    of_experts = None
    if whole.experts is not None:
        from parallel.experts import shards_of_experts

        of_experts = shards_of_experts(model, whole)
    for block in blocks_of(model):
        fully_shard(block, reshard_after_forward=reshard_after_forward, shard_placement_fn=of_experts, **options)
    if interface.routers is not None:
        # A rounded weight would send some tokens to other experts, and these are small.
        in_float32 = options | {"mp_policy": replace(options["mp_policy"], param_dtype=torch.float32)}
        fully_shard(model.get_submodule(interface.routers), reshard_after_forward=False, **in_float32)
    # Untied: two large matrices that are never needed at the same time. The backward pass starts with the head.
    if interface.embedding is not None and interface.tied_head is None:
        embedding = model.get_submodule(interface.embedding)
        # An encoder and a decoder may have one in common, which only a unit around both can gather.
        if all(uses[parameter] == 1 for parameter in embedding.parameters()):
            fully_shard(embedding, reshard_after_forward=reshard_after_forward, **options)
            cast(FSDPModule, embedding).set_unshard_in_backward(False)  # its gradient needs the tokens only
    if interface.head is not None:
        fully_shard(model.get_submodule(interface.head), reshard_after_forward=False, **options)


def expect_micro_batch(units: Sequence[FSDPModule], *, is_last: bool, reshards: bool) -> None:
    """Prepare the units for a micro-batch of a step. is_last: gradients are reduced once, when they have been added up.
    reshards: whether weights are gathered anew for each micro-batch; with ZeRO-2 they stay until the step ends."""
    for unit in units:
        unit.set_requires_gradient_sync(is_last, recurse=False)
        if not reshards:
            unit.set_reshard_after_backward(is_last, recurse=False)


def reshard(model: nn.Module) -> None:
    """Put the shards back where a forward pass without a backward pass has left gathered weights, of any layer."""
    for unit in units_of(model):
        unit.reshard()


def without_idle_resharding(mesh: Mesh, config: FSDPConfig, *, float8_gathers: bool) -> FSDPConfig:
    """The config without resharding where the shards themselves compute: it would free nothing, but cost time."""
    idle = _shards_are_whole(mesh, config) and config.param_dtype == "float32" and not float8_gathers
    return replace(config, reshard_after_forward=False) if idle else config


def units_of(model: nn.Module) -> tuple[FSDPModule, ...]:
    """The modules that fully_shard was called for."""
    return tuple(module for module in model.modules() if isinstance(module, FSDPModule))


def _shards_are_whole(mesh: Mesh, config: FSDPConfig) -> bool:
    # Offloading reads FSDP's extensions from a copy on the device, and tensor parallelism wraps what they return.
    return mesh.degrees.per_layer == 1 and not config.cpu_offload


def compute_with_whole_shards(model: nn.Module, mesh: Mesh, config: FSDPConfig) -> None:
    """Compute with the shard itself, or one cast of it, instead of copies, where FSDP has only one shard. In place.

    torch 2.11 to 2.13 cast such a shard, and then copy what they have cast. FSDP's extension point, two methods of the
    shard, decides what is gathered and what is made of it. Call this once the parameters have their memory.
    """
    if not _shards_are_whole(mesh, config):
        return
    for parameter in model.parameters():
        shard: Any = cast(DTensor, parameter)._local_tensor  # to_local() would return another view of it
        if not hasattr(shard, "fsdp_pre_all_gather"):  # weights that are gathered in float8 have their own
            shard.fsdp_pre_all_gather = gather = partial(_gather_nothing, shard)
            gather.__signature__ = OF_FIVE  # type: ignore[attr-defined]
            shard.fsdp_post_all_gather = partial(_whole_parameter, shard)


def _gather_nothing(
    shard: Tensor, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
) -> tuple[tuple[Tensor], None]:
    return (shard.new_empty(0),), None


OF_FIVE = inspect.signature(partial(_gather_nothing, torch.empty(0)))
"""FSDP looks at each parameter's signature in each gather, which takes as long as a small kernel."""


def _whole_parameter(
    shard: Tensor, gathered: tuple[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The parameter to compute with, and what of its memory FSDP frees when it reshards; later, the same in `out`."""
    if shard.dtype == dtype:
        return (shard, ()) if out is None else None
    if out is None:
        whole = shard.to(dtype)
        return whole, (whole,)
    out.data.copy_(shard)  # .data: the backward pass has saved `out` and refuses what has changed since
    return None


def plain_name(name: str) -> str:
    """The fully qualified name in the plain model, without the wrapper that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def without_wrapper(tensor: Tensor) -> Tensor:
    """A tensor without the class that float8 all-gather wraps it in, in the same memory: no file may need torchao."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    plain = getattr(local, "_tensor", local)
    if plain is local:
        return tensor
    if not isinstance(tensor, DTensor):
        return plain
    return DTensor.from_local(
        plain, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def materialize(model: nn.Module, *, device: torch.device, seed: int, keep_on: torch.device | None = None) -> None:
    """Allocate every parameter's local shard and fill it, and every buffer, from the model's `initial_values`.

    Each process draws all of every parameter, one after the other, and keeps only its shard: the values do not depend
    on the mesh. They are drawn on `device` (those of CPU and CUDA differ) and stay there unless `keep_on` names another
    (offloading).
    """
    model.to_empty(device=keep_on or device)
    for module in model.modules():  # what is no parameter is not offloaded
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
    places = {plain_name(name): tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    initial_values = cast(Callable[..., Iterator[tuple[str, Tensor]]], model.initial_values)
    shapes = {name: tensor.shape for name, tensor in places.items()}
    for name, whole in initial_values(shapes, seed=seed, device=device):
        place = places.pop(name)
        if isinstance(place, DTensor):
            # src_data_rank=None: every process takes its own shard, and nothing is sent.
            shard = distribute_tensor(whole, place.device_mesh, place.placements, src_data_rank=None)
            place.to_local().copy_(shard.to_local())
        else:
            place.copy_(whole)
    assert not places, f"no initial values of {sorted(places)}"
