"""Predict the seconds of a training step of a recipe on an H100 or H200, piece by piece. Nothing here is measured.

A step of M micro-batches of T tokens each, on one of N processes, with P parameters of which the blocks have B:

    products       6 x matrix parameters x T x M, at PRODUCTS of the peak of their precision
    attention      causal: 2 x layers x heads x head width x S x T x M forward, BACKWARD times that backward
    fused kernels  bytes moved, from the rows of docs/benchmarks/codegen.md
    loss           bytes per logit, from the same page, x vocabulary x T x M
    gaps           kernels launched x GAP
    weights        gathered twice (ZeRO-3) or once per micro-batch, or once per step (ZeRO-2)
    gradients      added up in float32 with each micro-batch, and reduced once per step
    optimizer      AdamW, the gradient norm and clipping, once per step
    messages       what is sent before the first product and after the last one, and what products do not hide

All bytes move at codegen.REACHED of the device's bandwidth. Left out: the embedding, the last norm, the host, data, and
tokens of other documents, with which attention does less. Each constant says where it comes from. Imports no torch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from models.config import ModelConfig
from parallel.config import MeshDegrees
from parallel.errors import UserError
from recipes.bench.codegen import BANDWIDTH, PAGE, REACHED, shape_of
from recipes.schema import Recipe

PEAK = 989.4e12
"""Dense bf16 FLOP/s of the SXM modules; twice that for float8. (NVIDIA's data sheets)"""
PRODUCTS = {"bf16": 0.73, "float8": 0.63}
"""Assumed share of the peak: 722 and 1,247 TFLOP/s. Large products reach at best about 790 and 1,450 in published
benchmarks; about a tenth less for the shapes of a block and for clocks under load."""
ATTENTION = {"cudnn": (620e12, 520e12), "flash": (340e12, 290e12), "flash3": (620e12, 520e12)}
"""Assumed FLOP/s forward and backward, heads of 128, causal, 8192 tokens. Published: FlashAttention 3 (arXiv
2407.08608), about twice as fast as FlashAttention 2, and cuDNN much like it."""
DOCUMENTS = "flash"
"""The kernel that attention within documents uses, unless another is asked for."""
BACKWARD = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: five products instead of two."""
GAP = 2e-6
"""Assumed seconds lost between two kernels: the last parts of one finish, the first of the next one start."""
OPTIMIZER = {"float32": 28, "bfloat16": 20}
"""Bytes per parameter by the type of the moments: AdamW reads parameter, gradient and moments and writes all but the
gradient. (Conversions of bfloat16 moments in passes of their own are left out.)"""
CLIPPING = 12
"""Bytes per parameter: the norm reads gradients of 4 bytes; scaling them reads and writes them."""
ACCUMULATE = 10
"""Bytes per parameter and micro-batch: a bf16 gradient is added to a float32 one, which is read and written."""
CAST = {"bf16": 6, "float8": 21}
"""Bytes per parameter to cast float32 weights for a gather: read 4, write 2; to float8 (torchao 0.18, eager) scale 8,
clamp 8, cast 5."""
COPY = {"bf16": 4, "float8": 2}
"""Bytes per parameter for each copy of what was cast: several processes copy their shard into a buffer, and all of it
out of one; one process copies once (FSDPParamGroup.wait_for_unshard of torch 2.13), except where parallel/fsdp.py
leaves that out."""
REDUCE = 8
"""Bytes per parameter to copy gradients of 4 bytes for their reduction."""
DIVIDE = 16
"""Bytes per parameter that FSDP2 adds on one process by itself: it divides gradients by a factor, even by 1, into a
temporary, and copies that (foreach_reduce of torch 2.13)."""
SCALES = 12
"""Bytes per parameter once per step for the scales of weights gathered in float8: absolute values, 8, and maxima, 4."""
NVLINK, INFINIBAND = 360e9, 40e9
"""Assumed bytes per second, GPU and direction: 80% of NVLink's 450 GB/s and of 400 Gb/s InfiniBand. Where GPUs of one
node are in the same group, each byte comes once over the network, by any of their adapters, and on over NVLink."""
NODE = 8
"""GPUs that NVLink connects."""
PIECES = (
    *("products", "output projection", "attention", "fused kernels", "loss", "gaps"),
    *("weights", "gradients", "optimizer", "messages"),
)


@dataclass(frozen=True)
class Block:
    """The generated code of one block for one micro-batch, and of the loss: a row of codegen.md."""

    model: str
    tokens: int
    float8: str
    recompute: str
    saved_kb: float
    """Kept for the backward pass, per token."""
    moved: float
    """Bytes that fused kernels read and write."""
    kernels: int
    loss_eager: float
    """Bytes per logit."""
    loss_compiled: float


@dataclass(frozen=True)
class Code:
    """What a prediction needs to know of the code, besides the recipe."""

    blocks: Sequence[Block]
    compiled_loss: bool = True
    """The loss is compiled where blocks are."""
    copies: bool = False
    """On one process FSDP2 makes all of its own copies of weights and gradients."""


@dataclass(frozen=True)
class Prediction:
    """One optimizer step of one GPU."""

    tokens: int
    seconds: dict[str, float]
    """By piece."""

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Per GPU."""
        return self.tokens / self.step_seconds


def read_blocks(page: str) -> list[Block]:
    """The rows of codegen.md, found by the names of its columns. Raises UserError if it lacks the loss of a row."""
    found, model, tokens, losses, columns = [], "", 0, dict[bool, float](), list[str]()
    for line in page.splitlines():
        if match := re.match(r"## (\w+), (\d+) x (\d+) tokens", line):
            model, tokens, losses = match[1], int(match[2]) * int(match[3]), {}
        elif "; loss" in line:  # two numbers, of which one is called eager
            parts = line.partition("; ")[2].split("; ")
            losses = {"eager" in part: float(number[0]) for part in parts if (number := re.search(r"\d+\.\d+", part))}
        elif line.startswith("| float8 |"):
            columns = [cell.strip() for cell in line.strip("|").split("|")]
        elif model and line.startswith("| ") and columns:
            row = dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
            if len(losses) < 2:
                raise UserError(f"{PAGE.name}: bytes of the loss are missing for {model}; count it without --no-loss")
            kernels = sum(int(row[kind]) for kind in ("fused", "products", "attention", "other"))
            numbers = float(row["saved kB"]), 1e9 * float(row["moved GB"]), kernels, losses[True], losses[False]
            found.append(Block(model, tokens, row["float8"], row["recompute"], *numbers))
    return found


def device_of(name: str) -> str:
    """H100 or H200, the key of codegen.BANDWIDTH. Raises UserError for a device with other rates."""
    found = re.search(r"\bH[12]00\b(?! (PCIe|NVL))", name)
    if not found:
        raise UserError(f"{name}: its rates are not known; the model knows {' and '.join(BANDWIDTH)} (SXM)")
    return found[0]


def moving_seconds(amount: float, device: str) -> float:
    """Seconds to read and write so many bytes."""
    return amount / (REACHED * BANDWIDTH[device])


def product_seconds(flops: float, kind: str) -> float:
    """Seconds of matrix products. kind: bf16 or float8."""
    return flops / (PRODUCTS[kind] * PEAK * (2 if kind == "float8" else 1))


def attention_seconds(flops: float, backend: str, *, backward: bool) -> float:
    """Seconds of one pass. flops: of the forward pass, causal."""
    forward_rate, backward_rate = ATTENTION[backend]
    return BACKWARD * flops / backward_rate if backward else flops / forward_rate


def predict(recipe: Recipe, code: Code, *, device: str, processes: int = 1) -> Prediction:
    """One step of the recipe on so many GPUs. Raises UserError, with everything that the model does not know."""
    degrees = _require_known(recipe, processes)
    batch, model = recipe.batch, recipe.model
    micro_tokens = batch.micro_batch_size * batch.sequence_length
    micro_batches = batch.global_batch_size // degrees.data_parallel // batch.micro_batch_size
    shares = _checkpointing(recipe)
    rows = {mode: _code_of(recipe, mode, code.blocks) for mode in shares}
    in_blocks = model.matmul_params() - model.vocabulary * model.width
    kind = "bf16" if recipe.float8.recipe == "none" else "float8"
    # "full" computes every product of the forward pass again, except the last one, whose result nobody needs.
    full = shares.get("full", 0.0)
    again = full * 2 * (in_blocks - model.layers * model.width * model.feed_forward_width)
    attention = 2 * model.layers * model.heads * model.head_width * batch.sequence_length * micro_tokens
    backend = _kernel_of(recipe)
    moved = sum(share * (rows[mode].per_token * micro_tokens + rows[mode].weights) for mode, share in shares.items())
    any_row = next(iter(rows.values())).block
    loss = any_row.loss_compiled if code.compiled_loss else any_row.loss_eager
    per_micro_batch = {
        "products": product_seconds((6 * in_blocks + again) * micro_tokens, kind),
        "output projection": product_seconds(6 * model.vocabulary * model.width * micro_tokens, "bf16"),
        "attention": (1 + full) * attention_seconds(attention, backend, backward=False)
        + attention_seconds(attention, backend, backward=True),
        "fused kernels": moving_seconds(model.layers * moved, device),
        "loss": moving_seconds(loss * model.vocabulary * micro_tokens, device),
        "gaps": model.layers * GAP * sum(share * rows[mode].block.kernels for mode, share in shares.items()),
    }
    seconds = {piece: micro_batches * value for piece, value in per_micro_batch.items()}
    seconds |= _states(recipe, degrees, micro_batches, device, copies=code.copies)
    hiding = sum(per_micro_batch.values())
    seconds["messages"] = _messages(recipe, degrees, micro_batches, hiding)
    return Prediction(micro_batches * micro_tokens, {piece: seconds[piece] for piece in PIECES})


def _require_known(recipe: Recipe, processes: int) -> MeshDegrees:
    reasons = {
        "compile.enabled = false: only compiled code is counted; write true": not recipe.compile.enabled,
        "mesh.tensor or mesh.context: only data parallelism is modelled; write 1": (
            recipe.mesh.tensor * recipe.mesh.context > 1
        ),
        "fsdp.cpu_offload: the host is not modelled; write false": recipe.fsdp.cpu_offload,
        'fsdp.param_dtype = "float32" is not modelled; write bfloat16': recipe.fsdp.param_dtype == "float32",
        f"attention.backend: only {', '.join(ATTENTION)} have a rate": _kernel_of(recipe) not in ATTENTION,
    }
    if wrong := [reason for reason, applies in reasons.items() if applies]:
        raise UserError("\n  ".join([f"{recipe.run.name}: its step cannot be predicted:", *wrong]))
    degrees = recipe.mesh.fit(processes, nodes=-(-processes // NODE))
    if recipe.batch.global_batch_size % (degrees.data_parallel * recipe.batch.micro_batch_size):
        raise UserError(
            f"batch.global_batch_size = {recipe.batch.global_batch_size} cannot be divided among"
            f" {degrees.data_parallel} GPUs with micro-batches of {recipe.batch.micro_batch_size}"
        )
    return degrees


def _kernel_of(recipe: Recipe) -> str:
    if recipe.data.document_mask and recipe.attention.backend == "auto":
        return DOCUMENTS
    return "flash" if recipe.attention.backend == "auto" else recipe.attention.backend


def _checkpointing(recipe: Recipe) -> dict[str, float]:
    """Mode of activation checkpointing -> the share of the blocks that have it."""
    checkpointing, layers = recipe.activation_checkpointing, recipe.model.layers
    share = len(checkpointing.recomputed(layers)) / layers
    return {mode: part for mode, part in ((checkpointing.mode, share), ("none", 1 - share)) if part}


class _Counted(NamedTuple):
    """The code of a recipe's block for micro-batches of any size."""

    block: Block
    per_token: float
    """Moved bytes."""
    weights: float
    """Moved bytes per micro-batch, for weights that are cast inside the block."""


def _code_of(recipe: Recipe, recompute: str, blocks: Sequence[Block]) -> _Counted:
    """The row of a block with this checkpointing, scaled to the recipe's micro-batch.

    The bytes for weights are what the rows with and without weights gathered in float8 differ by.
    """
    float8 = recipe.float8.recipe + ", gathered" * recipe.float8.all_gather
    tokens = recipe.batch.micro_batch_size * recipe.batch.sequence_length
    alike = [block for block in blocks if (block.model, block.recompute) == (recipe.model.name, recompute)]
    alike.sort(key=lambda block: abs(block.tokens - tokens))  # sort() is stable: the page's first among equals
    row = next((block for block in alike if block.float8 == float8), None)
    if row is None:
        raise UserError(
            f"{shape_of(recipe)}, float8 {float8}, recomputing {recompute}: docs/benchmarks/{PAGE.name} has no such"
            " row; choose a model, a float8 recipe and a checkpointing mode that it has"
        )
    gathered = next((block for block in alike if block.float8 == f"{float8}, gathered"), None)
    weights = row.moved - gathered.moved if gathered and gathered.tokens == row.tokens else 0.0
    return _Counted(row, (row.moved - weights) / row.tokens, weights)


def _states(recipe: Recipe, degrees: MeshDegrees, micro_batches: int, device: str, *, copies: bool) -> dict[str, float]:
    """Seconds per step for copies of weights and gradients, and for the optimizer."""
    model, shard = recipe.model, degrees.shard
    kind = "float8" if recipe.float8.all_gather else "bf16"
    in_blocks, rest = _params(model)
    if shard > 1:
        gather, root = ((CAST[to] + COPY[to]) / shard + COPY[to] for to in (kind, "bf16"))
    else:
        gather, root = (CAST[to] + COPY[to] * (copies or to == "float8") for to in (kind, "bf16"))
    times = 2 * micro_batches if recipe.fsdp.reshard_after_forward else 1
    root_times = micro_batches if recipe.fsdp.reshard_after_forward else 1
    moved = in_blocks * gather * times + rest * root * root_times
    if recipe.float8.all_gather:
        moved += in_blocks * SCALES / shard
    added = ACCUMULATE * micro_batches if micro_batches > 1 else 0
    reduced = REDUCE + (DIVIDE if copies and shard == 1 else 0)
    update = OPTIMIZER[recipe.optimizer.state_dtype] + (CLIPPING if recipe.optimizer.grad_clip > 0 else 4)
    return {
        "weights": moving_seconds(moved, device),
        "gradients": moving_seconds((in_blocks + rest) * (added + reduced), device),
        "optimizer": moving_seconds((in_blocks + rest) * update / shard, device),
    }


def _params(model: ModelConfig) -> tuple[int, int]:
    """Parameters of the blocks, and all others."""
    in_blocks = model.matmul_params() - model.vocabulary * model.width + 2 * model.layers * model.width
    return in_blocks, model.num_params() - in_blocks


def _messages(recipe: Recipe, degrees: MeshDegrees, micro_batches: int, hiding: float) -> float:
    """Seconds per step of messages that no product hides. hiding: seconds of computation of one micro-batch.

    The first gather (root and first block) and the last reduction (root) are always exposed. In between, a pass hides
    as much as it computes: a third of `hiding` forward, two thirds backward.
    """
    model, shard, replicas = recipe.model, degrees.shard, degrees.replicate
    if shard * replicas == 1:
        return 0.0
    in_blocks, rest = _params(model)
    rate = NVLINK if shard <= NODE else NODE * INFINIBAND
    between = NVLINK if degrees.processes <= NODE else max(1, NODE // shard) * INFINIBAND
    part = (shard - 1) / shard
    gathered = (1 if recipe.float8.all_gather else 2) * part / rate  # seconds per parameter
    reduced = (4 if recipe.fsdp.reduce_dtype == "float32" else 2) * part / rate
    reduced += 2 * 4 / shard * (replicas - 1) / replicas / between
    forward, backward = hiding / 3, 2 * hiding / 3
    zero3 = recipe.fsdp.reshard_after_forward
    exposed = gathered * in_blocks / model.layers + 2 * part / rate * rest + reduced * rest
    exposed += max(0.0, gathered * in_blocks - forward) * (micro_batches if zero3 else 1)
    exposed += max(0.0, gathered * in_blocks - backward) * (micro_batches - 1) if zero3 else 0.0
    return exposed + max(0.0, (gathered * zero3 + reduced) * in_blocks - backward)
