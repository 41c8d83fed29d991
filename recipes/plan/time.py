"""Predict the seconds of a training step, piece by piece.

    products       each linear's three products, by their shapes; more with "full" checkpointing
    attention      causal: 2 x layers x heads x head width x S x T forward, 2.5 times that backward
    fused kernels  bytes that all other kernels of the blocks move, by formulas in widths (work.py)
    loss           bytes per logit x vocabulary x T
    gaps           kernels launched x a gap; where the host cannot keep up, what the device waits for it
    weights        cast and copied for each gather: twice per micro-batch (ZeRO-3), or once per step (ZeRO-2)
    gradients      added up in float32 with each micro-batch, and copied for their reduction
    optimizer      AdamW or Muon without its products, the gradient norm and clipping, once per step
    Newton-Schulz  Muon's products of the process with most of them, once per step
    messages       what is sent before the first product and after the last one, and what computation does not hide

rates.py has all constants. Left out: the embedding, the last norm, data, and that attention within documents does less.
Imports no torch.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add
from typing import NamedTuple

from parallel.config import MeshDegrees
from parallel.errors import UserError
from parallel.owners import flat, newton_schulz_flops
from recipes.plan.evidence import range_of
from recipes.plan.hardware import Gpu
from recipes.plan.messages import MUON_MOVED, Messages, messages_of, muon_cost, muon_messages
from recipes.plan.rates import RATES, Rates
from recipes.plan.work import Kernel, Recompute, Work, moved_bytes, work_of
from recipes.recipe.schema import Recipe

BACKWARD = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: five products instead of two."""
ACCUMULATE = 10
"""Bytes per parameter and micro-batch: a bf16 gradient is added to a float32 one, which is read and written."""
CAST, CAST_FLOAT8 = 6, 21
"""Bytes per parameter to cast float32 weights for a gather: read 4, write 2; to float8 (torchao 0.18, eager) scale 8,
clamp 8, cast 5."""
REDUCE = 8
"""Bytes per parameter to copy gradients of 4 bytes for their reduction."""
ALONE = 4
"""Bytes per parameter, beside the gradient that is read, on one process: the message of a reduction, its own sum."""
CONVERT = 24
"""Bytes per parameter to convert bfloat16 moments to float32 for torch's fused AdamW, and back."""
SCALES = 12
"""Bytes per parameter once per step for the scales of weights gathered in float8: absolute values, 8, and maxima, 4."""
NARROW = 64
"""Width of heads with which rates.narrow_heads holds; it changes linearly up to twice that."""


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step on one device."""

    tokens: int
    """Tokens of one step divided by the number of devices."""
    seconds: dict[str, float]
    """Seconds by piece: what computes, and what is sent and not hidden. They add up to the step."""
    hidden: dict[str, float]
    """Seconds of messages behind computation, by piece."""
    spread: float
    """How far the step may be off, as a share of it."""
    evidence: str = ""
    """What that is known from."""

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.step_seconds


def step_time(recipe: Recipe, degrees: MeshDegrees, *, gpu: Gpu, rates: Rates = RATES) -> StepTime:
    """What a step of the recipe takes on a mesh of these degrees. Raises UserError for what the model does not know."""
    if recipe.fsdp.cpu_offload:
        raise UserError("fsdp.cpu_offload = true: the time of transfers to the host is not modelled; write false")
    if recipe.float8.recipe != "none" and not recipe.float8.emulate and gpu.float8_peak is None:
        raise UserError(
            f'float8.recipe = "{recipe.float8.recipe}": {gpu.name} has no float8 matrix units; write "none"'
        )
    if recipe.attention.backend == "flash3" and gpu.family == "ampere":
        raise UserError(f'attention.backend = "flash3": runs on Hopper, and {gpu.name} is older; write "auto"')
    auto: Kernel = "cudnn" if gpu.family.startswith("hopper") else "flash"  # an A100's is flash
    return time_of(work_of(recipe, degrees, per_node=gpu.per_node, auto=auto), gpu=gpu, rates=rates)


def time_of(work: Work, *, gpu: Gpu, rates: Rates = RATES) -> StepTime:
    """What this step takes."""
    (forward, backward), (head, loss) = _blocks(work, gpu, rates), _head(work, gpu, rates)
    states = _states(work, gpu, rates)
    layers = work.own_layers
    per_micro_batch = {
        "products": layers * (forward.products + backward.products),
        "output projection": head / work.pipeline,
        "attention": layers * (forward.attention + backward.attention),
        "fused kernels": layers * (forward.kernels + backward.kernels),
        "loss": loss / work.pipeline,
        "gaps": layers * (forward.gaps + backward.gaps),
    }
    seconds = {piece: work.micro_batches * value for piece, value in per_micro_batch.items()}
    messages = messages_of(work, gpu, rates, forward=sum(forward), backward=sum(backward))
    if work.newton_schulz:
        seconds["Newton-Schulz"] = _newton_schulz(work, gpu, rates)
        rounds = muon_cost(work).rounds  # what the first one gathers and the last one sends back waits
        messages.add(muon_messages(work, gpu, rates), hiding=seconds["Newton-Schulz"] * (rounds - 1) / rounds)
    seconds["products"] += rates.beside * sum(messages.hidden.values())
    return StepTime(
        round(work.micro_batches * work.tokens / (work.tensor * work.pipeline)),
        seconds | states | _bubble(work, per_micro_batch, messages) | messages.exposed,
        messages.hidden,
        *range_of(work, gpu, rates),
    )


def product_seconds(
    rows: float, columns: float, inner: float, *, gpu: Gpu, rates: Rates, element: int = 2, float8: str = "none"
) -> float:
    """Seconds of one matrix product with a result of rows x columns."""
    if element == 4:
        peak = _float32_peak(gpu)
    elif float8 != "none":
        assert gpu.float8_peak is not None
        peak = rates.float8 * rates.share_of(gpu.family) * gpu.float8_peak
        peak *= rates.rowwise if float8 == "rowwise" else 1.0
    else:
        peak = rates.share_of(gpu.family) * gpu.bf16_peak
    computing = 2 * rows * columns * inner / peak
    computing *= (1 + rates.depth / inner) * (1 + rates.wave * rates.tile * gpu.units / (rows * columns))
    moving = element * (rows * columns + inner * (rows + columns)) / (rates.moved * gpu.bandwidth)
    return max(computing, moving)


def _float32_peak(gpu: Gpu) -> float:
    """FLOP/s that products reach in float32, without the units for matrices."""
    return 0.9 * (gpu.float32_peak or gpu.bf16_peak / 2)


def attention_seconds(
    flops: float,
    kernel: str,
    *,
    gpu: Gpu,
    rates: Rates,
    head_width: int = 128,
    sequence: float = 8192,
    element: int = 2,
) -> tuple[float, float]:
    """Seconds of attention, forward and backward. flops: those of the forward pass, causal."""
    share: float = getattr(rates, {"flash3": "cudnn", "math": "attention_math"}.get(kernel, kernel))
    if gpu.family == "ampere":
        share *= rates.attention_ampere if kernel in ("flash", "triton") else 1.0
    elif gpu.family == "hopper, 500 W":
        share *= rates.products_500w / rates.products
    narrow = min(1.0, max(0.0, 2 - head_width / NARROW))
    peak = gpu.bf16_peak if element == 2 else _float32_peak(gpu)
    rate = share * peak * (1 - narrow * (1 - rates.narrow_heads)) / (1 + rates.ramp / sequence)
    forward = flops / rate
    return forward, BACKWARD * forward / rates.attention_backward


def moving_seconds(amount: float, *, gpu: Gpu, rates: Rates) -> float:
    """Seconds of compiled kernels and copies that read and write so many bytes."""
    return amount / (rates.moved * gpu.bandwidth)


class _Pass(NamedTuple):
    """Seconds of a pass of one layer for one micro-batch: the mean of those that recompute and those that do not."""

    products: float
    attention: float
    kernels: float
    gaps: float


def _blocks(work: Work, gpu: Gpu, rates: Rates) -> tuple[_Pass, _Pass]:
    share = work.recomputed
    if share in (0.0, 1.0):
        return _block(work, work.recompute if share else "none", gpu, rates)
    again, plain = _block(work, work.recompute, gpu, rates), _block(work, "none", gpu, rates)
    forward, backward = (
        _Pass(*(share * a + (1 - share) * b for a, b in zip(one, other, strict=True)))
        for one, other in zip(again, plain, strict=True)
    )
    return forward, backward


def _block(work: Work, recompute: Recompute, gpu: Gpu, rates: Rates) -> tuple[_Pass, _Pass]:
    """Both passes of one layer that recomputes like this."""
    tokens, tensor = work.tokens, work.tensor
    forward, backward, last = _linears(work, gpu, rates)
    moves, launched, waits = 0.0, 0.0, 0.0
    if work.experts:
        from recipes.plan import routing  # most models have no experts

        share, (ahead, back) = work.experts.share, routing.products(work, gpu, rates)
        forward, backward, last = forward + share * ahead, backward + share * back, 0.0
        moves, launched = (share * amount for amount in routing.moved(work, rates, recompute))
        waits = share * routing.waits(work, rates, recompute)
    again = {"none": 0.0, "selective": 0.0, "full": forward - last, "every second product": forward / 2}[recompute]
    widths = {"head_width": work.head_width, "sequence": work.sequence, "element": work.element}
    flops = 2 * work.query / tensor * work.sequence * tokens
    parts = [
        attention_seconds(flops * share, kernel, gpu=gpu, rates=rates, **widths)
        for kernel, share in work.attended_by.items()
    ]
    attention, attention_backward = (sum(both, 0.0) for both in zip(*parts, strict=True))
    if work.context > 1 and work.context_by == "ring":
        attention, attention_backward = attention / rates.ring, attention_backward / rates.ring
    amount, kernels = moved_bytes(work, recompute)
    if work.compiled and work.float8 != "none" and work.casts == "torchao":
        casts = max(0.0, amount - moved_bytes(replace(work, float8="none"), recompute)[0])
        amount += casts * (1 / rates.cast - 1)
    moving = (amount + moves) / ((rates.moved if work.compiled else rates.eager) * gpu.bandwidth)
    computing = forward + backward + again + attention + attention_backward + moving
    if recompute == "full":
        attention_backward += attention
    host = (kernels + launched) * rates.launch * (0.5 if work.compiled else 1.0)
    gaps = max((kernels + launched) * rates.gap, host - computing) + waits
    return (
        _Pass(forward, attention, moving / 3, gaps / 3),
        _Pass(backward + again, attention_backward, moving * 2 / 3, gaps * 2 / 3),
    )


def _linears(work: Work, gpu: Gpu, rates: Rates) -> tuple[float, float, float]:
    """Seconds of all linears of one layer: forward, backward, and of the last one forward."""
    linears = []
    for name, (columns, depth) in work.linears.items():
        is_row = name.split(".")[-1] in work.rows
        cut = (columns, depth / work.tensor) if is_row else (columns / work.tensor, depth)
        linears.append((*cut, "none" if name in work.plain_linears else work.float8))
    return _products_of(work.tokens, tuple(linears), work.element, gpu, rates)


@lru_cache(4096)
def _products_of(
    tokens: int, linears: tuple[tuple[float, float, str], ...], element: int, gpu: Gpu, rates: Rates
) -> tuple[float, float, float]:
    """The same for linears of (columns, depth, kind of float8)."""
    forward = backward = last = 0.0
    for columns, depth, float8 in linears:
        last, of_input, of_weight = _three_products(tokens, columns, depth, float8, element, gpu, rates)
        forward, backward = forward + last, backward + of_input + of_weight
    return forward, backward, last


def _three_products(
    tokens: int, columns: float, depth: float, float8: str, element: int, gpu: Gpu, rates: Rates
) -> list[float]:
    """Seconds of the output of one linear, of the gradient of its input and of that of its weight."""
    low = float8.removesuffix("_with_gw_hp")
    shapes = (tokens, columns, depth), (tokens, depth, columns), (columns, depth, tokens)
    kinds = low, low, low if low == float8 else "none"
    return [
        product_seconds(*shape, gpu=gpu, rates=rates, element=element, float8=kind)
        for shape, kind in zip(shapes, kinds, strict=True)
    ]


def _head(work: Work, gpu: Gpu, rates: Rates) -> tuple[float, float]:
    """Seconds of the output projection and of the loss of one micro-batch."""
    tokens, vocabulary = work.tokens, work.vocabulary / work.tensor
    float8 = work.float8 if work.float8_head else "none"
    products = sum(_three_products(tokens, vocabulary, work.width, float8, work.element, gpu, rates))
    if work.compiled_loss:
        per_logit = rates.loss_compiled * work.element / 2
    else:
        per_logit = rates.loss_chunked if work.chunked_loss else rates.loss
    logits = tokens * (work.vocabulary if work.whole_loss else vocabulary)
    return products, moving_seconds(per_logit * logits, gpu=gpu, rates=rates)


def _states(work: Work, gpu: Gpu, rates: Rates) -> dict[str, float]:
    """Seconds per step for copies of weights and gradients, and for the optimizer."""
    parts = work.tensor * work.pipeline
    in_blocks = work.layers * (work.block_params + 2 * work.width) / parts
    rest = work.vocabulary * work.width * (1 if work.tied else 2) / parts
    amounts = _state_bytes(work, in_blocks, rest, rates, shard=work.shard * work.context)
    if work.experts:
        of_experts = work.own_layers * work.expert_params
        amounts = tuple(map(add, amounts, _state_bytes(work, of_experts, 0.0, rates, shard=work.expert_shards)))
    seconds = (moving_seconds(amount, gpu=gpu, rates=rates) for amount in amounts)
    return dict(zip(("weights", "gradients", "optimizer"), seconds, strict=True))


def _state_bytes(work: Work, in_blocks: float, rest: float, rates: Rates, *, shard: int) -> tuple[float, ...]:
    """Bytes that each of them moves, as many more as it is slower than a copy.

    in_blocks, rest: parameters before FSDP deals them out to `shard` processes.
    """
    cast_root, copy_root = (CAST, 2) if work.element == 2 else (0, 0)
    cast, copy = (CAST_FLOAT8 / rates.cast_eager, 1) if work.float8_weights else (cast_root, copy_root)
    if shard > 1:
        gather, root = (cast + 2 * copy) / shard + 2 * copy, (CAST + 2 * work.element) / shard + 2 * work.element
    else:
        gather = cast + 2 if work.float8_weights else cast
        root = cast_root
    times = work.micro_batches if work.reshard else 1
    moved = in_blocks * gather * (2 if work.reshard else 1) * times + rest * root * times
    if work.float8_weights:
        moved += in_blocks * SCALES / shard
    accumulates = work.micro_batches > 1 and not work.fused_accumulation
    added = ACCUMULATE / rates.added * work.micro_batches if accumulates else 0
    if shard * work.replicate * work.tensor == 1:
        reduced = ALONE + (work.element if work.micro_batches == 1 else 4)
    else:
        reduced = REDUCE * (work.micro_batches if work.reduces_each else 1)
    update = update_bytes(work.moments, compiled=work.compiled_update) / (1 if work.compiled_update else rates.updated)
    updated = in_blocks * (MUON_MOVED if work.newton_schulz else update) + rest * update
    updated += (in_blocks + rest) * work.clipping
    return moved, (in_blocks + rest) * (added + reduced), updated / shard


def _newton_schulz(work: Work, gpu: Gpu, rates: Rates) -> float:
    """Seconds of the products of the owner with most FLOPs, as if all its matrices had the shape that takes most."""
    flops = muon_cost(work).busiest
    short, long = max({*map(flat, work.linears.values())}, key=lambda shape: newton_schulz_flops(shape, steps=1))
    seconds = flops / newton_schulz_flops((short, long), steps=1) * _one_iteration(short, long, work, gpu, rates)
    if work.experts:  # whole on a process, and multiplied there
        short, long = flat((work.experts.width, work.width))
        count = work.own_layers * work.expert_params / (short * long) / work.expert_shards
        seconds += work.newton_schulz * count * _one_iteration(short, long, work, gpu, rates)
    return seconds


def _one_iteration(short: int, long: int, work: Work, gpu: Gpu, rates: Rates) -> float:
    """Seconds of the three products of one step of Newton-Schulz."""
    shapes = (short, short, long), (short, short, short), (short, long, short)  # rows, columns, inner
    return sum(product_seconds(*shape, gpu=gpu, rates=rates, element=work.element) for shape in shapes)


def update_bytes(moments: int | str, *, compiled: bool = True) -> int:
    """Bytes per parameter of AdamW: it reads parameter, gradient and moments and writes all but the gradient.

    moments: bytes of both, or their type. compiled: else bfloat16 moments are converted for torch's fused kernel.
    """
    of_both = moments if isinstance(moments, int) else 8 if moments == "float32" else 4
    return 12 + 2 * of_both if compiled or of_both == 8 else 12 + 2 * 8 + CONVERT


def _bubble(work: Work, per_micro_batch: dict[str, float], messages: Messages) -> dict[str, float]:
    """Seconds in which a stage of a pipeline has nothing to do: at both ends of a step, and beside a slower stage.

    Gradients of weights can fill all but (processes - 1) x (forward + gradients of inputs - gradients of weights): a
    third (ZB-1P, arXiv 2401.10241). So much is left with "zbv", too, because a step begins on all processes at once.
    """
    if work.pipeline == 1:
        return {}
    tensor = sum(
        value for name, value in messages.exposed.items() if name.startswith(("messages: tensor", "messages: expert,"))
    )
    one = sum(per_micro_batch.values()) + tensor / work.micro_batches
    bubble = work.bubble * one * (work.pipeline - 1) / work.virtual
    if work.stages:
        head = (per_micro_batch["output projection"] + per_micro_batch["loss"]) * work.pipeline
        layer = (one - head / work.pipeline) * work.pipeline / work.layers
        without, last = work.stages
        slowest = max(without * layer, last * layer + head)
        return {"bubble": bubble, "unequal stages": work.micro_batches * (slowest - one)}
    if work.layers % work.pipeline == 0:  # else those with the embedding and the head have fewer layers
        head = per_micro_batch["output projection"] + per_micro_batch["loss"]
        bubble += work.micro_batches * head * (work.pipeline - 1)
    return {"bubble": bubble}
