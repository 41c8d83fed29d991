"""What a step reaches of a device's promised numbers: every constant of the model of time.

A constant marked (fitted) begins at the number that its source gives, or that is assumed where none is named. It is
then fitted to published measurements by `python -m tests.published.errors`, with the uncertainty that
tests/published/fit.py states. One marked (measured) is what tests/published/kernels.py finds in the record of an H200,
a share that other GPUs are assumed to reach, too. The others are counted or assumed. Calibration replaces fields.

Imports no torch.
"""

from dataclasses import dataclass

from recipes.plan.hardware import Family

SHARES = {
    "hopper": "products",
    "hopper, HBM3e": "products_h200",
    "hopper, 500 W": "products_500w",
    "ampere": "products_ampere",
}
"""Family of a GPU -> the field of Rates with the share of its peak."""


@dataclass(frozen=True)
class Rates:
    """Shares of peaks, seconds and bytes."""

    # Matrix products: flops / (share x peak) x (1 + depth / K) x (1 + wave x tile x units / (M x N)).
    products: float = 0.6896
    """(fitted) Share of the dense peak that large bfloat16 products reach on an H100 of 700 W, under load."""
    products_h200: float = 0.7437
    """(measured) The same on an H200, of single kernels, whose memory leaves more of the same power to the products."""
    products_500w: float = 0.5403
    """(fitted) The same on Meta's H100 of 500 W, whose clocks are lower under load."""
    products_ampere: float = 0.8314
    """(fitted) The same on an A100."""
    float8: float = 0.8877
    """(measured) The same for float8 products, relative to bfloat16."""
    rowwise: float = 1.037
    """(measured) Products with a scale per row relative to those with one per tensor: cuBLAS's, from CUDA 12.9 on."""
    depth: float = 138.4
    """(fitted) Columns of the inner dimension K whose time a product loses before and after its inner loop."""
    wave: float = 0.5
    """Share of a wave of tiles that is lost on average, because the last one is not full."""
    tile: float = 128 * 256
    """Elements of the result that one unit computes at a time, as cuBLAS's large kernels do."""

    # Routed experts.
    grouped: float = 0.7
    """Products of all experts as one kernel, relative to one product of as many rows. Assumed."""
    imbalance: float = 1.0
    """Rows of the experts of the fullest process, relative to the mean: equal loads."""
    assumed: frozenset[str] = frozenset()
    """What --assume says of all-to-all: the words of routing.py."""

    # Attention: causal flops / (share x peak) x (1 + ramp / S), and backward 2.5 times the flops.
    flash: float = 0.3197
    """(measured) Share of a Hopper's peak that FlashAttention 2 reaches with heads of 128."""
    cudnn: float = 0.644
    """(measured) cuDNN's attention, torch's choice on Hopper; FlashAttention 3 (arXiv 2407.08608) is much like it."""
    triton: float = 0.1911
    """(fitted) The first FlashAttention, written in Triton, about half as fast as the second (arXiv 2307.08691)."""
    attention_ampere: float = 1.8
    """Shares of FlashAttention 1 and 2 on an A100 relative to an H100: they use the A100's instructions on both."""
    attention_math: float = 0.02
    """Assumed share of the peak for attention written as two products and a softmax, which writes all scores."""
    attention_backward: float = 0.8835
    """(measured) Rate of the backward pass relative to the forward pass."""
    narrow_heads: float = 1.0
    """(fitted) Rate with heads of 64 relative to heads of 128 (both papers)."""
    ring: float = 0.7922
    """(fitted) Rate where context parallelism attends to parts and merges them, relative to whole rows: prime-rl lost
    29 and 32% of its speed with 64k tokens on 2 and 4 processes, and by exchanging heads for tokens 8% and nothing."""
    ramp: float = 500.0
    """Tokens that a sequence seems longer by: blocks on the diagonal are computed whole (both papers)."""

    # Memory.
    moved: float = 0.8764
    """(measured) Share of the bandwidth that copies reach, and casts to bfloat16; assumed of compiled kernels."""
    added: float = 0.659
    """(measured) Rate of adding gradients up in float32, relative to copies."""
    updated: float = 0.7602
    """(measured) The same of torch's fused AdamW. A compiled update is predicted to be as fast as a copy."""
    cast: float = 0.7864
    """(measured) The same of casts to float8 inside of compiled blocks."""
    cast_eager: float = 0.8474
    """(measured) The same of eager casts of weights to float8."""
    eager: float = 0.7741
    """(fitted) Share of the bandwidth that eager operators reach, by the bytes of work.py."""
    loss: float = 32.63
    """(fitted) Bytes per logit that torch's own loss moves, forward and backward, in bfloat16."""
    loss_chunked: float = 50.0
    """The same for this program's eager loss in chunks (docs/benchmarks/null_gpu.md)."""
    loss_compiled: float = 6.0
    """The same for the compiled one."""

    # The host.
    gap: float = 2e-6
    """Seconds lost between two kernels: the last tiles of one finish, the first of the next one start. Assumed."""
    launch: float = 6e-6
    """Seconds in which the host starts a kernel of eager code. Assumed; compiled code needs half."""

    # Messages.
    link: float = 0.7774
    """(fitted) Share of NVLink's bandwidth that NCCL reaches (nccl-tests: about 360 of 450 GB/s)."""
    network: float = 0.7765
    """(fitted) Share of the adapters' bandwidth that NCCL reaches between nodes."""
    hop: float = 1.5e-6
    """Seconds of a step of a ring inside a node. Assumed."""
    node_hop: float = 8.624e-06
    """(fitted) Seconds of a step of a ring that goes to the next node."""
    collective: float = 20e-6
    """Seconds to start a collective on all of its processes. Assumed."""
    beside: float = 0.2453
    """(fitted) What computation loses while NCCL's kernels run beside it: they take units and bandwidth."""
    overlapped: float = 0.6528
    """(fitted) Share of tensor-parallel messages that async tensor parallelism hides."""

    # What the plan says of itself.
    spread: float | None = None
    """How far a step may be off, as a share of it; None: as far as published rows of its kind (evidence.py)."""
    calibrated: str = ""
    """What replaced fields, such as a file; empty if nothing did."""

    def share_of(self, family: Family) -> float:
        """The share of the bfloat16 peak that large products reach."""
        share: float = getattr(self, SHARES[family])
        return share


RATES = Rates()
"""Fitted to docs/benchmarks/published_throughput.csv."""
