"""The twin of a recipe: the same kinds of layers on the same axes, in the smallest sizes, for a few steps.

It keeps every relation that the code branches on: heads over tensor and context, queries over keys, experts over their
axis, blocks over stages, windows and chunks over tokens. Imports no torch.
"""

import json
import random
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
from recipes.data.text.tokenizer import END_OF_DOCUMENT
from recipes.evaluation.config import ValidationConfig
from recipes.files.atomic import write_whole
from recipes.metrics.config import MetricsConfig, ProfileConfig
from recipes.recipe.fields import value_of, with_values
from recipes.recipe.rules import violations
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stages_of

STEPS, SAVED = 8, 4
"""Optimizer steps of a twin, and after how many it is saved."""
RATE = 3e-3
LENGTH, WIDTH, INNER, EXPERTS = 48, 48, 80, 8
"""The least tokens of a row, and widths and experts of a model; multiples of what shares them are larger."""
TEXT, OTHER, TOKENIZER = "text.jsonl", "other.jsonl", "tokenizer.json"
WORDS = 95
"""Tokens, with the end of a document. A twin's vocabulary has rows that no token has."""
FEW = 16
"""Words of the other text of a mixture. A row with others is not of it; a test looks for one of TEXT without others."""
ON_CPU = {
    "run.device": "cpu",
    "attention.backend": "auto",
    "mesh.overlap_tensor": False,
    "fsdp.symmetric_memory": False,
    "float8.emulate": True,
}
"""Values that a CPU computes with, whatever the recipe says."""
IN_FLOAT32 = {
    "fsdp.param_dtype": "float32",
    "fsdp.reduce_dtype": "float32",
    "float8.recipe": "none",
    "float8.all_gather": False,
    "float8.gather_activations": False,
    "attention.backend": "auto",
    "compile.enabled": False,
}


@dataclass(frozen=True)
class Twin:
    """A small recipe that is trained in place of a large one."""

    recipe: Recipe
    degrees: MeshDegrees
    changed: tuple[str, ...]
    """What is not as the recipe says, though it is no size, one line each."""

    def with_values(self, name: str, **values: Any) -> "Twin":
        """The same run under another name with these values, by dotted keys."""
        return replace(self, recipe=with_values(self.recipe, {"run.name": self.recipe.run.name + name, **values}))

    @property
    def exact(self) -> "Twin":
        """The same in float32, and eagerly."""
        return self.with_values("-exact", **IN_FLOAT32)

    @property
    def quiet(self) -> "Twin":
        """The same without validation and saving."""
        never = {"validation.every": 0, "validation.average": 0, "checkpoint.every": 0}
        return self.with_values("-quiet", **never)

    def clipped(self, norm: float) -> "Twin":
        """The same with this limit of gradient norms."""
        return self.with_values("", **{"optimizer.grad_clip": norm})

    @property
    def rounds(self) -> bool:
        """Whether numbers are rounded to fewer bits than those of float32."""
        fsdp, float8 = self.recipe.fsdp, self.recipe.float8.recipe
        return float8 != "none" or "bfloat16" in (fsdp.param_dtype, fsdp.reduce_dtype)

    @property
    def rounds_alike(self) -> bool:
        """Whether all processes compute whole rows with whole matrices, and round as one process does."""
        degrees, recipe = self.degrees, self.recipe
        is_tied = degrees.pipeline > 1 and recipe.model.tied_embeddings
        eager = not recipe.compile.enabled and recipe.fsdp.reduce_dtype == "float32" and recipe.batch.loss_chunks == 1
        return eager and not is_tied and degrees.tensor == degrees.context == degrees.expert == 1

    @property
    def precision(self) -> str:
        """What it computes in, and whether that is compiled."""
        float8, compiled = self.recipe.float8.recipe, self.recipe.compile.enabled
        words = [self.recipe.fsdp.param_dtype, float8 if float8 != "none" else "", "compiled" if compiled else ""]
        return ", ".join(filter(None, words))

    @property
    def about(self) -> str:
        """Its sizes."""
        model, batch = self.recipe.model, self.recipe.batch
        rows = f"{batch.global_batch_size} rows of {batch.sequence_length} tokens"
        return f"{model.layers} layers of width {model.width}, {self.recipe.run.steps} steps of {rows}"


def twins_of(recipe: Recipe, folder: Path, *, processes: int, nodes: int, on_gpu: bool) -> Iterator[Twin]:
    """The twins of all stages of a recipe, each once, on so many processes. folder: where write_words() has written."""
    seen: list[Recipe] = []
    for stage in stages_of(recipe):
        degrees, changed = degrees_for(stage.recipe.mesh, processes=processes, nodes=nodes)
        there = stage.recipe
        if not on_gpu:
            emulates = there.float8.recipe != "none"
            values = {key: value for key, value in ON_CPU.items() if emulates or key != "float8.emulate"}
            asked = {key: value_of(there, key) for key in values}
            changed += [
                f"{key} = {asked[key]} is {value} on a CPU"
                for key, value in values.items()
                if asked[key] not in (value, "auto")
            ]
            there = with_values(there, values)
        small = _twin(there, degrees, folder)
        if small not in seen:
            seen.append(small)
            yield Twin(small, degrees, tuple(changed)).with_values(f"-{len(seen)}")


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
        if getattr(mesh, axis) not in (1, -1) and left % 2 == 0:
            degrees[axis], left = 2, left // 2
    degrees["shard"] *= left
    lent = degrees["shard"] * degrees["context"] * degrees["tensor"]
    degrees["expert"] = 2 if mesh.expert > 1 and lent % 2 == 0 else 1
    asked = {axis: getattr(mesh, axis) for axis in degrees}
    return MeshDegrees(**degrees), [
        f"mesh.{axis} = {degree} is {degrees[axis]} here"
        for axis, degree in asked.items()
        if degree not in (-1, degrees[axis])
    ]


def elsewhere(twin: Twin) -> Twin | None:
    """The twin on another mesh of as many processes; None if there is none."""
    recipe, count = twin.recipe, twin.degrees.processes
    cuts = recipe.model.experts % count != 0 and recipe.optimizer.facts.orthogonalizes  # Muon wants whole experts
    for sizes in ({"replicate": 1, "shard": count},) * (not cuts) + ({"replicate": count, "shard": 1},):
        degrees = MeshDegrees(**sizes)
        if degrees != twin.degrees:
            return replace(twin.with_values("", **_of_mesh(degrees)), degrees=degrees)
    return None


def _of_mesh(degrees: MeshDegrees) -> dict[str, int]:
    return {f"mesh.{axis}": getattr(degrees, axis) for axis in (*NAMES, "expert")}


def _twin(recipe: Recipe, degrees: MeshDegrees, folder: Path) -> Recipe:
    model = (_transformers if recipe.model.by_transformers else _decoder)(recipe, degrees, folder)
    optimizer, blocks, kind = recipe.optimizer, recipe.activation_checkpointing.blocks, recipe.schedule.kind
    if isinstance(blocks, int):
        blocks = max(1, round(blocks * model.layers / recipe.model.layers))
    stages, longer = degrees.pipeline * recipe.pipeline.runs, STEPS + 2 if recipe.schedule.steps else 0
    micro, averages = min(recipe.batch.micro_batch_size, 2), recipe.validation.average > 0
    # Other meshes have up to one share of the batch for each process.
    shares = degrees.processes // gcd(degrees.processes, degrees.data_parallel)
    count = _up_to(2 * degrees.pipeline if degrees.pipeline > 1 else 3, shares)
    values: dict[str, Any] = _of_mesh(degrees) | {
        "run.steps": STEPS,
        "run.output": str(folder),
        "run.name": "twin",
        "run.continue_from": "",
        "run.hardware": "",
        "run.max_skipped_steps": STEPS,
        "run.check_replicas_every": 1,
        "batch.sequence_length": _length(recipe, degrees),
        "batch.global_batch_size": degrees.data_parallel * micro * count,
        "batch.micro_batch_size": micro,
        "batch.loss_chunks": min(recipe.batch.loss_chunks, 5),
        "pipeline.split": (*[1] * (stages - 1), model.layers - stages + 1) if recipe.pipeline.split else (),
        "checkpoint.memory_every": 0,
        "activation_checkpointing.blocks": blocks,
        "compile.autotune": False,
        "optimizer.lr": RATE,
        "optimizer.matrix_lr": RATE * min(optimizer.matrix_share, 4.0) if optimizer.matrix_lr else 0.0,
        "optimizer.qk_clip": min(optimizer.qk_clip, 0.5),  # which its logits exceed
        "optimizer.eps": max(optimizer.eps, 1e-5),  # else the smallest gradients become updates of full size
        "schedule.warmup_steps": 6 if kind == "constant" else 2,  # the rate changes after a resume
        "schedule.decay_steps": (6 if longer else 3) if kind == "wsd" else 0,
        "schedule.steps": longer,
    }
    twin = replace(
        with_values(recipe, values),
        stages=(),
        model=model,
        data=_words(recipe, folder, values["batch.sequence_length"]),
        checkpoint=CheckpointConfig(every=SAVED, asynchronous=recipe.checkpoint.asynchronous),
        metrics=MetricsConfig(
            every=1, grad_norms=recipe.metrics.grad_norms, by_source=recipe.metrics.by_source, picture=False
        ),
        validation=ValidationConfig(every=SAVED if averages else 1, batches=8, average=2 * averages),
        profile=ProfileConfig(),
    )
    if refused := [*violations(twin, None, processes=degrees.processes, elsewhere=True)]:
        problems = "; ".join(f"{key} {message}" for key, message in refused)
        raise UserError(f"--prove cannot make this recipe small, as its twin is refused: {problems}")
    return twin


def _words(recipe: Recipe, folder: Path, length: int) -> DataConfig:
    """The section for random words in rows of this length."""
    texts: dict[str, Any] = {"source": str(folder / TEXT)}
    if len(recipe.data.mixture) > 1:
        texts = {"mixture": {str(folder / TEXT): 0.7, str(folder / OTHER): 0.3}}
    data = DataConfig(
        **texts,
        tokenizer=str(folder / TOKENIZER),
        cache=str(folder / "cache"),
        document_mask=recipe.data.document_mask,
        border_targets=recipe.data.border_targets,
        validation_fraction=0.055 if length <= 4 * LENGTH else 0.2,  # 13 rows of 48: the last batch is not full
    )
    if recipe.data.has_pairs:
        data = replace(data, prompt_field="prompt", answer_field="answer")
    return replace(data, answer_length=16) if recipe.model.is_encoder_decoder else data


def write_words(folder: Path) -> None:
    """Write the files. Fields "text", "prompt" and "answer" of a row are of 2 to 40 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    draw, words = random.Random(0), {END_OF_DOCUMENT: 0} | {f"w{number}": number for number in range(1, WORDS)}

    def some(most: int, of: int) -> str:
        return " ".join(draw.choices([*words][1 : of + 1], k=draw.randint(2, most)))

    def rows(of: int) -> str:
        found = ({"text": some(40, of), "prompt": some(12, of), "answer": some(12, of)} for _ in range(600))
        return "".join(f"{json.dumps(row)}\n" for row in found)

    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    write_whole(folder / TEXT, rows(WORDS - 1))
    write_whole(folder / OTHER, rows(FEW))
    write_whole(folder / TOKENIZER, tokenizer.to_str())


def _up_to(least: int, unit: int) -> int:
    """The smallest multiple of the unit that is no less."""
    return unit * ceil(least / unit)


def _length(recipe: Recipe, degrees: MeshDegrees) -> int:
    chunks = 2 if recipe.mesh.context_by == "gather" and degrees.context > 1 else 1
    in_float8 = 16 * degrees.context if recipe.float8.recipe != "none" else 1
    return _up_to(LENGTH, lcm(chunks * degrees.context * degrees.tensor, in_float8))


def _decoder(recipe: Recipe, degrees: MeshDegrees, _: Path) -> ModelConfig:
    model, mesh, tensor = recipe.model, recipe.mesh, degrees.tensor
    unit = lcm(8 if recipe.float8.recipe == "none" else 16, degrees.shards if recipe.float8.all_gather else 1)
    # Keys of a tensor rank are enough for a context group, or are copied.
    keys_there, ratio = max(1, model.key_value_heads // mesh.tensor), model.heads // model.key_value_heads
    context = degrees.context if mesh.context_by == "heads" else 1
    keys = context * (1 + (keys_there > mesh.context)) if keys_there % mesh.context == 0 else min(keys_there, 2)
    ratio = next(n for n in range(min(ratio, 2), 2 * context + 2) if keys * n % context == 0)
    has_scale = model.attention_scale_width not in (0, model.head_width)
    further = _experts(recipe, degrees) if model.experts else {}
    if model.attention == "latent":
        further |= {"head_width": 3 * unit, "latent_width": 4 * unit, "rope_width": unit, "value_width": 2 * unit}
        further["query_latent_width"] = 5 * unit if model.query_latent_width else 0
    small = replace(
        model,
        name=CUSTOM,
        weights="",
        config="",
        upcycle=False,
        width=_up_to(WIDTH, unit),
        feed_forward_width=_up_to(INNER, unit * tensor),
        heads=ratio * keys * tensor,
        key_value_heads=keys * tensor,
        vocabulary=_up_to(WORDS + 1, unit * tensor),
        rope_original_length=16,
        window=7 if model.window else 0,
        attention_scale_width=2 * unit if has_scale else 0,
        init_std=0.1,  # attention looks somewhere
        **{"head_width": unit, **further},
    )
    stages, asked = (of.pipeline * (recipe.pipeline.runs if of.pipeline > 1 else 1) for of in (degrees, mesh))
    return _layers(model, small, least=min(stages * (2 if model.layers > asked else 1), model.layers))


def _layers(model: ModelConfig, small: ModelConfig, *, least: int) -> ModelConfig:
    """The small model with so many layers or more, until it has every kind that the model has."""

    def kinds(of: ModelConfig) -> set[tuple[bool, bool, bool]]:
        return {(of.uses_rope(n), of.window_of(n) > 0, of.is_sparse(n)) for n in range(of.layers)}

    for count in range(max(least, min(2, model.layers)), model.layers + 1):
        found = small.shortened(count)
        if kinds(found) == kinds(model):
            break
    return found


def _experts(recipe: Recipe, degrees: MeshDegrees) -> dict[str, Any]:
    """Fields of routed experts, whose number FSDP divides equally if it does so with the recipe's."""
    model, chosen, groups = recipe.model, min(recipe.model.experts_per_token, 2), min(recipe.model.expert_groups, 4)
    is_even = model.experts % degrees.per_layer == 0
    least = max(EXPERTS if is_even else EXPERTS - 2, 2 * groups, chosen * groups)
    return {
        "experts": _up_to(least, lcm(degrees.per_layer if is_even else degrees.expert, groups)),
        "experts_per_token": chosen,
        "expert_width": 32,
        "shared_experts": min(model.shared_experts, 1),
        "dense_layers": min(model.dense_layers, 1),
        "expert_groups": groups,
        "groups_per_token": groups if model.groups_per_token == model.expert_groups else 1 + (groups > 2),
    }


def _transformers(recipe: Recipe, degrees: MeshDegrees, folder: Path) -> ModelConfig:
    """The model of a small config.json, which is written to the folder."""
    from recipes.weights.locate import InitialWeights

    settings, unit, layers = recipe.model.settings, 16 * degrees.tensor, 4
    heads, vocabulary = _up_to(4, degrees.tensor), _up_to(WORDS + 1, unit)
    sizes = {
        **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 16 * heads),
        **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "moe_intermediate_size"), _up_to(96, unit)),
        **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), heads),
        **dict.fromkeys(("head_dim", "d_kv"), 16),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), layers),
        **dict.fromkeys(("num_local_experts", "num_experts"), 4),
        "sliding_window": 7,
        "vocab_size": vocabulary,
    }
    small = settings | {name: size for name, size in sizes.items() if settings.get(name) is not None}
    if keys := settings.get("num_key_value_heads"):
        grouped = keys < settings.get("num_attention_heads", keys)
        small["num_key_value_heads"] = _up_to(heads // 2 if grouped else heads, degrees.tensor)
    if settings.get("layer_types"):
        small["layer_types"] = settings["layer_types"][:layers]
    ids = {name: value for name, value in small.items() if name.endswith("_token_id") and value is not None}
    small |= {name: 0 for name, value in ids.items() if not isinstance(value, int) or value >= vocabulary}
    few = {name: settings.get(name) or 512 for name in ("n_positions", "max_position_embeddings")}
    small |= {name: 512 for name, positions in few.items() if positions < 512}
    folder = folder / f"{small.get('model_type', 'model')}-{degrees.tensor}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(small), encoding="utf-8")
    return replace(InitialWeights("", folder, str(folder)).model(), name=FROM_CONFIG, weights="", config=str(folder))
