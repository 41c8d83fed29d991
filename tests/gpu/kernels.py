"""Time the operations of a training step on this device: matrix products, attention, loss, casts, optimizer, copies.

Every measurement is one object: the operation, its shape, the median seconds and the rates that follow from them. An
operation that the device cannot do has an "error" instead, and the others go on. suite.py runs each group of GROUPS in
a process of its own, which main() is, so that one that crashes or hangs costs only itself.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from models.config import ModelConfig
from models.decoder import Decoder
from models.documents import Lengths
from models.loss import EAGER, Kernels, cross_entropy_sum
from models.sizes import SIZES
from parallel.config import AttentionConfig
from parallel.dist import let_segments_grow
from parallel.errors import UserError
from parallel.kernels import choose_attention, compiled_loss_kernels
from recipes.lab.sweep.runner import exit_code_of
from recipes.metrics.breakdown import ATTENTION_NAMES
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer
from recipes.plan.time import update_bytes
from recipes.training.process import environment
from tests.gpu.suite import GROUPS

Measurement = dict[str, Any]
FORWARD, INPUT, WEIGHT = "forward", "gradient of the input", "gradient of the weight"
BACKENDS = {
    "cuda": {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION},
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH},
}
WARM_UP = 3


@dataclass(frozen=True)
class Bench:
    """What is measured: the models' shapes, or tiny ones."""

    device: torch.device
    models: Sequence[ModelConfig]
    tokens: int
    gib: float
    """GiB of the copied buffer."""
    repeats: int

    def measured(self, facts: Measurement, call: Callable[[], Any], **amounts: float) -> Measurement:
        """`facts` plus the median seconds, or plus the error that the call raised. amounts: what one call does, by the
        name of the rate that is added: the amount per second."""
        try:
            seconds = median(seconds_of(call, self.device, repeats=self.repeats))
        except (RuntimeError, ImportError) as error:  # also torch.OutOfMemoryError and NotImplementedError
            return facts | {"error": str(error).splitlines()[0]}
        return facts | {"seconds": seconds} | {rate: amount / seconds for rate, amount in amounts.items()}


def bench_of(*, tiny: bool) -> Bench:
    """The sizes to measure; tiny ones run on the CPU."""
    if not tiny:
        return Bench(torch.device("cuda:0"), [SIZES["smollm3_3b"], SIZES["llama3_8b"]], 8192, 4.0, 20)
    models = [replace(SIZES[name], layers=2, vocabulary=512) for name in ("smollm3_debug", "llama3_debug")]
    return Bench(torch.device("cpu"), models, 64, 1 / 64, 3)


def main(arguments: list[str]) -> int:
    """Append one line of JSON per measurement of a group to a file. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kernels", allow_abbrev=False)
    parser.add_argument("--group", choices=[*GROUPS, "environment"], required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _measure(options.group, options.out, tiny=options.tiny), interrupted="interrupted")


def _measure(group: str, out: Path, *, tiny: bool) -> int:
    if not tiny and not torch.cuda.is_available():
        raise UserError("this machine has no GPU to measure; --tiny runs the suite on a CPU")
    if not tiny:
        let_segments_grow()  # as in a run
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's log helps only its developers
    with out.open("a", encoding="utf-8") as file:
        for measurement in measurements(group, bench_of(tiny=tiny)):
            file.write(json.dumps(measurement) + "\n")
            file.flush()  # what follows may hang
    return 0


def measurements(group: str, bench: Bench) -> Iterator[Measurement]:
    """The measurements of a group; of the group "environment", what the device and the versions are."""
    if group == "environment":
        yield environment(world_size=1, device=bench.device)
    elif group == "bandwidth":
        yield copy(bench)
        yield from casts(bench, bench.models[0])
        for kind in get_args(get_type_hints(OptimizerConfig)["state_dtype"]):
            yield optimizer(bench, bench.models[0], state_dtype=kind)
    else:
        measure = {"products": matmuls, "attention": attention, "documents": documents, "loss": loss}[group]
        for model in bench.models:
            yield from measure(bench, model)


def seconds_of(call: Callable[[], Any], device: torch.device, *, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls after a warm-up; on CUDA measured with events on the device."""
    for _ in range(WARM_UP):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    pairs = list(zip(marks[::2], marks[1::2], strict=True))
    for before, after in pairs:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def matmuls(bench: Bench, model: ModelConfig) -> Iterator[Measurement]:
    """Each kind of linear of the model, forward and both backward products, in bf16 and float8 (e4m3, e5m2 gradients).
    The casts to float8 are not timed. The model has no linears "as one": they show what fusing would gain."""
    device, tokens = bench.device, bench.tokens
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
            facts: Measurement = {"operation": "product", "model": model.name, "linear": name, "product": product}
            facts |= {"shape": [*a.shape, b.shape[1]]}
            tflops = 2 * a.shape[0] * a.shape[1] * b.shape[1] / 1e12
            for kind, call in _products(a, b, forward=product == FORWARD).items():
                yield bench.measured(facts | {"kind": kind}, call, tflops=tflops)


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


def attention(bench: Bench, model: ModelConfig) -> Iterator[Measurement]:
    """Causal attention of one sequence with each backend, forward alone and with backward, and the kernels' names.
    tflops counts as ModelConfig.flops_per_token("causal") does: backward is twice the forward pass."""
    device, tokens = bench.device, bench.tokens
    query, key, value = _heads(model, tokens, device)
    gradient, tflops = torch.randn_like(query), _causal_tflops(model, tokens)

    def forward() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def both() -> None:
        torch.autograd.grad(forward(), (query, key, value), gradient)

    for name, backend in BACKENDS[device.type].items():
        with sdpa_kernel(backend):
            for passes, call, factor in (("forward", forward, 1), ("both", both, 3)):
                facts: Measurement = {"operation": "attention", "model": model.name, "backend": name}
                facts |= {"passes": passes, "tokens": tokens}
                measurement = bench.measured(facts, call, tflops=factor * tflops)
                yield measurement if "error" in measurement else measurement | {"kernels": _kernel_names(call, device)}


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


def optimizer(bench: Bench, model: ModelConfig, *, state_dtype: Literal["float32", "bfloat16"]) -> Measurement:
    """One AdamW step over the parameters of the model, compiled on a GPU. bytes_per_second where one pass moves all."""
    facts: Measurement = {"operation": "optimizer", "model": model.name, "parameters": model.num_params()}
    facts |= {"moments": state_dtype}
    gc.collect()  # cycles of an earlier optimizer would keep its memory
    try:
        with torch.device("meta"):
            built = Decoder(model)
        for parameter in built.to_empty(device=bench.device).parameters():
            parameter.grad = torch.ones_like(parameter.detach().zero_())
        compiled = bench.device.type == "cuda"
        adamw = build_optimizer(built, OptimizerConfig(state_dtype=state_dtype), compiled=compiled)
    except torch.OutOfMemoryError as error:
        return facts | {"error": str(error).splitlines()[0]}
    moved = update_bytes(state_dtype) * model.num_params()
    rates = {"bytes_per_second": moved} if compiled or state_dtype == "float32" else {}
    return bench.measured(facts, adamw.step, **rates)


def copy(bench: Bench) -> Measurement:
    """Read and write a buffer larger than any cache."""
    source = torch.ones(int(bench.gib * 2**30), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    moved = 2 * source.numel()
    facts = {"operation": "copy", "gib": bench.gib, "bytes": moved}
    return bench.measured(facts, lambda: target.copy_(source), bytes_per_second=moved)


def casts(bench: Bench, model: ModelConfig) -> Iterator[Measurement]:
    """What FSDP does to the weights of a block, eager, and the cast of one activation to float8, compiled.

    The bytes are those that recipes/plan/time.py counts.
    """
    device, tokens = bench.device, bench.tokens
    in_block = (model.matmul_params() - model.vocabulary * model.width) // model.layers
    weight = torch.randn(in_block, device=device)
    low, scale = torch.empty_like(weight, dtype=torch.bfloat16), torch.ones((), device=device)
    activation = torch.randn(tokens, model.feed_forward_width, device=device, dtype=torch.bfloat16)
    in_kernels = torch.compile(_to_float8, backend=_backend(device))
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "weights to bfloat16 and copied": (10 * in_block, lambda: low.copy_(weight.to(torch.bfloat16))),
        "weights to float8, eager": (21 * in_block, lambda: (weight * scale).clamp(-448, 448).to(torch.float8_e4m3fn)),
        "gradient added up in float32": (10 * in_block, lambda: weight.add_(low)),
        "activation to float8, compiled": (5 * activation.numel(), lambda: in_kernels(activation)),
    }
    for name, (moved, call) in calls.items():
        facts = {"operation": "cast", "name": name, "model": model.name, "bytes": moved}
        yield bench.measured(facts, call, bytes_per_second=moved)


def _backend(device: torch.device) -> str:
    """The backend of torch.compile: on a CPU, code generation is not what is tested."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def _to_float8(x: Tensor) -> Tensor:
    """x in float8 with one scale per tensor, as torchao computes it: x is read twice and written once."""
    scale = 448 / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def loss(bench: Bench, model: ModelConfig) -> Iterator[Measurement]:
    """Forward and backward of the loss in 8 chunks, eager and compiled as in a run."""
    device, tokens = bench.device, bench.tokens
    targets = torch.randint(model.vocabulary, (1, tokens), device=device)
    values = torch.randn(1, tokens, model.vocabulary, device=device, dtype=torch.bfloat16)
    kinds = {"eager": EAGER, "compiled": compiled_loss_kernels(backend=_backend(device))}
    for kind, functions in kinds.items():
        facts = {"operation": "loss", "model": model.name, "kind": kind, "chunks": 8, "logits": values.numel()}

        def both(functions: Kernels = functions) -> None:
            logits = values.detach().requires_grad_()
            torch.autograd.grad(cross_entropy_sum(logits, targets, chunks=8, kernels=functions), logits)

        yield bench.measured(facts, both)


def documents(bench: Bench, model: ModelConfig) -> Iterator[Measurement]:
    """Attention inside documents of equal lengths, forward and backward. tflops: as in attention()."""
    device, tokens = bench.device, bench.tokens
    choose_attention(AttentionConfig(), device_type=device.type, masked=True)  # the kernel of a run
    query, key, value = _heads(model, tokens, device)
    gradient = torch.randn_like(query)
    for count in (1, 4, 16):
        facts: Measurement = {"operation": "documents", "model": model.name, "documents": count, "tokens": tokens}
        lengths = torch.arange(0, tokens + 1, tokens // count, dtype=torch.int32, device=device)
        tflops = 3 * _causal_tflops(model, tokens // count) * count

        def both(lengths: Tensor = lengths) -> None:
            from models.varlen import attention_by_lengths  # slow to import, and missing before torch 2.10

            out = attention_by_lengths(query, key, value, Lengths(lengths))
            torch.autograd.grad(out, (query, key, value), gradient)

        yield bench.measured(facts, both, tflops=tflops)


def _heads(model: ModelConfig, tokens: int, device: torch.device) -> list[Tensor]:
    """Query, key and value of one sequence, (1, N, T, H) and (1, K, T, H)."""
    counts = (model.heads, model.key_value_heads, model.key_value_heads)
    shapes = [(1, heads, tokens, model.head_width) for heads in counts]
    return [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def _causal_tflops(model: ModelConfig, tokens: int) -> float:
    """TFLOP of one layer's forward pass: 4 x N x H x T^2, half of it masked."""
    return 2 * model.heads * model.head_width * tokens * tokens / 1e12


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
