"""What routed experts add to the time of a block: grouped products, and rows that move. Imports no torch."""

from recipes.plan.hardware import Gpu
from recipes.plan.rates import Rates
from recipes.plan.work import Recompute, Work

DEDUPLICATED, HIDDEN = "deduplicated", "hidden"
ALL_TO_ALL = (DEDUPLICATED, HIDDEN)
"""What --assume can say of all-to-all, as of DeepEP's: that each token goes to a node, and to a process, once; that
computation of other micro-batches hides it. This program does neither."""
HALF_TILE = 64
"""Rows that a grouped product computes for nothing, on average, for each expert: its last tile is not full."""
COMPILED, EAGER = (64, 12, 20, 6, 18, 16), 2.0
"""Bytes that routing moves beside products, compiled, forward and backward, counted by hand in models/experts.py: per
token of each expert's score and of the width; per token, expert of it, and the width; per row of this process's experts
and the width, and their inner width; the same where rows come from other processes. Eager code moves twice as much."""
KERNELS, EXCHANGED, EAGER_KERNELS = 45, 15, 110
"""Kernels of a layer, of those the ones around all-to-all, and without torch.compile. Assumed."""
WAIT = 40e-6
"""Seconds in which a device has nothing to do while the host reads the sizes of messages. Assumed."""


def products(work: Work, gpu: Gpu, rates: Rates) -> tuple[float, float]:
    """Seconds of the grouped products and of the router of a sparse layer, forward and backward."""
    experts, rows = work.experts, work.expert_rows(rates.imbalance)
    assert experts is not None
    here = experts.count / experts.degree
    element, peak = work.element, rates.grouped * rates.share_of(gpu.family) * gpu.bf16_peak
    if element == 4:
        peak = rates.grouped * (gpu.float32_peak or gpu.bf16_peak / 2)

    def grouped(inner: float) -> float:
        computing = 2 * rows * work.width * experts.width / peak
        computing *= (1 + rates.depth / inner) * (1 + HALF_TILE * here / rows)
        moved = rows * (work.width + experts.width) + here * work.width * experts.width
        return max(computing, element * moved / (rates.moved * gpu.bandwidth))

    forward = 2 * grouped(work.width) + grouped(experts.width)
    of_inputs, of_weights = 2 * grouped(experts.width) + grouped(work.width), 3 * grouped(rows / here)
    router = 2 * work.own_tokens * work.width * experts.count / (0.9 * (gpu.float32_peak or gpu.bf16_peak / 2))
    return forward + router, of_inputs + of_weights + 2 * router


def moved(work: Work, rates: Rates, recompute: Recompute) -> tuple[float, float]:
    """Bytes that routing moves in a sparse layer, and its kernels."""
    experts, rows = work.experts, work.expert_rows(rates.imbalance)
    assert experts is not None
    scores, width, copies, there, inner, apart = COMPILED
    amount = work.own_tokens * (scores * experts.count + width * work.width)
    amount += work.expert_rows() * copies * work.width
    amount += rows * (there * work.width + inner * experts.width)
    amount += rows * apart * work.width if experts.degree > 1 else 0.0
    again = 1.0 if recompute == "none" else 4 / 3
    kernels = KERNELS + (EXCHANGED if experts.degree > 1 else 0) if work.compiled else EAGER_KERNELS
    return again * work.element / 2 * amount * (1.0 if work.compiled else EAGER), again * kernels


def waits(work: Work, rates: Rates, recompute: Recompute) -> float:
    """Seconds of a sparse layer in which the host reads sizes, and then queues what is around all-to-all anew."""
    assert work.experts is not None
    times = 2 if recompute == "full" else 1
    queues = EXCHANGED * rates.launch * (0.5 if work.compiled else 1.0)
    return times * (WAIT + queues) if work.experts.degree > 1 else 0.0
