"""The parallel model of a recipe and its optimizer. The order of the calls is the order of the build."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from models.config import ModelConfig
from models.decoder import build_model
from models.hf import require_as_declared
from models.interface import interface_of, require_interface
from parallel.dist import World, allocator_settings, communication_backend, on_all
from parallel.errors import UserError
from parallel.float8_limits import advice
from parallel.fsdp import compute_with_whole_shards, materialize, without_idle_resharding
from parallel.kernels import choose_attention, kernel_of_auto
from parallel.mesh import Mesh, build_mesh
from parallel.nodes import placement
from parallel.order import parallelize
from parallel.passes import Passes
from recipes.optimization.optimizer import build_optimizer, matrices_of, require_as_described
from recipes.recipe.schema import Recipe

if TYPE_CHECKING:
    from parallel.stages import Stages
    from recipes.optimization.after_step import AttentionLogits, Balance
    from recipes.weights.locate import Weights


@dataclass(frozen=True)
class Built:
    """A parallel model, its optimizer, and how they are stepped."""

    mesh: Mesh
    model: nn.Module
    passes: Passes
    """Computes the gradients of a step."""
    optimizer: Optimizer
    parameters: tuple[nn.Parameter, ...]
    """The parameters of the model, as sharding left them."""
    roles: Mapping[str, tuple[nn.Parameter, ...]]
    """Role -> the parameters that have it; empty unless the recipe asks for their gradient norms."""
    notes_rows: bool
    """Whether logged steps note the loss of each row, for those of sources."""
    balance: "Balance | None"
    """Keeps the loads of experts equal; None for a model without experts."""
    logits: "AttentionLogits | None"
    """Knows the largest logits of attention, and lowers them; None unless the recipe asks."""
    attention: str
    """The kernel of the decoder's attention: as in the recipe, or what torch chooses."""
    # The next two are as in the recipe.
    grad_clip: float
    float8_all_gather: bool
    report: tuple[str, ...]
    """What each part of the parallelization did, one line per part."""


def build(recipe: Recipe, world: World, *, weights: "Weights | None" = None, mesh: Mesh | None = None) -> Built:
    """Build the parallel model of a recipe and its optimizer, on this process's device.

    weights: trained weights to start from; None = random ones from the recipe's seed. mesh: None makes the recipe's.
    Raises UserError, on all processes, for weights that cannot be read and for what this device does not have.
    """
    fields = recipe.fields_of("optimizer", recipe.optimizer.name)
    require_as_described(recipe.optimizer, fields)
    mesh = _whole_mesh(recipe, world, mesh)
    fsdp = without_idle_resharding(mesh, recipe.fsdp, float8_gathers=recipe.float8.all_gather)
    stages = own = None
    if mesh.pipeline is not None:
        stages = recipe.pipeline_stages(mesh.pipeline.size())
        own = stages.layers_of(mesh.pipeline.get_local_rank())
    model = plain_model(recipe, own, device_type=world.device.type)
    report = [f"blocks: {model.about}"] if recipe.model.by_transformers else []
    report += placement(mesh.degrees, world.nodes)
    cut = f"pipeline parallelism: {recipe.pipeline.schedule}, {stages}; the counts below are rank 0's"
    report += [cut] if stages else []
    attention, lines = _kernels(recipe, world.device)
    report += [*lines, *advice(recipe.mesh, float8=recipe.float8, degrees=mesh.degrees)]
    report += parallelize(
        model,
        mesh,
        float8=recipe.float8,
        activation_checkpointing=recipe.activation_checkpointing,
        compile=recipe.compile,
        fsdp=fsdp,
        layout=recipe.mesh,
    )
    keep_on = torch.device("cpu") if fsdp.cpu_offload else None
    try:
        materialize(model, device=world.device, keep_on=keep_on, seed=recipe.run.seed)
    except ValueError as error:  # only asking shows which values a model of transformers does not start from
        raise UserError(f"model: {error}") from error
    compute_with_whole_shards(model, mesh, fsdp)
    if weights is not None:
        from recipes.weights.convert import load_weights

        on_all(world, lambda: load_weights(model, weights))
    dtype, compiled = getattr(torch, fsdp.param_dtype), world.device.type == "cuda" and recipe.compiles_updates
    optimizer = build_optimizer(model, recipe.optimizer, mesh, dtype=dtype, compiled=compiled, fields=fields)
    if matrices := matrices_of(optimizer):
        count = sum(prod(matrix.shape[:-2]) for matrix in matrices)
        report.append(f"{recipe.optimizer.name}: {count} matrices of the blocks, {fsdp.param_dtype} products")
    return Built(
        mesh,
        model,
        passes=_passes(recipe, model, mesh, stages, reshards=fsdp.reshard_after_forward),
        optimizer=optimizer,
        parameters=tuple(model.parameters()),
        roles=_roles(model, recipe.model if stages else None) if recipe.metrics.grad_norms else {},
        notes_rows=recipe.metrics.by_source and len(recipe.data.sources) > 1,
        balance=_balance(recipe, model, mesh),
        logits=_logits(recipe, model, mesh),
        attention=attention,
        grad_clip=recipe.optimizer.grad_clip,
        float8_all_gather=recipe.float8.all_gather,
        report=tuple(report),
    )


def _whole_mesh(recipe: Recipe, world: World, mesh: Mesh | None) -> Mesh:
    """The mesh, or without one that of the recipe, with the groups that experts need."""
    if mesh is None:
        mesh = build_mesh(recipe.mesh.fit(world.size, nodes=len(world.nodes)), device_type=world.device.type)
    if not recipe.model.experts or mesh.experts is not None:
        return mesh
    from parallel.experts import with_experts

    return with_experts(mesh)


def _passes(recipe: Recipe, model: nn.Module, mesh: Mesh, stages: "Stages | None", *, reshards: bool) -> Passes:
    options = {"reshards": reshards, "has_z_loss": recipe.optimizer.z_loss > 0}
    if stages is None:
        seed = recipe.run.seed if interface_of(model).draws_random else None
        return Passes(model, mesh, **options, dropout_seed=seed)
    from parallel.pipeline import Pipeline

    return Pipeline(
        model,
        mesh,
        config=recipe.model,
        stages=stages,
        schedule=recipe.pipeline.schedule,
        dtype=getattr(torch, recipe.fsdp.param_dtype),
        compiled=recipe.compile.enabled,
        **options,
    )


def _balance(recipe: Recipe, model: nn.Module, mesh: Mesh) -> "Balance | None":
    if not recipe.model.experts:
        return None
    from recipes.optimization.after_step import Balance  # also for a stage without experts: all stages add up loads

    return Balance(model, mesh, recipe.experts, whole=recipe.model)


def _logits(recipe: Recipe, model: nn.Module, mesh: Mesh) -> "AttentionLogits | None":
    if recipe.metrics.attention_logits or recipe.optimizer.qk_clip:
        from recipes.optimization.after_step import AttentionLogits  # most runs do not ask

        return AttentionLogits(model, mesh, whole=recipe.model, limit=recipe.optimizer.qk_clip)
    return None


def _kernels(recipe: Recipe, device: torch.device) -> tuple[str, list[str]]:
    """Built.attention, and lines for the log."""
    model, batch, dtype = recipe.model, recipe.batch, getattr(torch, recipe.fsdp.param_dtype)
    masked = recipe.data.document_mask or recipe.data.has_pairs or recipe.mesh.gathers_tokens
    kernel: str = recipe.attention.backend
    on_gpu = device.type == "cuda"
    lines = [f"GPU memory: {allocator_settings()}", f"messages: {communication_backend('cuda')}"] if on_gpu else []
    if torch.are_deterministic_algorithms_enabled():
        from parallel.determinism import lines_about

        lines += lines_about()
    lines += choose_attention(recipe.attention, device_type=device.type, dtype=dtype, masked=masked)
    # A bias of positions, which an encoder-decoder model adds, has kernels of its own.
    if kernel == "auto" and not model.is_encoder_decoder:
        tokens = batch.micro_batch_size, batch.sequence_length
        kernel, line = kernel_of_auto(model, dtype=dtype, tokens=tokens, masked=masked, device=device)
        lines += [line] if on_gpu else []
    if on_gpu and model.experts and dtype == torch.float32:
        slow = "warning: on GPUs, experts in float32 are computed one after the other (torch's grouped products)"
        lines.append(f'{slow}; write fsdp.param_dtype = "bfloat16"')
    return kernel, lines


def _roles(model: nn.Module, whole: ModelConfig | None) -> dict[str, tuple[nn.Parameter, ...]]:
    """As of Built.roles. whole: the model that this one is a part of; every process has all of its roles, in order."""
    from models.roles import parameters_by_role

    roles = parameters_by_role(model)
    if whole is None:
        return roles
    with torch.device("meta"):
        one_block = build_model(replace(whole, layers=1, dense_layers=0, sparse_every=0, further_dense_layers=()))
    return {role: roles.get(role, ()) for role in parameters_by_role(one_block)}


def plain_model(recipe: Recipe, layers: Collection[int] | None = None, *, device_type: str) -> nn.Module:
    """The model on the meta device, or the part with these layers.

    Raises UserError for one of transformers that cannot be trained as asked.
    """
    try:
        with torch.device("meta"):
            chunks, z_loss = recipe.batch.loss_chunks, recipe.optimizer.z_loss
            model = build_model(recipe.model, layers=layers, loss_chunks=chunks, z_loss=z_loss)
        require_interface(model)
        if not recipe.model.by_transformers:
            require_as_declared(recipe.model, {name: tuple(one.shape) for name, one in model.named_parameters()})
        if recipe.model.by_transformers:
            from models.assumptions import require_sound_recomputation
            from models.transformers import require_causal, require_kernels

            if device_type == "cpu" and recipe.compile.enabled and recipe.activation_checkpointing.mode != "none":
                require_sound_recomputation(model)
            require_kernels(recipe.model, backend=recipe.attention.backend)
            packs_pairs = recipe.data.has_pairs and not recipe.model.is_encoder_decoder
            require_causal(recipe.model, documents=recipe.data.document_mask or packs_pairs)
    except ValueError as error:
        raise UserError(f"model: {error}") from error
    return model
