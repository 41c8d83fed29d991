"""FSDP2: shard parameters, gradients and optimizer states, with the mixed-precision policy."""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from models.interface import blocks_of, interface_of
from parallel.config import SUMMED_TOGETHER, FSDPConfig
from parallel.dist import wait_for
from parallel.mesh import Mesh


def shard_blocks_and_root(model: nn.Module, mesh: Mesh, config: FSDPConfig) -> str:
    """fully_shard every block, then the root, in place, or the root alone. Returns a line for the log.

    Gradients are summed over the data ranks, not averaged: the step divides the loss by the whole batch's targets.
    """
    interface = interface_of(model)
    # torch 2.13 warns that in-place changes of a view would lose gradients. The first block of a T5 returns one (its
    # position bias), which the others only read: tests compare every gradient with plain transformers.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    options: dict[str, Any] = {
        "mesh": mesh.fsdp,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.param_dtype),
            reduce_dtype=getattr(torch, config.reduce_dtype),
            # Activations follow the parameters by themselves; casting would round the float32 rotary tables.
            cast_forward_inputs=False,
        ),
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=mesh.devices.device_type == "cuda") if config.cpu_offload else OffloadPolicy()
        ),
    }
    reshard = config.reshard_after_forward
    has_parts = _gathers_float8(model) or not _root_is_enough(mesh, config)
    if has_parts:
        _shard_parts(model, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)

    _sum_gradients(units_of(model), mesh, config)
    for stack in interface.stacks:
        modules = [model.get_submodule(name) for name in stack]
        units: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
        for index, unit in enumerate(units):
            # Ask for the next blocks' weights before this one computes, so that a slow host does not expose the gather.
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + config.prefetch])
            if config.prefetch > 1:  # one block ahead FSDP2 looks by itself in the backward pass
                unit.set_modules_to_backward_prefetch(units[max(0, index - config.prefetch) : index][::-1])

    shard, replicate = _shards(mesh), mesh.degrees.replicate
    stage = "ZeRO-3" if reshard else "ZeRO-2"
    layout = f"{stage} over {shard}" if shard > 1 else "no sharding"
    copies = f" x {replicate} replicas" if replicate > 1 else ""
    offload = ", offloaded to the host" if config.cpu_offload else ""
    ahead = f", {config.prefetch} blocks gathered ahead" if config.prefetch > 1 and has_parts else ""
    return f"fsdp: {layout}{copies}, {config.param_dtype} compute, {config.reduce_dtype} reduction{ahead}{offload}"


def _shard_parts(model: nn.Module, *, reshard_after_forward: bool, **options: Any) -> None:
    interface, shared = interface_of(model), _shared_parameters(model)
    for block in blocks_of(model):
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    if interface.head is not None:
        # Untied: two large matrices that are never needed at the same time. The backward pass starts with the head.
        embedding, head = model.get_submodule(interface.embedding), model.get_submodule(interface.head)
        if shared.isdisjoint(embedding.parameters()):  # an encoder and a decoder may have one in common
            fully_shard(embedding, reshard_after_forward=reshard_after_forward, **options)
            cast(FSDPModule, embedding).set_unshard_in_backward(False)  # its gradient needs the tokens only
        fully_shard(head, reshard_after_forward=False, **options)


def _shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Those that several modules have: only a unit around all of these can gather them."""
    found = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in found.items() if count > 1}


def _shards(mesh: Mesh) -> int:
    """Into how many parts FSDP cuts each parameter."""
    return mesh.degrees.shard * mesh.degrees.context


def _sum_gradients(units: Sequence[FSDPModule], mesh: Mesh, config: FSDPConfig) -> None:
    if _shards(mesh) == 1 and not config.cpu_offload:
        whole = _WholeGradients(mesh.replicate_group if mesh.degrees.replicate > 1 else None)
        for unit in units:
            whole.take_from(unit)
        return
    for unit in units:
        # Else a factor of one still takes NCCL's slower pre-multiplied sum, which gloo does not have.
        unit.set_force_sum_reduction_for_comms(True)
        if mesh.fsdp.size() > 1:  # one process has nothing to divide by
            unit.set_gradient_divide_factor(1.0)


class _WholeGradients:
    """Hands over gradients where FSDP shards nothing: on one process as they are, of replicas as their sum.

    FSDP's own reduction would keep those of a unit until its end, copy those of one process into a buffer, and wait on
    a CPU for each sum of replicas. This takes each gradient as soon as it is there, and waits for sums once, at the end
    of the backward pass, as DistributedDataParallel does. torch 2.11 to 2.13 have no public name for what happens
    before and after a unit's backward pass.
    """

    def __init__(self, replicas: dist.ProcessGroup | None) -> None:
        self._replicas = replicas
        self._sums: _Sums | None = None
        self._hooked: set[Any] = set()

    def take_from(self, unit: FSDPModule) -> None:
        """Call this once for a unit."""
        group: Any = unit._get_fsdp_state()._fsdp_param_group
        if group is not None:
            group.pre_backward = partial(self._pre_backward, group, group.pre_backward)
            group.post_backward = partial(self._post_backward, group, group.post_backward)

    def _pre_backward(self, group: Any, pre_backward: Callable[..., None], *arguments: Any) -> None:
        for parameter in group.fsdp_params:
            if parameter in self._hooked or not hasattr(parameter, "_unsharded_param"):  # no forward pass has used it
                continue
            whole = parameter._unsharded_param
            as_it_is = group._reduce_dtype is None and whole.dtype == parameter.orig_dtype
            if whole.requires_grad and (self._replicas is not None or not as_it_is):
                self._hooked.add(parameter)
                whole.register_post_accumulate_grad_hook(partial(self._at_once, group, parameter))
        pre_backward(*arguments)

    def _post_backward(self, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        if group.reduce_grads:  # what no hook has taken
            self._take(group, group.fsdp_params)
        post_backward(*unused)  # reshards, and finds nothing to reduce

    def _at_once(self, group: Any, parameter: Any, whole: Tensor) -> None:
        if group.reduce_grads:  # of the last micro-batch
            self._take(group, [parameter])
        else:  # add it up in the type of the sum
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()

    def _take(self, group: Any, parameters: Sequence[Any]) -> None:
        gradients = _taken(parameters)
        if self._replicas is None:
            _hand_over(gradients)
        elif gradients:
            self._of_this_pass(self._replicas, group._reduce_dtype).add(gradients)

    def _of_this_pass(self, replicas: dist.ProcessGroup, dtype: torch.dtype | None) -> "_Sums":
        """The sums of the running backward pass, not those of one that has raised."""
        running = torch._C._current_graph_task_id()
        if self._sums is None or self._sums.backward_pass != running:
            self._sums = _Sums(running, replicas, dtype)
            torch.autograd.Variable._execution_engine.queue_callback(self._sums.finish)
        return self._sums


class _Sums:
    """The sums over replicas of the gradients of one backward pass."""

    def __init__(self, backward_pass: int, replicas: dist.ProcessGroup, dtype: torch.dtype | None) -> None:
        """dtype: of the sums, unless it is that of the gradients."""
        self.backward_pass = backward_pass
        self._replicas, self._dtype = replicas, dtype
        self._waiting: list[tuple[Any, Tensor]] = []
        self._running: list[tuple[dist.Work, list[tuple[Any, Tensor]]]] = []

    def add(self, gradients: list[tuple[Any, Tensor]]) -> None:
        """Start the sums of large gradients at once, and those of small ones once they are enough."""
        for parameter, gradient in gradients:
            is_sum = self._dtype in (None, gradient.dtype) and gradient.is_contiguous()
            if gradient.nbytes >= SUMMED_TOGETHER and is_sum:
                self._start([(parameter, gradient)], gradient, [gradient])  # where it is
            else:
                self._waiting.append((parameter, gradient))
        if sum(gradient.nbytes for _, gradient in self._waiting) >= SUMMED_TOGETHER:
            self._start_waiting()

    @record_function("FSDP::post_backward_reduce")  # the scope by which profiles know FSDP's own sums
    def _start_waiting(self) -> None:
        if not (gradients := self._waiting):
            return
        self._waiting = []
        sizes = [gradient.numel() for _, gradient in gradients]
        message = gradients[0][1].new_empty(sum(sizes), dtype=self._dtype)
        parts = [part.view_as(one) for part, (_, one) in zip(message.split(sizes), gradients, strict=True)]
        torch._foreach_copy_(parts, [gradient for _, gradient in gradients])
        self._start(gradients, message, parts)

    @record_function("FSDP::post_backward_reduce")
    def _start(self, gradients: list[tuple[Any, Tensor]], message: Tensor, parts: list[Tensor]) -> None:
        work = dist.all_reduce(message, group=self._replicas, async_op=True)
        assert work is not None
        self._running.append((work, [(parameter, part) for (parameter, _), part in zip(gradients, parts, strict=True)]))

    def finish(self) -> None:
        """Wait for each sum and hand it over, which frees its message before the next one."""
        self._start_waiting()
        while self._running:
            work, summed = self._running.pop(0)
            wait_for(work)
            _hand_over(summed)


def _taken(parameters: Sequence[Any]) -> list[tuple[Any, Tensor]]:
    """FSDP's parameters and the sums of their gradients over micro-batches, where they have any; FSDP forgets these."""
    found = []
    for parameter in parameters:
        if (whole := getattr(parameter, "_unsharded_param", None)) is None:
            continue
        parameter.accumulate_unsharded_grad_if_needed()
        if parameter.unsharded_accumulated_grad is not None:
            gradient = parameter.unsharded_accumulated_grad_data
        elif whole.grad is not None:
            gradient = parameter.unsharded_grad_data
        else:
            continue
        parameter.unsharded_accumulated_grad = whole.grad = None
        found.append((parameter, gradient))
    return found


def _hand_over(gradients: list[tuple[Any, Tensor]]) -> None:
    for parameter, gradient in gradients:
        gradient, earlier = gradient.to(parameter.orig_dtype), parameter.sharded_param.grad
        if earlier is None:
            parameter.sharded_param.grad = parameter.to_sharded_dtensor(gradient)
        else:  # of a unit that is called twice, or of a micro-batch before
            earlier._local_tensor += gradient


def reshard(model: nn.Module) -> None:
    """Put the shards back where a forward pass without a backward pass has left gathered weights, of any layer."""
    for unit in units_of(model):
        unit.reshard()


def without_idle_resharding(mesh: Mesh, config: FSDPConfig, *, float8_gathers: bool) -> FSDPConfig:
    """The same, without resharding where the shards themselves compute: it would free nothing, but cost time."""
    idle = _shards_are_whole(mesh, config) and config.param_dtype == "float32" and not float8_gathers
    return replace(config, reshard_after_forward=False) if idle else config


def _root_is_enough(mesh: Mesh, config: FSDPConfig) -> bool:
    """Whether further units would only cost the host time: nothing is gathered, and all weights stay until the end."""
    return _shards_are_whole(mesh, config) and not config.reshard_after_forward


def _gathers_float8(model: nn.Module) -> bool:
    return any(hasattr(parameter, "fsdp_pre_all_gather") for parameter in model.parameters())


def units_of(model: nn.Module) -> tuple[FSDPModule, ...]:
    """The modules that fully_shard was called for."""
    return tuple(module for module in model.modules() if isinstance(module, FSDPModule))


def _shards_are_whole(mesh: Mesh, config: FSDPConfig) -> bool:
    # Offloading reads FSDP's extensions from a copy on the device, and tensor parallelism wraps what they return.
    return _shards(mesh) == 1 and mesh.tensor is None and not config.cpu_offload


def compute_with_whole_shards(model: nn.Module, mesh: Mesh, config: FSDPConfig) -> None:
    """Where FSDP has one shard: compute with that itself, or with one cast of it, instead of copies. In place.

    torch 2.11 to 2.13 cast such a shard, and then copy what they have cast. FSDP's extension point, two methods of the
    shard, decides what is gathered and what is made of it. Call this once the parameters have their memory.
    """
    if not _shards_are_whole(mesh, config):
        return
    for parameter in model.parameters():
        shard: Any = cast(DTensor, parameter)._local_tensor  # of which to_local() is another view
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
