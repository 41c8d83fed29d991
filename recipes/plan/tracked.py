"""The memory of a training step of a model of transformers: a whole step is taken on tensors without values.

It is the step of rank 0 among processes that do not exist, on the CPU, operator by operator, but with the kernels of
attention that a GPU has, and without the copies of logits that a compiled loss does not make. Compiled blocks keep less
than is counted here. float8 products are emulated, from casts that are kept as on a GPU. Torch's FSDPMemTracker counts
the same, but refuses several micro-batches.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.decoder import build_model
from models.documents import Documents
from models.encoder_decoder import EncoderDecoderInputs
from models.interface import interface_of
from models.loss import Kernels, SummedLoss
from parallel.config import CompileConfig, MeshDegrees
from parallel.fsdp import compute_with_whole_shards, expect_micro_batch, plain_name, units_of, without_idle_resharding
from parallel.mesh import Mesh, build_mesh
from parallel.order import parallelize
from parallel.passes import backward, clipping_divisor, gradient_norm
from recipes.data.batches import MicroBatch
from recipes.optimization.optimizer import build_optimizer
from recipes.optimization.skip_steps import take_step
from recipes.plan.sizes import Pieces
from recipes.recipe.schema import Recipe

CPU = torch.device("cpu")
MICRO_BATCHES = 3
"""More of them find the same memory: the first, those between and the last differ."""

Hook = Callable[..., None]


def _one_per_row(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), dtype=torch.float32), logits.new_empty(len(logits), dtype=torch.float32)


WITHOUT_COPIES = Kernels(_one_per_row, lambda logits, largest, factors: None)
"""Kernels of the loss that take as much memory as compiled ones, and compute nothing."""


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


def fullest_moment(recipe: Recipe, degrees: MeshDegrees) -> tuple[str, Pieces]:
    """The moment of a step at which a process of such a mesh holds most, and what it holds, in bytes.

    The process must not have a process group. Raises UserError for what parallelize() refuses.
    """
    with fake_processes(degrees.processes), _kernels(recipe), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run gives them where they mean something
        step = _Step(recipe, build_mesh(degrees, device_type="cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            step.allocate()
            return step.fullest_moment(_micro_batches(recipe, degrees))


def _micro_batches(recipe: Recipe, degrees: MeshDegrees) -> list[MicroBatch]:
    """The micro-batches of one process, with the longest texts; their values do not matter."""
    batch, data = recipe.batch, recipe.data
    count = batch.micro_batches(degrees)
    rows, length = batch.micro_batch_size, batch.sequence_length
    tokens, documents = torch.zeros(rows, length, dtype=torch.int64), None
    inputs: Tensor | EncoderDecoderInputs = tokens
    if recipe.model.is_encoder_decoder:
        targets = torch.zeros(rows, data.answer_length, dtype=torch.int64)
        inputs = EncoderDecoderInputs(tokens, torch.ones_like(tokens, dtype=torch.bool), targets.clone())
    else:
        targets = tokens.clone()
        if data.document_mask or data.has_pairs:
            # The texts may begin anywhere: transformers only looks at the positions.
            documents = Documents(tokens.clone(), torch.zeros(rows + 1, dtype=torch.int32), rows * length**2)
    return [(inputs, targets, documents)] * max(1, min(count, MICRO_BATCHES))


def _kernels(recipe: Recipe) -> AbstractContextManager[Any]:
    """Where attention and dropout are computed with the kernels that a GPU has."""
    kernels: dict[str, Any] = {"scaled_dot_product_attention": _attention_of_gpus, "dropout": _dropout_of_gpus}
    return nullcontext() if recipe.run.device == "cpu" else patch.multiple(nn.functional, **kernels)


def _attention_of_gpus(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's scaled_dot_product_attention with the kernel that it chooses on a GPU: FlashAttention, which takes no
    mask and no float32, or else the one of xFormers, in which every query head has its own key."""
    if attn_mask is None and query.dtype != torch.float32:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return cast(Tensor, kernel(query, key, value, dropout_p, is_causal, scale=scale)[0])
    if enable_gqa:
        copies = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(copies, -3) for tensor in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    found = kernel(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)
    return cast(Tensor, found[0])


def _dropout_of_gpus(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """torch's dropout with the kernel of GPUs, which keeps one byte for each element; a CPU's keeps an element."""
    return torch.native_dropout(input, p, training)[0] if training and 0 < p < 1 else input


class _Step:
    """train_step() of recipes/training/step.py, whose layer is above this one; a test holds them together."""

    def __init__(self, recipe: Recipe, mesh: Mesh) -> None:
        """Build the parallel model on the meta device."""
        self._recipe, self._mesh = recipe, mesh
        float8 = replace(recipe.float8, emulate=True, all_gather=False)
        self._fsdp = replace(recipe.fsdp, cpu_offload=False)
        self._fsdp = without_idle_resharding(mesh, self._fsdp, float8_gathers=False)
        with torch.device("meta"):
            self._model = build_model(recipe.model, loss_chunks=recipe.batch.loss_chunks)
        parallelize(
            self._model,
            mesh,
            float8=float8,
            activation_checkpointing=recipe.activation_checkpointing,
            compile=CompileConfig(enabled=False),
            fsdp=self._fsdp,
            layout=replace(recipe.mesh, overlap_tensor=False),
        )
        if recipe.compile.enabled:
            cast(SummedLoss, self._model.get_submodule(interface_of(self._model).loss)).kernels = WITHOUT_COPIES

    def allocate(self) -> None:
        """Give the model memory, which is not filled, and an optimizer."""
        self._model.to_empty(device=CPU)
        compute_with_whole_shards(self._model, self._mesh, self._fsdp)
        self._units, self._parameters = units_of(self._model), tuple(self._model.parameters())
        dtype = getattr(torch, self._fsdp.param_dtype)
        config = self._recipe.optimizer
        fields = self._recipe.fields_of("optimizer", config.name)
        self._optimizer = build_optimizer(self._model, config, self._mesh, dtype=dtype, fields=fields)

    def fullest_moment(self, batches: list[MicroBatch]) -> tuple[str, Pieces]:
        """The fullest moment. The first steps find the peak, the last its pieces."""
        live = LiveBytes()
        _name_moments(self._model, self._optimizer, live)
        live.follow(*self._parameters, *self._model.buffers(), *self._moments())
        for inputs, targets, _ in batches[:1]:
            live.follow(*(vars(inputs).values() if isinstance(inputs, EncoderDecoderInputs) else [inputs]), targets)
        for _ in range(2):
            self._take(batches, live)
        peak, found = live.peak, {}

        def note() -> None:
            if live.peak == peak:
                found.update(self._pieces(live))

        live.note = note
        self._take(batches, live)
        assert found, "two equal steps, but other peaks"
        return live.fullest, found

    def _take(self, batches: list[MicroBatch], live: LiveBytes) -> None:
        gc.collect()  # as the training loop does, and not in the middle of a step
        gc.disable()
        live.restart()
        live.moment = "the forward pass"
        try:
            with live:
                self._train(batches)
        finally:
            gc.enable()

    def _train(self, batches: list[MicroBatch]) -> None:
        for index, (inputs, targets, documents) in enumerate(batches):
            expect_micro_batch(
                self._units, is_last=index == len(batches) - 1, reshards=self._fsdp.reshard_after_forward
            )
            backward(self._model(inputs, targets, documents=documents) / 1)
        norm = gradient_norm(self._parameters)
        grad_clip = self._recipe.optimizer.grad_clip
        divisor = clipping_divisor(norm, max_norm=grad_clip) if grad_clip > 0 else None
        take_step(self._optimizer, self._parameters, skip=None, divisor=divisor)
        self._optimizer.zero_grad()

    def _moments(self) -> list[Tensor | None]:
        return [tensor for state in self._optimizer.state.values() for tensor in state.values()]

    def _pieces(self, live: LiveBytes) -> Pieces:
        """What lives now. With offloading, the device holds neither parameters nor what is sharded like them."""
        sharded: dict[str, list[Tensor | None]] = {
            "parameters": list(self._parameters),
            "moments": self._moments(),
            "reduced gradients": [parameter.grad for parameter in self._parameters],
        }
        gathered: list[Tensor | None] = []
        gradients: list[Tensor | None] = []
        for unit in self._units:
            group: Any = unit._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group else ():
                whole = getattr(parameter, "_unsharded_param", None)
                gathered.append(whole)
                gradients += [parameter.unsharded_accumulated_grad, None if whole is None else whole.grad]
        others = {"gathered weights": gathered, "gradients not yet reduced": gradients}
        found = live.divided(sharded | others, rest="activations and buffers")
        return found | dict.fromkeys(sharded, 0) if self._recipe.fsdp.cpu_offload else found


def _name_moments(model: nn.Module, optimizer: torch.optim.Optimizer, live: LiveBytes) -> None:
    """Follow which part of the model is computing."""

    def says(moment: str) -> Hook:
        return lambda *_: setattr(live, "moment", moment)

    def names(part: str, moment: str, *, after: str) -> None:
        """Name what begins with the forward pass of a part, and with the gradient of its output."""

        def forward_ends(module: nn.Module, inputs: Any, output: Any) -> None:
            first = next(
                (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad), None
            )
            if first is not None:
                first.register_hook(says(after))

        module = model.get_submodule(part)
        module.register_forward_pre_hook(says(moment))
        module.register_forward_hook(forward_ends)

    interface = interface_of(model)
    for name in interface.blocks:
        short = plain_name(name).removeprefix("model.")
        names(name, f"the forward pass of {short}", after=f"the backward pass of {short}")
    names(interface.loss, "the loss", after="the gradient of the logits")
    names(cast(str, interface.head or interface.tied_head), "the head", after="the gradient of the head")
    names(cast(str, interface.embedding), "the embedding", after="the gradient of the embedding")
    optimizer.register_step_pre_hook(says("the optimizer"))
