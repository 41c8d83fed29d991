"""The twin of a recipe: the same kinds of layers on the same axes, in the smallest sizes, for a few steps.

It keeps every relation that the code branches on: heads over tensor and context, queries over keys, experts over their
axis, blocks over stages, windows and chunks over tokens. Imports no torch.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, gcd, lcm
from pathlib import Path
from typing import Any

from models.config import CUSTOM, FROM_CONFIG, ModelConfig
from parallel.axes import NAMES
from parallel.config import MeshConfig, MeshDegrees
from parallel.errors import UserError
from recipes.checkpoint.config import CheckpointConfig
from recipes.data.config import DataConfig
from recipes.evaluation.config import ValidationConfig
from recipes.lab.prove.text import TEXT, TOKENIZER, WORDS
from recipes.metrics.config import MetricsConfig, ProfileConfig
from recipes.recipe.rules import violations
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stages_of

STEPS, SAVED = 8, 4
"""Optimizer steps of a twin, and after how many it is saved."""
RATE = 3e-3
LENGTH, WIDTH, INNER, EXPERTS = 48, 48, 80, 8
"""The least tokens of a row, and widths and experts of a model; multiples of what shares them are larger."""


@dataclass(frozen=True)
class Twin:
    """A small recipe that is trained in place of a large one."""

    recipe: Recipe
    degrees: MeshDegrees
    changed: tuple[str, ...]
    """What is not as the recipe says, though it is no size, one line each."""

    @property
    def rounds(self) -> bool:
        """Whether numbers are rounded to fewer bits than those of float32."""
        fsdp, float8 = self.recipe.fsdp, self.recipe.float8.recipe
        return float8 != "none" or "bfloat16" in (fsdp.param_dtype, fsdp.reduce_dtype)

    @property
    def precision(self) -> str:
        """What it computes in, and whether that is compiled."""
        float8, dtype = self.recipe.float8.recipe, self.recipe.fsdp.param_dtype
        words = [dtype] + ([] if float8 == "none" else [f"float8 {float8}"])
        return " ".join([*words, *(["compiled"] if self.recipe.compile.enabled else [])])

    @property
    def about(self) -> str:
        """Its sizes."""
        model, batch = self.recipe.model, self.recipe.batch
        rows = f"{batch.global_batch_size} rows of {batch.sequence_length} tokens"
        return f"{model.layers} layers of width {model.width}, {STEPS} steps of {rows}"

    def clipped(self, norm: float) -> "Twin":
        """The same with this limit of gradient norms."""
        return replace(self, recipe=replace(self.recipe, optimizer=replace(self.recipe.optimizer, grad_clip=norm)))

    @property
    def exact(self) -> "Twin":
        """The same in float32, and eagerly."""
        recipe = self.recipe
        return replace(
            self,
            recipe=replace(
                recipe,
                run=replace(recipe.run, name=f"{recipe.run.name}-exact"),
                fsdp=replace(recipe.fsdp, param_dtype="float32", reduce_dtype="float32"),
                float8=replace(recipe.float8, recipe="none", all_gather=False, gather_activations=False),
                attention=replace(recipe.attention, backend="auto"),
                compile=replace(recipe.compile, enabled=False),
            ),
        )


def twins_of(recipe: Recipe, folder: Path, *, processes: int, nodes: int, device_type: str) -> Iterator[Twin]:
    """The twins of all stages of a recipe, each once, on so many processes. folder: where write_words() has written."""
    seen: list[Recipe] = []
    for stage in stages_of(recipe):
        degrees, changed = degrees_for(stage.recipe.mesh, processes=processes, nodes=nodes)
        on_device, others = _on_device(stage.recipe, device_type)
        small = _twin(on_device, degrees, folder)
        if small not in seen:
            seen.append(small)
            small = replace(small, run=replace(small.run, name=f"twin-{len(seen)}"))
            yield Twin(small, degrees, (*changed, *others))


def degrees_for(mesh: MeshConfig, *, processes: int, nodes: int) -> tuple[MeshDegrees, list[str]]:
    """The degrees of a twin's mesh, and what of them is not as in the recipe.

    Where so many processes cannot have the recipe's mesh, each axis that is larger than 1 becomes 2, from the innermost
    on for as long as there are processes; those that are left shard.
    """
    try:
        return mesh.fit(processes, nodes=nodes), []
    except UserError:
        pass
    degrees, left = dict.fromkeys(NAMES, 1), processes
    for axis in reversed(NAMES):
        asked = getattr(mesh, axis)
        if asked not in (1, -1) and left % 2 == 0:
            degrees[axis], left = 2, left // 2
    degrees["shard"] *= left
    lent = degrees["shard"] * degrees["context"] * degrees["tensor"]
    degrees["expert"] = 2 if mesh.expert > 1 and lent % 2 == 0 else 1
    written = {axis: getattr(mesh, axis) for axis in degrees}
    return MeshDegrees(**degrees), [
        f"mesh.{axis} = {asked} is {degrees[axis]} here"
        for axis, asked in written.items()
        if asked != -1 and asked != degrees[axis]
    ]


def elsewhere(twin: Twin) -> Twin | None:
    """The twin on another mesh of as many processes; None if there is none."""
    recipe, count = twin.recipe, twin.degrees.processes
    cuts = recipe.model.experts % count != 0 and recipe.optimizer.facts.orthogonalizes  # Muon wants whole experts
    meshes = ({"shard": 1 if cuts else count, "replicate": count if cuts else 1}, {"replicate": count, "shard": 1})
    for sizes in meshes:
        degrees = MeshDegrees(**sizes)
        if degrees != twin.degrees:
            mesh = replace(recipe.mesh, **{axis: getattr(degrees, axis) for axis in (*NAMES, "expert")})
            return replace(twin, recipe=replace(recipe, mesh=mesh), degrees=degrees)
    return None


def _on_device(recipe: Recipe, device_type: str) -> tuple[Recipe, list[str]]:
    """The recipe with what a CPU can compute, and what that changes."""
    if device_type == "cuda":
        return recipe, []
    changes: list[tuple[str, str, Any]] = [("attention", "backend", "auto"), ("mesh", "overlap_tensor", False)]
    changes += [("fsdp", "symmetric_memory", False)]
    changes += [("float8", "emulate", True)] if recipe.float8.recipe != "none" else []
    lines = []
    for section, name, value in changes:
        if (asked := getattr(getattr(recipe, section), name)) != value:
            lines.append(f"{section}.{name} = {asked} is {value} on a CPU")
            recipe = replace(recipe, **{section: replace(getattr(recipe, section), **{name: value})})
    return recipe, lines


def _twin(recipe: Recipe, degrees: MeshDegrees, folder: Path) -> Recipe:
    model = _transformers(recipe, degrees, folder) if recipe.model.by_transformers else _decoder(recipe, degrees)
    optimizer, blocks = recipe.optimizer, recipe.activation_checkpointing.blocks
    if isinstance(blocks, int):
        blocks = max(1, round(blocks * model.layers / recipe.model.layers))
    split = _split(degrees.pipeline * recipe.pipeline.runs, model.layers) if recipe.pipeline.split else ()
    micro = min(recipe.batch.micro_batch_size, 2)
    # Other meshes have up to one share of the batch for each process.
    shares = degrees.processes // gcd(degrees.processes, degrees.data_parallel)
    count = _up_to(2 * degrees.pipeline if degrees.pipeline > 1 else 3, shares)
    spans = {"warmup_steps": 6 if recipe.schedule.kind == "constant" else 2}  # the rate changes after a resume
    spans["decay_steps"] = 3 if recipe.schedule.kind == "wsd" else 0
    of_mesh = {axis: getattr(degrees, axis) for axis in (*NAMES, "expert")}
    averages = recipe.validation.average > 0
    run = replace(recipe.run, steps=STEPS, output=str(folder / "runs"), name="twin", continue_from="", hardware="")
    twin = Recipe(
        run=replace(run, max_skipped_steps=STEPS, check_replicas_every=1),
        model=model,
        data=_data(recipe, folder),
        batch=replace(
            recipe.batch,
            sequence_length=_length(recipe, degrees),
            global_batch_size=degrees.data_parallel * micro * count,
            micro_batch_size=micro,
            loss_chunks=min(recipe.batch.loss_chunks, 5),
        ),
        mesh=replace(recipe.mesh, **of_mesh),
        pipeline=replace(recipe.pipeline, split=split),
        attention=recipe.attention,
        float8=replace(recipe.float8, sample_every=0),
        activation_checkpointing=replace(recipe.activation_checkpointing, blocks=blocks),
        compile=replace(recipe.compile, autotune=False, cache=""),
        fsdp=recipe.fsdp,
        optimizer=replace(
            optimizer,
            lr=RATE,
            matrix_lr=RATE * optimizer.matrix_share if optimizer.matrix_lr else 0.0,
            eps=max(optimizer.eps, 1e-5),  # else the smallest gradients become updates of full size
        ),
        experts=recipe.experts,
        schedule=replace(recipe.schedule, **spans),
        checkpoint=CheckpointConfig(every=SAVED, asynchronous=recipe.checkpoint.asynchronous),
        metrics=MetricsConfig(every=1, grad_norms=recipe.metrics.grad_norms, picture=False),
        validation=ValidationConfig(every=SAVED if averages else 1, batches=2, average=2 * averages),
        profile=ProfileConfig(),
    )
    refused = [*violations(twin, None, processes=degrees.processes, elsewhere=True)]
    assert not refused, f"a twin that is refused: {refused}"
    return twin


def _data(recipe: Recipe, folder: Path) -> DataConfig:
    pairs = {"prompt_field": "prompt", "answer_field": "answer"} if recipe.data.has_pairs else {}
    return DataConfig(
        source=str(folder / TEXT),
        tokenizer=str(folder / TOKENIZER),
        cache=str(folder / "cache"),
        document_mask=recipe.data.document_mask,
        validation_fraction=0.2,
        answer_length=min(recipe.data.answer_length, 16)
        if recipe.model.is_encoder_decoder
        else DataConfig.answer_length,
        **pairs,
    )


def _unit(recipe: Recipe) -> int:
    """What widths are multiples of."""
    return 16 if recipe.float8.recipe != "none" else 8


def _up_to(least: int, unit: int) -> int:
    """The smallest multiple of the unit that is no less."""
    return unit * ceil(least / unit)


def _length(recipe: Recipe, degrees: MeshDegrees) -> int:
    chunks = 2 if recipe.mesh.context_by == "gather" and degrees.context > 1 else 1
    in_float8 = 16 * degrees.context if recipe.float8.recipe != "none" else 1
    return _up_to(LENGTH, lcm(chunks * degrees.context * degrees.tensor, in_float8))


def _split(stages: int, layers: int) -> tuple[int, ...]:
    """Unequal stages."""
    return (*[1] * (stages - 1), layers - stages + 1)


def _decoder(recipe: Recipe, degrees: MeshDegrees) -> ModelConfig:
    model, mesh, tensor = recipe.model, recipe.mesh, degrees.tensor
    shards = degrees.shards if recipe.float8.all_gather else 1  # these have whole rows
    unit = lcm(_unit(recipe), shards)
    head_width = unit if recipe.float8.recipe != "none" else 8
    per_process, ratio = max(1, model.key_value_heads // mesh.tensor), model.heads // model.key_value_heads
    context = degrees.context if mesh.context_by == "heads" else 1
    keys = (1 + (per_process > mesh.context)) * context if per_process % mesh.context == 0 else 1
    ratio = next(n for n in range(min(ratio, 2), 2 * context + 2) if keys * n % context == 0)
    scale = 2 * head_width if model.attention_scale_width not in (0, model.head_width) else 0
    changes: dict[str, Any] = {
        "name": CUSTOM,
        "weights": "",
        "config": "",
        "upcycle": False,
        "width": _up_to(WIDTH, unit),
        "feed_forward_width": _up_to(INNER, unit * tensor),
        "heads": ratio * keys * tensor,
        "key_value_heads": keys * tensor,
        "head_width": head_width,
        "vocabulary": _up_to(WORDS + 1, unit * tensor),
        "rope_original_length": 16,
        "window": 7 if model.window else 0,
        "attention_scale_width": scale,
        "init_std": 0.1,  # attention looks somewhere
    }
    small = replace(model, **changes, **(_experts(recipe, degrees) if model.experts else {}))
    stages = degrees.pipeline * recipe.pipeline.runs if degrees.pipeline > 1 else 1
    asked = mesh.pipeline * recipe.pipeline.runs if mesh.pipeline > 1 else 1
    return _layers(model, small, least=stages * (2 if model.layers > asked else 1))


def _layers(model: ModelConfig, small: ModelConfig, *, least: int) -> ModelConfig:
    """The small model with so many layers or more, until it has every kind that the model has."""

    def kinds(of: ModelConfig) -> set[tuple[bool, bool, bool]]:
        return {(of.uses_rope(n), of.window_of(n) > 0, of.is_sparse(n)) for n in range(of.layers)}

    for count in range(max(least, 2 if model.layers > 1 else 1), model.layers + 1):
        without = tuple(layer for layer in model.no_rope_layers if layer < count)
        found = replace(small, layers=count, no_rope_layers=without)
        if len(kinds(found)) == len(kinds(model)):
            break
    return found


def _experts(recipe: Recipe, degrees: MeshDegrees) -> dict[str, Any]:
    model, mesh = recipe.model, recipe.mesh
    chosen = min(model.experts_per_token, 2)
    groups, of_groups = min(model.expert_groups, 4), min(model.groups_per_token, model.expert_groups)
    kept = groups if of_groups == model.expert_groups else max(1, of_groups * groups // model.expert_groups)
    sharing = degrees.per_layer // degrees.expert

    def is_even(experts: int, expert: int, sharing: int) -> bool:
        return experts // expert % sharing == 0

    try:
        asked = mesh.fit(None).per_layer // mesh.expert
    except UserError:
        asked = 1
    even = is_even(model.experts, mesh.expert, asked)
    unit = lcm(degrees.expert, groups)
    least = max(EXPERTS, chosen * groups, 2 * groups)
    experts = (
        next(
            n
            for n in range(_up_to(least if even else 6, unit), 10**6, unit)
            if is_even(n, degrees.expert, sharing) == even
        )
        if even or sharing > 1
        else _up_to(least, unit)
    )
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_width": 32,
        "shared_experts": min(model.shared_experts, 1),
        "dense_layers": min(model.dense_layers, 1),
        "expert_groups": groups,
        "groups_per_token": kept,
    }


SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), "width"),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "moe_intermediate_size"), "inner"),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), "heads"),
    **dict.fromkeys(("head_dim", "d_kv"), "head"),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), "layers"),
}
"""Names of sizes in a config.json of transformers -> which of a twin's they get."""


def _transformers(recipe: Recipe, degrees: MeshDegrees, folder: Path) -> ModelConfig:
    """The model of a small config.json, which is written to the folder."""
    from recipes.weights.locate import InitialWeights

    settings, tensor = recipe.model.settings, degrees.tensor
    heads, layers = _up_to(4, tensor), 4
    sizes = {"width": 16 * heads, "inner": _up_to(96, 16 * tensor), "heads": heads, "head": 16, "layers": layers}
    small = settings | {name: sizes[kind] for name, kind in SMALL.items() if settings.get(name) is not None}
    keys = settings.get("num_key_value_heads")
    if keys is not None:
        asked = next(settings[name] for name in ("num_attention_heads", "n_head") if name in settings)
        small["num_key_value_heads"] = heads if keys == asked else max(1, heads // 2) if keys > 1 else 1
        small["num_key_value_heads"] = _up_to(small["num_key_value_heads"], tensor)
    small |= {name: value[:layers] for name, value in settings.items() if name == "layer_types" and value}
    small |= {name: 7 for name in ("sliding_window",) if settings.get(name)}
    small |= {name: min(settings[name], 8) for name in ("num_local_experts", "num_experts") if name in settings}
    small["vocab_size"] = vocabulary = _up_to(WORDS + 1, 16 * tensor)
    tokens = [name for name in settings if name.endswith("_token_id") and isinstance(settings[name], int)]
    small |= {name: 0 for name in tokens if settings[name] >= vocabulary}
    path = folder / f"{settings.get('model_type', 'model')}-{tensor}" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(small), encoding="utf-8")
    model = InitialWeights("", folder, str(path.parent)).model()
    return replace(model, name=FROM_CONFIG, weights="", config=str(path.parent))
