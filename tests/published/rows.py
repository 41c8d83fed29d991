"""Published measurements of other programs, each stated as the Work of one step.

What is known of a program is said here: how Megatron shares optimizer states, which kernel a program's attention is,
what is copied and gathered. Nothing here is fitted. Imports no torch.
"""

import csv
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipes.plan.hardware import GPUS, Gpu
from recipes.plan.work import Recompute, Work, work_of
from recipes.recipe.load import CONFIGS, load

TABLE = CONFIGS.parent / "docs/benchmarks/published_throughput.csv"
EXPERTS = TABLE.with_name("published_experts.csv")
"""Rows that are in no fit, each with the options of a recipe, and what its program does with all-to-all."""
PLAIN = ("--mesh.expert", "1", "--activation_checkpointing.blocks", "all")
"""What these options begin from, besides the recipe of Qwen3-30B."""
PROJECTS = {
    "llm-foundry": "mosaicml/llm-foundry",
    "NVIDIA": "NVIDIA",
    "torchtitan": "torchtitan",
    "torchao": "pytorch/ao",
    "KempnerForge": "KempnerInstitute/KempnerForge",
    "fms-fsdp": "foundation-model-stack/fms-fsdp",
}
"""Project -> what its sources are named after; the first that a source contains counts. Others are their own."""
NUMBERS = {
    **{"layers": "layers", "width": "hidden", "query": "hidden", "inner": "ffn", "vocabulary": "vocab"},
    **{"replicate": "replicate", "shard": "shard", "context": "cp", "tensor": "tp", "pipeline": "pp", "virtual": "vp"},
    **{"sequence": "seq", "micro_batch": "micro_batch", "micro_batches": "accum"},
}
"""Field of Work -> the column of the table that has it."""
DEVICES = {"A100-80": "A100", "H100-500W-96GB": "H100-500W"}
"""Names of the table -> names of ours, where they differ."""
ELASTIC = "400 Gb/s per node"
"""torchtitan does not say what connected its A100s; its job script sets the fabric of AWS for them, which has that."""
RECOMPUTE: dict[str, tuple[Recompute, float]] = {
    "none": ("none", 0.0),
    "full": ("full", 1.0),
    "selective": ("selective", 1.0),
    "selective_op2": ("every second product", 1.0),
    "alternate_layer": ("full", 0.5),
    "fraction": ("full", 0.5),  # not published which: the middle
}
"""How activations are recomputed, and in which share of the layers."""


@dataclass(frozen=True)
class Published:
    """One row of the table."""

    project: str
    trust: str
    """A: as published; B: something was assumed."""
    name: str
    """Model, GPUs and layout, to tell rows apart."""
    measured: float
    """Tokens per second and GPU."""
    work: Work
    gpu: Gpu
    line: Mapping[str, str]
    """The row as it is in the table."""


def read_published() -> list[Published]:
    """All rows, in the order of the file."""
    return [_published(row) for row in csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines())]


def read_experts() -> list[Published]:
    """The rows that are stated as recipes: those with experts, and of a B200."""
    rows = []
    for row in csv.DictReader(EXPERTS.read_text(encoding="utf-8").splitlines()):
        words, gpu, processes = shlex.split(row["recipe_options"]), GPUS[row["gpu"]], int(row["gpus"])
        recipe = load(CONFIGS / "qwen3_30b_a3b_16x8h100.toml", [*PLAIN, *words], rules=False)
        degrees = recipe.mesh.fit(processes, nodes=-(-processes // gpu.per_node))
        work = work_of(recipe, degrees, per_node=gpu.per_node)
        if "Megatron" in row["source"]:
            work = replace(work, fused_accumulation=True, casts="te, current")
        if work.experts:
            work = replace(work, experts=replace(work.experts, assumed=frozenset(row["all_to_all"].split())))
        name = f"{recipe.model.name}, {processes} {gpu.name}, {degrees}"
        rows.append(Published("NVIDIA", row["trust"], name, float(row["tok_s_gpu"]), work, gpu, row))
    return rows


def _published(row: dict[str, str]) -> Published:
    gpu = GPUS[DEVICES.get(row["gpu"], row["gpu"])]
    if "4 GPUs per node" in row["interconnect"]:
        gpu = replace(gpu, per_node=4, switched=False)  # such boards have no switch
    network = ELASTIC if "torchtitan" in row["source"] and gpu.name == "A100" else row["interconnect"]
    if match := re.search(r"(\d+) Gb/s.* per node", network):
        gpu = replace(gpu, network=1e9 * int(match[1]) / 8 / gpu.per_node)
    work = work_of_row(row, per_node=gpu.per_node)
    source = row["source"].lower()
    project = next((name for name, part in PROJECTS.items() if part.lower() in source), row["source"])
    return Published(project, row["trust"], _name(row), float(row["tok_s_gpu"]), work, gpu, row)


def _name(row: dict[str, str]) -> str:
    degrees = [f"{axis} {row[axis]}" for axis in ("tp", "pp", "cp") if row[axis] != "1"]
    float8 = [] if row["float8"] == "none" else [row["float8"]]
    note = ["async TP"] if "async TP" in row["note"] else []
    batch = f"{row['micro_batch']} x {row['seq']}" + (f" x {row['accum']}" if row["accum"] != "1" else "")
    return ", ".join([f"{row['model']}, {row['gpus']} {row['gpu']}", batch, *degrees, *float8, *note])


def work_of_row(row: dict[str, str], *, per_node: int) -> Work:
    """A step of this row of the table."""
    numbers: dict[str, Any] = {field: int(row[column]) for field, column in NUMBERS.items()}
    head_width = int(row["hidden"]) // int(row["heads"])
    mode, share = RECOMPUTE[row["ac"]]
    work = Work(
        **numbers,
        key=int(row["kv_heads"]) * head_width,
        head_width=head_width,
        tied=row["tied"] == "1",
        gated=row["gated"] == "1",
        context_by="ring",
        float8="rowwise" if row["float8"] == "rowwise" else "none" if row["float8"] == "none" else "tensorwise",
        recompute=mode,
        recomputed=share,
        compiled=row["compile"] == "1",
        compiled_loss=False,
        # MPT's ALiBi needs llm-foundry's kernel in Triton: its tables are older than FlashAttention 2's ALiBi.
        kernel="triton" if "ALiBi" in row["attention"] else "cudnn" if row["attention"] == "cudnn" else "flash",
        reshard=row["zero"] == "3" and row["pp"] == "1",  # torchtitan keeps gathered weights in a pipeline
        per_node=per_node,
    )
    return replace(work, **_habits(row))


def _habits(row: dict[str, str]) -> dict[str, Any]:
    """Fields of Work by what each program does."""
    framework, float8 = row["framework"], row["float8"]
    if "Megatron" in framework or "NeMo" in framework:
        return {
            "shard": int(row["replicate"]) * int(row["shard"]),  # the distributed optimizer: gathers and sums once
            "replicate": 1,
            "compiled": True,  # Transformer Engine's kernels are fused like generated ones
            "compiled_loss": True,
            "fused_accumulation": True,
            "copies_tokens": False,  # sequences are the first dimension
            "context_by": "gather",  # a ring on two streams, which hide its merges and messages in each other
            "overlap_tensor": True,
            "casts": "te, current" if float8 == "te_current" else "te, delayed",
        }
    if framework.startswith("composer"):
        return {
            "reduces_each": True,
            "reduced": 2 if row["dtype"] == "bf16" else 4,  # its "PURE" and "DEFAULT" mixed precision
            "casts": "te, each" if float8.startswith("te") else "torchao",
        }
    if framework.startswith("KempnerForge"):
        tensor = int(row["tp"]) > 1
        return {"scatters": 5, "whole_loss": tensor}  # each of its five projections reads for itself; all gather logits
    if framework == "FSDP1 + compile":
        return {"reduced": 2}  # its only policy of mixed precision
    return {
        "float8_weights": "fp8ag" in float8,
        "float8_activations": float8.startswith("tensorwise") and int(row["tp"]) > 1,
        "overlap_tensor": "async TP" in row["note"],
    }


def projects(rows: Sequence[Published]) -> list[str]:
    """The projects in the order of the table."""
    return list(dict.fromkeys(row.project for row in rows))
