"""The combinations that test_combinations.py, test_pipeline.py and test_experts.py prove, as data.

A case is "replicate.shard.context.tensor:option,option". With five numbers, the first is the pipeline degree. With six,
the last is the expert degree of a model with experts. Most sizes are those of the case's twin
(recipes/lab/prove/twin.py), which also has several micro-batches, in which targets are ignored unevenly.
docs/parallelism.md shows the same. Imports no torch.
"""

import math
from typing import Any

from recipes.recipe.rules_axes import older_than

MODEL = {"layers": 2, "heads": 4, "key_value_heads": 2, "tied_embeddings": True, "no_rope_every": 2}
PIPELINE_BLOCKS = 4
MODELS: dict[str, dict[str, Any]] = {
    "untied": {"tied_embeddings": False},
    "llama3": {"tied_embeddings": False, "no_rope_every": 0, "rope_scaling": "llama3"},
    "rope": {"no_rope_every": 0},
    "six": {"layers": 6},
    "gemma": {
        **{"no_rope_every": 0, "qk_norm": "head", "norms": "both", "norm_offset": True, "embedding_scale": True},
        **{"activation": "gelu_tanh", "window": 7, "full_attention_every": 2, "attention_scale_width": 20},
        **{"rope_local_theta": 100.0, "rope_scaling": "linear", "rope_scaled_layers": "full"},
    },
    "olmo": {
        **{"no_rope_every": 0, "tied_embeddings": False, "qk_norm": "all", "norms": "after"},
        **{"window": 7, "full_attention_every": 2, "rope_scaling": "yarn", "rope_scaled_layers": "full"},
    },
    "eight_blocks": {"layers": 8},
    "sigmoid": {"router": "sigmoid", "router_bias": True, "router_scale": 2.5, "shared_experts": 1, "dense_layers": 1},
    "groups": {"expert_groups": 4, "groups_per_token": 2},
    "pattern": {
        **{"no_rope_every": 0, "no_rope_layers": (0, 3), "window": 7, "full_attention_layers": (0,)},
        **{"further_dense_layers": (1, 3), "layers": 4},
    },
    "six_experts": {"experts": 6},
    "gptoss": {
        **{
            "no_rope_every": 0,
            "tied_embeddings": False,
            "window": 7,
            "full_attention_every": 2,
            "attention_sinks": True,
        },
        **{"biases": True, "activation": "swiglu_clamped", "rope_scaling": "yarn", "rope_truncate": False},
    },
    "latent": {
        **{"no_rope_every": 0, "attention": "latent", "key_value_heads": 4, "latent_width": 32, "rope_width": 8},
        **{"value_width": 16, "head_width": 24, "query_latent_width": 40},
        **{"rope_scaling": "yarn", "rope_mscale": 1.0, "rope_attention_factor": 1.0},
    },
    "no_query_latent": {"query_latent_width": 0},
}
"""Option -> fields of the model. RoPE in all layers makes one graph of both blocks, which halves what is compiled."""
EXPERTS_MODEL = {"experts": 8, "experts_per_token": 2}
FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zbv", "interleaved_zero_bubble")
OF_STAGES = {*SCHEDULES, "split", "three"}
"""Options that are for pipelines alone."""
OF_EXPERTS = {"balance", "batch", "sigmoid", "groups", "pattern", "gptoss"}
"""Options that are for experts alone."""

FEATURES: dict[str, tuple[str, ...]] = {
    "no option": ("plain",),
    "documents": ("documents",),
    "loss chunks that do not divide the tokens": ("chunks",),
    "ZeRO-2": ("zero2",),
    "selective checkpointing": ("selective",),
    "full checkpointing": ("full",),
    "compile": ("compile",),
    "compile with selective checkpointing": ("compile", "selective"),
    "compile with full checkpointing": ("compile", "full"),
    "CPU offload": ("offload",),
    "prefetching two blocks": ("prefetch",),
    "a head of its own (untied)": ("untied",),
    "Llama 3 (untied, scaled RoPE in all layers)": ("llama3",),
    "Gemma 3 (windows, norms of heads and around parts)": ("gemma",),
    "OLMo 3 (windows, norms of all heads together and after parts)": ("olmo",),
    "latent attention (DeepSeek-V3; without latents of queries, V2-Lite)": ("latent",),
    "z-loss": ("z",),
    "Muon": ("muon",),
    "QK-clip": ("clip",),
    "bfloat16": ("bf16",),
    "gradients reduced in bfloat16": ("bf16", "reduce16"),
    "float8 tensorwise": ("tensorwise",),
    "float8 tensorwise, compiled": ("tensorwise", "compile"),
    "float8 tensorwise, weights gathered in float8": ("tensorwise", "all_gather"),
    "float8 tensorwise, activations gathered in float8": ("tensorwise", "gather_activations"),
    "float8 rowwise": ("rowwise",),
    "float8 rowwise, weight gradients in high precision": ("rowwise_with_gw_hp",),
    "stages of a given, unequal split": ("split",),
    "three stages on each process": ("three",),
    **{f'schedule "{schedule}"': (schedule,) for schedule in SCHEDULES},
    "balance loss and router z-loss": ("balance",),
    "DeepSeek-like: sigmoid, moved biases, shared experts, a dense layer": ("sigmoid",),
    "groups of experts": ("groups",),
    "balance loss over the batch": ("balance", "batch"),
    "balance loss and moved biases together": ("balance", "sigmoid"),
    "GPT-OSS (sinks, biases, clamped SwiGLU, windows)": ("gptoss",),
    "lists of layers that are dense, without a window or without rotary embeddings": ("pattern",),
}
"""Row of the page's table -> the options that a case must have to count there."""
REFUSED = {("float8 tensorwise, weights gathered in float8", "tensor"): "float8.all_gather"}
"""(row, axis) -> the field that the refusal names."""

COLUMNS = ("tensor", "context by heads", "context by gather", "tensor x context", "with shard", "with replicate")
STAGED = ("pipeline", "pipeline with shard or replicate", "pipeline with tensor or context")
EXPERT = ("expert", "expert with tensor or context", "expert with pipeline")
"""Columns of the page's table; those of pipelines and experts come last."""
PRECISIONS = ("exact", "bf16", "float8")
"""From the most exact on."""

_CASES = """
1.1.1.2  plain untied,documents,chunks zero2,full selective,half,untied offload,llama3 bf16
1.1.1.2  bf16,reduce16,prefetch,chunks tensorwise tensorwise,full,half,untied rowwise rowwise_with_gw_hp
1.1.1.2  tensorwise,gather_activations
1.1.1.2  compile,rope,selective,documents compile,rope,full,half,untied compile,rope,tensorwise
1.1.1.2  gemma,documents gemma,compile,selective gemma,tensorwise,gather_activations,full
1.1.1.2  olmo,full olmo,compile,documents olmo,rowwise,documents olmo,bf16,chunks
1.1.1.2  latent,documents latent,no_query_latent,full latent,bf16,selective latent,tensorwise latent,compile,clip
1.1.2.1  latent,documents latent,gather,no_query_latent,documents
1.2.2.2  latent,gather,clip
1.1.2.2  latent,untied latent,no_query_latent,muon,clip
1.1.2.1  gemma gemma,gather,documents gemma,compile,gather,full olmo,documents olmo,gather,selective
1.1.2.1  plain untied,documents,chunks zero2,offload full,half selective,documents llama3,documents bf16
1.1.2.1  tensorwise tensorwise,all_gather rowwise rowwise_with_gw_hp rowwise,documents
1.1.2.1  gather gather,documents gather,untied,full,offload gather,zero2 gather,bf16,selective
1.1.2.1  gather,rowwise_with_gw_hp gather,tensorwise compile,rope,bf16 compile,rope,gather,documents
1.1.1.3  documents
1.1.3.1  documents gather
1.2.1.2  plain full,prefetch untied,zero2,documents,offload bf16,reduce16 tensorwise
2.1.1.2  plain documents,full rowwise,documents
1.2.2.1  plain untied,zero2,offload,prefetch gather,chunks bf16,prefetch tensorwise,all_gather compile,rope,documents
2.1.2.1  plain documents,selective bf16,reduce16
1.1.2.2  plain untied,documents,zero2 gather,documents,chunks selective,chunks offload,untied
1.1.2.2  llama3,documents,full,prefetch bf16 rowwise rowwise_with_gw_hp tensorwise,gather_activations,documents
1.1.2.2  compile,rope,documents
1.1.4.1  documents gather,untied,documents tensorwise
1.1.1.4  documents,chunks,untied
1.2.1.2  olmo,documents gemma,zero2
1.1.2.2  gemma,documents olmo,gather,full
1.2.2.2  gather,documents
2.1.2.2  untied,chunks,offload
2.2.2.1  documents,zero2
2.2.1.2  selective
1.1.2.4  documents
1.1.4.2  untied
"""

_PIPELINES = """
2.1.1.1.1  plain gpipe,untied,documents documents,chunks,z interleaved,documents interleaved,untied,z,chunks
2.1.1.1.1  interleaved_zero_bubble,zero2,untied,documents zbv,zero2,documents zbv,zero2,full,untied
2.1.1.1.1  interleaved_zero_bubble,zero2,full,half,z full,half,documents selective,untied offload,llama3,documents
2.1.1.1.1  interleaved,three,six,selective,half split,untied,prefetch muon,untied
2.1.1.1.1  bf16,documents bf16,reduce16,interleaved bf16,untied,zbv,zero2 bf16,untied,interleaved_zero_bubble,zero2
2.1.1.1.1  tensorwise,documents rowwise,interleaved,documents tensorwise,zbv,zero2
2.1.1.1.1  latent,no_query_latent,interleaved,clip
2.1.1.1.1  gemma,documents olmo,interleaved,full
2.1.1.1.1  compile,rope,documents compile,rope,interleaved,selective
4.1.1.1.1  plain gpipe,documents,untied interleaved,eight_blocks,documents,untied zbv,zero2,eight_blocks bf16
4.1.1.1.1  split,six,z interleaved_zero_bubble,zero2,eight_blocks,untied
2.1.2.1.1  plain zbv,zero2,documents interleaved,untied,full interleaved,muon offload,documents tensorwise,all_gather
2.1.2.1.1  interleaved,prefetch,bf16,reduce16 interleaved_zero_bubble,zero2,z gpipe,zero2 zbv,zero2,muon
2.2.1.1.1  plain interleaved,documents zbv,zero2,untied rowwise
2.1.1.1.2  plain zbv,zero2,untied,documents interleaved,selective,z bf16,gpipe compile,rope,full,half,untied
2.1.1.1.2  tensorwise,gather_activations,documents olmo,documents
2.1.1.2.1  gemma,documents
2.1.1.2.1  documents gather,documents gather,interleaved,untied zbv,zero2,documents gather,bf16
2.1.1.2.1  rowwise,interleaved_zero_bubble,zero2
2.1.2.1.2  documents
2.1.1.2.2  gather,untied,interleaved
2.2.2.1.1  zbv,zero2,documents
4.1.2.1.1  interleaved,eight_blocks,documents
4.1.1.1.2  untied
"""

_EXPERTS = """
1.1.2.1.1.1  plain balance,documents sigmoid,muon
1.1.2.1.1.2  plain sigmoid,documents sigmoid,groups,balance,untied balance,full,documents selective,sigmoid,half
1.1.2.1.1.2  zero2,chunks,balance offload,untied z muon,sigmoid bf16,balance prefetch,llama3 rowwise,sigmoid
1.1.2.1.1.2  compile,rope,documents,balance compile,rope,sigmoid,selective compile,rope,full tensorwise,balance
1.1.2.1.1.1  pattern,balance,batch
1.1.2.1.1.2  gptoss,documents,balance gptoss,muon,selective gptoss,bf16,full compile,gptoss
1.1.1.1.2.2  gptoss
1.1.1.2.1.2  gptoss,documents gather,gptoss
2.1.1.1.1.1  gptoss,documents
1.1.2.2.2.2  gptoss,documents
1.1.2.1.1.2  balance,batch pattern,sigmoid,balance,batch,documents batch,balance,bf16,full
1.1.1.1.2.1  plain balance,documents sigmoid,untied balance,batch
1.1.1.1.2.2  plain balance,sigmoid,untied documents,chunks selective,balance full,half,sigmoid muon bf16
1.1.1.1.2.2  compile,rope,balance tensorwise,gather_activations rowwise,sigmoid,documents
1.1.1.2.1.1  balance balance,batch
1.1.1.2.1.2  balance,documents gather,sigmoid,groups gather,balance,untied bf16,sigmoid compile,rope,balance
1.2.1.1.1.1  sigmoid,balance balance,batch
2.1.1.1.1.1  pattern,balance,batch zbv,zero2,balance,batch interleaved,pattern,sigmoid
2.1.1.1.1.1  balance,sigmoid zbv,zero2,balance interleaved,documents,groups
1.1.4.1.1.2  plain sigmoid,balance,documents zero2,six_experts muon,sigmoid
1.1.4.1.1.4  plain sigmoid,full
1.1.4.1.1.1  six_experts,balance
1.2.2.1.1.2  balance bf16,sigmoid muon,groups
1.2.1.1.2.2  sigmoid,balance,documents
1.1.2.2.1.2  documents,balance
1.1.2.2.1.4  gather,balance,sigmoid
1.1.2.1.2.2  plain offload,balance
1.1.2.1.2.4  documents,balance,sigmoid
1.1.1.2.2.4  balance
1.1.2.1.2.2  pattern,balance,batch
2.1.2.1.1.2  balance,batch,interleaved
2.1.2.1.1.2  plain zbv,zero2,balance,sigmoid interleaved_zero_bubble,zero2,bf16 compile,rope,documents muon,sigmoid
2.1.1.1.2.2  sigmoid balance,gpipe
2.1.1.2.1.2  gather,balance
2.2.1.1.1.1  sigmoid
4.1.1.1.1.1  sigmoid,eight_blocks,interleaved
1.1.8.1.1.8  sigmoid
1.1.8.1.1.2  balance
1.2.2.1.2.4  balance,sigmoid
1.1.2.2.2.8  documents,balance latent,sigmoid,groups,clip
2.1.2.1.2.4  documents,balance
2.2.2.1.1.2  sigmoid,interleaved
"""


def options_of(case: str) -> set[str]:
    """The options of a case."""
    return set(filter(None, case.partition(":")[2].split(",")))


def features_of(case: str) -> set[str]:
    """The options by which a case counts in FEATURES."""
    options = options_of(case)
    if len(degrees_of(case)) == 5:
        options |= {schedule_of(case)}
    return options | ({"plain"} if options <= {"gather", "1f1b"} else set())


def columns_of(case: str) -> set[str]:
    """The columns of the page's table that a case counts in."""
    if len(degrees_of(case)) == 6:
        pipeline, _, _, context, tensor, _ = degrees_of(case)
        return {EXPERT[2 if pipeline > 1 else 1 if context * tensor > 1 else 0]}
    *stages, replicate, shard, context, tensor = degrees_of(case)
    if stages:
        wide = dict(zip(STAGED[1:], (replicate * shard > 1, context * tensor > 1), strict=True))
        return {column for column, is_wide in wide.items() if is_wide} or {STAGED[0]}
    by = "gather" if "gather" in options_of(case) else "heads"
    inner = {(False, True): "tensor", (True, False): f"context by {by}", (True, True): "tensor x context"}
    outer = {"with shard": shard, "with replicate": replicate}
    return {inner[context > 1, tensor > 1], *(column for column, degree in outer.items() if degree > 1)}


def schedule_of(case: str) -> str:
    """The schedule of a case with a pipeline."""
    return next((schedule for schedule in SCHEDULES if schedule in options_of(case)), "1f1b")


def degrees_of(case: str) -> tuple[int, ...]:
    """replicate, shard, context, tensor, before them that of the pipeline, and after all of experts, if it has them."""
    return tuple(map(int, case.partition(":")[0].split(".")))


def processes_of(case: str) -> int:
    """The number of processes of a case; the expert degree is borrowed from others."""
    return math.prod(degrees_of(case)[:5])


def precision_of(case: str) -> str:
    """What a case computes in, as the page's table calls it: one of PRECISIONS."""
    options = options_of(case)
    return PRECISIONS[2 if options & {*FLOAT8} else 1 if "bf16" in options else 0]


def refusal_of(case: str) -> str:
    """Why the torch that is installed cannot run a case on a CPU; "" if it can."""
    zero_bubble = options_of(case) & {"zbv", "interleaved_zero_bubble"}
    divides_experts = len(degrees_of(case)) == 6 and math.prod(degrees_of(case)[-2:]) > 1
    return older_than(2, 12) if zero_bubble or divides_experts else ""


def sections_of(case: str) -> dict[str, dict[str, Any]]:
    """The fields of a recipe that a case changes, by section."""
    options = options_of(case)
    float8 = next((kind for kind in FLOAT8 if kind in options), "none")
    pipeline = degrees_of(case)[0] if len(degrees_of(case)) > 4 else 0
    is_sparse = len(degrees_of(case)) == 6
    model = MODEL | ({"layers": PIPELINE_BLOCKS} if pipeline else {})
    model |= EXPERTS_MODEL if is_sparse else {}
    for option in sorted(options & MODELS.keys()):
        model |= MODELS[option]
    layers = model["layers"]
    kinds = [*(["bias"] if "sigmoid" in options else []), *(["loss"] if "balance" in options else [])]
    return {
        "model": model,
        "batch": {"loss_chunks": 5 if "chunks" in options else 1},
        "activation_checkpointing": {
            "mode": next((mode for mode in ("full", "selective") if mode in options), "none"),
            "blocks": 0.5 if "half" in options else "all",
        },
        "compile": {"enabled": "compile" in options},
        "float8": {
            "recipe": float8,
            "emulate": float8 != "none",
            "exclude": ("lm_head", "experts") if is_sparse else ("lm_head",),
            "all_gather": "all_gather" in options,
            "gather_activations": "gather_activations" in options,
        },
        "fsdp": {
            "param_dtype": "bfloat16" if "bf16" in options else "float32",
            "reduce_dtype": "bfloat16" if "reduce16" in options else "float32",
            "reshard_after_forward": "zero2" not in options,
            "cpu_offload": "offload" in options,
            "prefetch": 2 if "prefetch" in options else 1,
        },
        "mesh": {"context_by": "gather" if "gather" in options else "heads"},
        "optimizer": {
            "name": "muon" if "muon" in options else "adamw",
            "matrix_lr": 1e-3 if "matrix_lr" in options else 0.0,
            "state_dtype": "bfloat16" if "moments16" in options else "float32",
            "z_loss": 1e-2 if "z" in options else 0.0,
            "qk_clip": 100.0 if "clip" in options else 0.0,
        },
        "run": {"loss_spike_z": 6.0 if "spikes" in options else 0.0},
        "validation": {"average": 2 if "averages" in options else 0},
        "experts": {
            "balance": "_and_".join(kinds) or "none",
            "loss_over": "batch" if "batch" in options else "row",
            "loss_weight": 0.05,
            "bias_rate": 0.01,
            "z_loss": 0.01 if "balance" in options else 0.0,
        },
        "pipeline": {
            "schedule": schedule_of(case),
            "stages_per_rank": 3 if "three" in options else 0,
            "split": (*[1] * (pipeline - 1), layers - pipeline + 1) if "split" in options else (),
        },
    }


def _by_processes(text: str) -> dict[int, list[str]]:
    cases: dict[int, list[str]] = {}
    for mesh, *of_mesh in filter(None, map(str.split, text.splitlines())):
        cases.setdefault(processes_of(mesh), []).extend(
            f"{mesh}:{options}".removesuffix(":plain") for options in of_mesh
        )
    return dict(sorted(cases.items()))


CASES, PIPELINES, EXPERTS = map(_by_processes, (_CASES, _PIPELINES, _EXPERTS))
"""Number of processes -> its cases; those with a pipeline, and those with experts, are apart."""


def cells_of(case: str) -> set[tuple[str, str, str]]:
    """(row, column, precision) of the page's table that a case counts in."""
    rows = [row for row, options in FEATURES.items() if {*options} <= features_of(case)]
    return {(row, column, precision_of(case)) for row in rows for column in columns_of(case)}


def _covering(cases: list[str]) -> frozenset[str]:
    """A few of these cases that count in every cell in which one of them does, with few processes."""
    left, chosen = set[tuple[str, str, str]]().union(*map(cells_of, cases)), set[str]()
    while left:
        best = max(cases, key=lambda case: len(cells_of(case) & left) / processes_of(case))
        chosen.add(best)
        left -= cells_of(best)
    return frozenset(chosen)


ZERO_BUBBLE = tuple(f"2.1.1.1.1:bf16,untied,{schedule},zero2" for schedule in ("zbv", "interleaved_zero_bubble"))
"""Cases whose comparisons another test looks at, too."""
COVERING = _covering([case for some in (CASES, PIPELINES, EXPERTS) for cases in some.values() for case in cases])
COVERING |= {*ZERO_BUBBLE, "1.1.1.3:documents"}  # three processes divide nothing equally
"""The cases that CI proves; the others are `exhaustive`."""
GENERATED = ("1.1.1.2:compile,rope,selective,documents",)
"""Compiled cases that run generated code, which takes a core 45 s each; of the others the graphs run, and their code
with `pytest -m exhaustive tests/parallel/test_combinations.py`."""
