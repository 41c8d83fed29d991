"""Time the operations of a training step on this device: matrix products, attention, the optimizer, copies. Every
measurement is one object: the operation, its shape, the median seconds and the rates that follow from them. An
operation that the device cannot do has an "error" instead, and the suite continues."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from models.config import ModelConfig
from recipes.metrics.breakdown import ATTENTION_NAMES
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer

Measurement = dict[str, Any]
FORWARD, INPUT, WEIGHT = "forward", "gradient of the input", "gradient of the weight"
BACKENDS = {
    "cuda": {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION},
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH},
}
WARM_UP = 3


def seconds_of(call: Callable[[], Any], device: torch.device, *, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls after a warm-up; on CUDA measured with events on the device."""
    for _ in range(WARM_UP):
        call()
    if device.type != "cuda":
        found = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
        return found
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    pairs = list(zip(marks[::2], marks[1::2], strict=True))
    for before, after in pairs:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def measured(
    facts: Measurement, call: Callable[[], Any], device: torch.device, *, repeats: int, **amounts: float
) -> Measurement:
    """`facts` plus the median seconds, or plus the error that the call raised. amounts: what one call does, by the name
    of the rate that is added: the amount per second."""
    try:
        seconds = median(seconds_of(call, device, repeats=repeats))
    except RuntimeError as error:  # also torch.OutOfMemoryError and NotImplementedError
        return facts | {"error": str(error).splitlines()[0]}
    return facts | {"seconds": seconds} | {rate: amount / seconds for rate, amount in amounts.items()}


def matmuls(model: ModelConfig, *, tokens: int, device: torch.device, repeats: int) -> Iterator[Measurement]:
    """Each kind of linear of the model, forward and both backward products, in bf16 and float8 (e4m3, e5m2 gradients).
    The casts to float8 are not timed. The model has no linears "as one": they show what fusing would gain."""
    width, query, key = model.width, model.heads * model.head_width, model.key_value_heads * model.head_width
    linears = {
        "q_proj, o_proj": (width, query),
        "k_proj, v_proj": (width, key),
        "q, k, v as one": (width, query + 2 * key),
        "gate_proj, up_proj": (width, model.feed_forward_width),
        "gate, up as one": (width, 2 * model.feed_forward_width),
        "down_proj": (model.feed_forward_width, width),
        "lm_head": (width, model.vocabulary),
    }
    for name, (inputs, outputs) in linears.items():
        x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)  # (tokens, in)
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)  # (out, in)
        gradient = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)  # (tokens, out)
        products = {
            FORWARD: (x, weight.t()),  # (tokens, in) x (in, out)
            INPUT: (gradient, weight),  # (tokens, out) x (out, in)
            WEIGHT: (gradient.t(), x),  # (out, tokens) x (tokens, in)
        }
        for product, (a, b) in products.items():
            facts = {"model": model.name, "linear": name, "product": product, "shape": [*a.shape, b.shape[1]]}
            tflops = 2 * a.shape[0] * a.shape[1] * b.shape[1] / 1e12
            for kind, call in _products(a, b, forward=product == FORWARD).items():
                yield measured(facts | {"kind": kind}, call, device, repeats=repeats, tflops=tflops)


def _products(a: Tensor, b: Tensor, *, forward: bool) -> dict[str, Callable[[], Tensor]]:
    """a x b in bf16, and in float8 with one scale per tensor or per row, as torchao computes it."""

    def float8(rowwise: bool) -> Callable[[], Tensor]:
        kind = torch.float8_e4m3fn if forward or rowwise else torch.float8_e5m2
        left = a.contiguous().to(kind)  # row-major
        right = b.t().contiguous().to(torch.float8_e4m3fn).t()  # column-major
        fast = forward or rowwise
        scale_a = torch.ones((a.shape[0], 1) if rowwise else (), device=a.device)
        scale_b = torch.ones((1, b.shape[1]) if rowwise else (), device=a.device)
        return lambda: torch._scaled_mm(left, right, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return {"bf16": lambda: a @ b, "float8 tensorwise": float8(False), "float8 rowwise": float8(True)}


def attention(model: ModelConfig, *, tokens: int, device: torch.device, repeats: int) -> Iterator[Measurement]:
    """Causal attention of one sequence with each backend, forward alone and with backward, and the kernels' names.
    tflops counts as ModelConfig.flops_per_token("causal") does: backward is twice the forward pass."""
    query, key, value = (
        torch.randn(1, heads, tokens, model.head_width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (model.heads, model.key_value_heads, model.key_value_heads)
    )
    gradient = torch.randn_like(query)
    tflops = 2 * model.heads * model.head_width * tokens * tokens / 1e12  # 4 x N x H x T^2, half of it masked

    def forward() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def both() -> None:
        torch.autograd.grad(forward(), (query, key, value), gradient)

    for name, backend in BACKENDS[device.type].items():
        with sdpa_kernel(backend):
            for passes, call, factor in (("forward", forward, 1), ("both", both, 3)):
                facts = {"model": model.name, "backend": name, "passes": passes, "tokens": tokens}
                found = measured(facts, call, device, repeats=repeats, tflops=factor * tflops)
                yield found if "error" in found else found | {"kernels": _kernel_names(call, device)}


def _kernel_names(call: Callable[[], Any], device: torch.device) -> list[str]:
    """The attention kernels that ran; on a CPU, the attention operators."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as traced:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    events = traced.events() or []
    wanted = torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    names = dict.fromkeys(event.name for event in events if event.device_type == wanted)
    return [name for name in names if ATTENTION_NAMES.search(name)]


def optimizer(
    model: ModelConfig, *, state_dtype: Literal["float32", "bfloat16"], device: torch.device, repeats: int
) -> Measurement:
    """One AdamW step over as many float32 parameters as the model has. bytes_per_second only with float32 moments,
    where one kernel moves 28 bytes per parameter."""
    facts: Measurement = {"model": model.name, "parameters": model.num_params(), "moments": state_dtype}
    try:
        layers = nn.ParameterList(
            nn.Parameter(torch.zeros(model.num_params() // model.layers, device=device)) for _ in range(model.layers)
        )
        for parameter in layers:
            parameter.grad = torch.ones_like(parameter)
        adamw = build_optimizer(layers, OptimizerConfig(state_dtype=state_dtype), embedding=None)
    except torch.OutOfMemoryError as error:
        return facts | {"error": str(error).splitlines()[0]}
    moved = 28 * sum(parameter.numel() for parameter in layers)
    rates = {"bytes_per_second": moved} if state_dtype == "float32" else {}
    return measured(facts, adamw.step, device, repeats=repeats, **rates)


def copy(*, gib: float, device: torch.device, repeats: int) -> Measurement:
    """Read and write a buffer larger than any cache."""
    source = torch.ones(int(gib * 2**30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel()
    return measured({"gib": gib}, lambda: target.copy_(source), device, repeats=repeats, bytes_per_second=moved)
