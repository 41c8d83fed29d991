"""Turns a torch profiler trace into a table of a step's time by kind of work.

A trace is the "Chrome" JSON that torch.profiler exports: events with a start `ts` and a duration `dur` in microseconds.
On a GPU, a kernel's kind follows from its name or the operators that launched it; on a CPU, the innermost operator
counts. Every instant of a traced step belongs to exactly one kind, so the parts add up to the step. Imports no torch.
"""

import gzip
import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.files.markdown import markdown_table

STEP = "shardwright.step"
"""The annotation around every traced step; the device is idle at its beginning and end."""

MATMUL, ATTENTION, LOSS, OPTIMIZER, CASTS = "matrix multiplications", "attention", "loss", "optimizer", "casts"
COPIES = "copies and packing"
REST = "norms, elementwise and the rest"
COMMUNICATION, IDLE = "communication, exposed", "idle"
KINDS = (MATMUL, ATTENTION, REST, LOSS, OPTIMIZER, CASTS, COPIES, COMMUNICATION, IDLE)

Event = dict[str, Any]
Interval = tuple[float, float, str, str]
"""(begin, end, kind or "" to only label what others are, label of communication or ""), microseconds."""

COMMUNICATION_NAMES = re.compile(r"nccl|gloo|^c10d::|^_c10d_functional::|^FSDP::", re.IGNORECASE)
ATTENTION_NAMES = re.compile(
    r"flash|fmha|_sdpa|sdpa_|scaled_dot_product|efficient_attention|varlen_attn|ScaledDotProduct", re.IGNORECASE
)
MATMUL_NAMES = re.compile(
    r"gemm|cutlass|cublas|nvjet|xmma|splitk|_mm_|^aten::(mm|addmm|bmm|baddbmm|_scaled_mm)$|^triton_tem_", re.IGNORECASE
)
NAMES = {MATMUL: MATMUL_NAMES, ATTENTION: ATTENTION_NAMES}
# Operators of torch's cross-entropy, and our own one (models/loss.py).
LOSS_SCOPES = re.compile(r"cross_entropy|nll_loss|NllLoss|log_softmax|LogSoftmax|^_InChunks")
# The gradient norm (parallel/passes.py) counts as part of the optimizer.
OPTIMIZER_SCOPES = re.compile(r"^Optimizer\.|^gradient norm$|adamw?_")
PACKING_SCOPES = re.compile(r"^fsdp::|split_with_sizes_copy|_foreach_copy_|^aten::_chunk_cat")
BETWEEN_STAGES = "send and receive"
COLLECTIVES = {
    BETWEEN_STAGES: re.compile(r"^(c10d::|gloo:)(send|recv)"),
    "all-to-all": re.compile(r"SendRecv|all_?to_?all", re.IGNORECASE),
    "all-gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce-scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "all-reduce": re.compile(r"all_?reduce", re.IGNORECASE),
}
SUMS = "sums"
"""Label of sums of losses, counts and norms: everything that is not the work of an axis of the mesh."""
FSDP_SCOPES = re.compile(r"^FSDP::")
EXPERT_SCOPES = re.compile(r"^shardwright::exchange")  # parallel/experts.py
CONTEXT_SCOPES = re.compile(r"^_Gather(Backward)?$")  # parallel/context.py
TENSOR_SCOPES = re.compile(r"^_c10d_functional::|^_InChunks")  # DTensor's collectives, and those of the loss in parts
CAST_SCOPES = re.compile(r"^aten::_to_copy$|^ToCopyBackward0$|float8", re.IGNORECASE)
# Inductor names a fused kernel after the operators in it and after the neighbouring operators that it exchanges values
# with, all in alphabetical order. Templates ("triton_tem_") are matrix products.
FUSED_NAME = re.compile(r"^triton_(?!tem_)[a-z]+_fused_(.*?)_?\d*$")
# Operators that are never fused: in the name of a fused kernel, they are always neighbours.
NEIGHBOURS = re.compile(
    r"_?scaled_dot_product_[a-z_]*?attention(_forward|_backward|_for_cpu)*|_?(flash|cudnn|efficient)_attention(_forward|_backward)?"
    r"|_scaled_mm|(?<![a-z])(addmm|baddbmm|bmm|mm)(?![a-z])"
)
CONVERSION = re.compile(r"_to_copy|(prims_)?convert_element_type")
# The parts of a cast: the largest magnitude, the scale from it (row-wise: a power of two), scaling and saturating.
CAST_PARTS = {"cast", "abs", "amax", "max", "clamp", "reciprocal", "div", "mul", "exp2", "floor", "log2"}
VIEW_PARTS = {"view", "unsafe", "reshape", "t", "transpose", "permute", "clone", "expand", "repeat", "new", "ones"}
# A multiplication alone does not identify a cast, since anything may be multiplied. These sets do.
SCALE_PARTS = ({"clamp"}, {"reciprocal"}, {"abs", "max"}, {"abs", "amax"})


@dataclass(frozen=True)
class Breakdown:
    """Mean seconds per traced step."""

    steps: int
    step_seconds: float
    seconds: dict[str, float]
    """Kind -> seconds; they add up to step_seconds."""
    hidden_communication: float
    """Communication that overlapped with work; not part of the sum."""
    collectives: dict[str, tuple[float, float, int]]
    """Axis of the mesh and collective -> seconds, those of them that are exposed, and calls, per step."""
    kernels: dict[str, list[tuple[str, float, int]]]
    """Matrix multiplication and attention -> (name, seconds per step, calls per step), longest first."""


def read_trace(path: Path) -> list[Event]:
    """The events of a trace that StepProfiler wrote."""
    with gzip.open(path, "rt") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return events


def break_down(events: Iterable[Event]) -> Breakdown:
    """Attribute the traced steps' time to kinds of work."""
    whole = [event for event in events if event.get("ph") == "X"]
    steps = [(event["ts"], event["ts"] + event["dur"]) for event in whole if _is_step(event)]
    on_device = any(event.get("cat") == "kernel" for event in whole)
    pieces, names = _device_intervals(whole) if on_device else _host_intervals(whole)
    totals = dict.fromkeys(KINDS, 0.0)
    exposed: dict[str, float] = defaultdict(float)
    hidden = 0.0
    for begin, end in steps:
        own = [(max(b, begin), min(e, end), *what) for b, e, *what in pieces if e > begin and b < end]
        hidden += _attribute(own, begin, end, totals, exposed)
    each = 1e6 * len(steps)
    collectives = ((label, begin, end - begin) for begin, end, _, label in pieces if label)
    kernels: dict[str, list[tuple[str, float, float]]] = {kind: [] for kind in NAMES}
    for event, kind in names:
        if kind in NAMES and (event["cat"] == "kernel" or NAMES[kind].search(event["name"])):
            kernels[kind].append((event["name"], event["ts"], event["dur"]))
    return Breakdown(
        steps=len(steps),
        step_seconds=sum(end - begin for begin, end in steps) / each,
        seconds={kind: total / each for kind, total in totals.items()},
        hidden_communication=hidden / each,
        collectives={
            label: (seconds, exposed.get(label, 0.0) / each, calls)
            for label, (seconds, calls) in sorted(_per_step(collectives, steps).items())
        },
        kernels={
            kind: [(name, *spent) for name, spent in sorted(by_name.items(), key=lambda item: -item[1][0])]
            for kind, by_name in ((kind, _per_step(kernels[kind], steps)) for kind in NAMES)
        },
    )


def table(breakdown: Breakdown) -> str:
    """The breakdown as Markdown tables."""
    lines = [
        f"Mean of {breakdown.steps} traced steps: {1e3 * breakdown.step_seconds:,.2f} ms. Tracing slows the host, so"
        " idle time is an upper bound.",
        "",
    ]
    sums = {"sum": sum(breakdown.seconds.values()), "communication, hidden behind work": breakdown.hidden_communication}
    kinds = (breakdown.seconds | sums).items()
    lines += markdown_table(
        ("kind", "ms", "share"),
        [(kind, f"{1e3 * seconds:,.2f}", f"{seconds / breakdown.step_seconds:.1%}") for kind, seconds in kinds],
    )
    if breakdown.collectives:
        lines += ["", "Communication by axis of the mesh and collective:", ""]
        lines += markdown_table(
            ("axis: collective", "ms", "of which exposed", "calls"),
            [
                (label, f"{1e3 * seconds:,.2f}", f"{1e3 * exposed:,.2f}", calls)
                for label, (seconds, exposed, calls) in breakdown.collectives.items()
            ],
        )
    for kind, kernels in breakdown.kernels.items():
        most = [(f"`{name}`", f"{1e3 * seconds:,.2f}", calls) for name, seconds, calls in kernels[:12]]
        lines += ["", f"Kernels of {kind}:", "", *markdown_table(("name", "ms", "calls"), most)]
    return "\n".join([*lines, ""])


def _is_step(event: Event) -> bool:
    return event.get("name") == STEP and event.get("cat") == "user_annotation"


def _attribute(
    pieces: Sequence[Interval], begin: float, end: float, totals: dict[str, float], exposed: dict[str, float]
) -> float:
    """Add every instant from begin to end to the total of one kind. Returns the hidden communication.

    Work takes precedence over communication, whose exposed instants are also added to one label in `exposed`. Among
    simultaneous ones of a kind, the one that began first counts.
    """
    points = sorted(
        [(at, is_end, number) for number, piece in enumerate(pieces) for at, is_end in ((piece[0], 0), (piece[1], 1))]
    )
    active: dict[int, tuple[str, str]] = {}  # kind and label, in order of their beginning
    hidden, now = 0.0, begin
    for at, is_end, number in [*points, (end, 0, -1)]:
        if at > now:
            work = next((kind for kind, _ in active.values() if kind not in ("", COMMUNICATION)), None)
            communicates = any(kind == COMMUNICATION for kind, _ in active.values())
            totals[work or (COMMUNICATION if communicates else IDLE)] += at - now
            if communicates and not work:
                exposed[next((label for _, label in active.values() if label), "")] += at - now
            hidden += (at - now) if work and communicates else 0.0
            now = at
        if is_end:
            active.pop(number, None)
        elif number >= 0:
            active[number] = pieces[number][2:]
    return hidden


def _device_intervals(events: Sequence[Event]) -> tuple[list[Interval], list[tuple[Event, str]]]:
    """Intervals of kernels and copies on all streams, and the events with their kinds."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    scopes = _scopes(events, launches)
    pieces: list[Interval] = []
    names = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        around = scopes.get(event.get("args", {}).get("correlation"), [])
        kind = _kind(event["name"], around)
        if kind in (REST, CASTS) and event["cat"] != "kernel":
            kind = COPIES
        group = event.get("args", {}).get("Process Group Description", "")
        label = _label(event["name"], group, around) if kind == COMMUNICATION else ""
        pieces.append((event["ts"], event["ts"] + event["dur"], kind, label))
        names.append((event, kind))
    return pieces, names


def _scopes(events: Sequence[Event], inner: Mapping[Any, Event]) -> dict[Any, list[str]]:
    """Key of an inner event -> names of the operators that enclose its beginning on its thread, innermost first."""
    operators = [(event, None) for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    # An operator that begins at the same time as an inner event encloses it, so it comes first.
    in_order = [*operators, *((event, key) for key, event in inner.items())]
    in_order.sort(key=lambda item: (item[0]["ts"], item[1] is not None, -item[0]["dur"]))
    stacks: dict[Any, list[Event]] = defaultdict(list)
    around = {}
    for event, key in in_order:
        stack = stacks[event["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        if key is None:
            stack.append(event)
        else:
            around[key] = [scope["name"] for scope in reversed(stack) if scope["ts"] + scope["dur"] > event["ts"]]
    return around


def _label(name: str, group: str, around: Sequence[str]) -> str:
    """What a collective is for, such as "tensor: all-gather". name, around: as in _kind().

    group: description of the process group, which NCCL's kernels carry; "" if unknown, then the operators tell.
    """
    collective = _collective(name)
    if collective == BETWEEN_STAGES or (group == "mesh_pipeline" and collective == "all-to-all"):
        return f"pipeline: {BETWEEN_STAGES}"  # whose kernels NCCL names as those of an all-to-all
    by_fsdp = any(FSDP_SCOPES.search(scope) for scope in around)
    axis = group.removeprefix("mesh_")  # init_device_mesh makes the description of the axis's name
    if any(EXPERT_SCOPES.search(scope) for scope in around):
        axis = "expert"
    elif not group and (collective == "all-to-all" or any(CONTEXT_SCOPES.search(scope) for scope in around)):
        axis = "context"
    elif not group and any(TENSOR_SCOPES.search(scope) for scope in around):
        axis = "tensor"
    if axis != "tensor" and by_fsdp:  # where shard = 1, FSDP and context share a group
        axis = "replicate" if collective == "all-reduce" else "shard"
    elif axis not in ("context", "tensor", "expert"):
        axis = SUMS
    return f"{SUMS if 'gradient norm' in around else axis}: {collective}"


def _collective(name: str) -> str:
    return next((kind for kind, pattern in COLLECTIVES.items() if pattern.search(name)), "other")


def _host_intervals(events: Sequence[Event]) -> tuple[list[Interval], list[tuple[Event, str]]]:
    """Intervals of the innermost operators, thread by thread, and the events with their kinds. The gaps are idle."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation") and not _is_step(event):
            threads[event["tid"]].append(event)
    pieces: list[Interval] = _gloo_intervals(events)
    names = []
    for own in threads.values():
        own.sort(key=lambda event: (event["ts"], -event["dur"]))
        stack: list[tuple[float, str, str]] = []  # (end, kind, name) of the operators that are running
        now = 0.0
        for operator in [*own, None]:
            begin = operator["ts"] if operator else math.inf
            while stack:  # the time from `now` to `begin` is that of the innermost operators, one after another
                end, kind, _ = stack[-1]
                if min(end, begin) > now:
                    pieces.append((now, min(end, begin), kind, ""))
                    now = min(end, begin)
                if end > begin:
                    break
                stack.pop()
            now = max(now, begin)
            if operator:
                kind = _kind(operator["name"], [name for _, _, name in reversed(stack)])
                stack.append((begin + operator["dur"], kind, operator["name"]))
                names.append((operator, kind))
    return pieces, names


def _gloo_intervals(events: Sequence[Event]) -> list[Interval]:
    """Labels of gloo's collectives while its threads run them. They run those of a kind in the order of their issue."""
    in_order = sorted((event for event in events if "tid" in event), key=lambda event: event["ts"])
    issued = {number: event for number, event in enumerate(in_order) if event["name"].startswith("c10d::")}
    queues: dict[str, deque[str]] = defaultdict(deque)
    for around in _scopes(events, issued).values():  # in order, too
        label = _label(around[0], "", around[1:])
        kind = label.partition(": ")[2]
        queues["all-reduce" if kind == "reduce-scatter" else kind].append(label)  # gloo sums where it should scatter
    pieces: list[Interval] = []
    for event in in_order:
        if event["name"].startswith("gloo:") and (queue := queues[_collective(event["name"])]):
            pieces.append((event["ts"], event["ts"] + event["dur"], "", queue.popleft()))
    return pieces


def _kind(name: str, around: Sequence[str]) -> str:
    """The kind of a kernel or CPU operator, from its name and the enclosing operators, innermost first."""
    scopes = [name, *around]
    if COMMUNICATION_NAMES.search(name):
        return COMMUNICATION
    if any(OPTIMIZER_SCOPES.search(scope) for scope in scopes):
        return OPTIMIZER
    fused = FUSED_NAME.match(name)
    if fused is None and any(ATTENTION_NAMES.search(scope) for scope in scopes[:6]):
        return ATTENTION
    if fused is None and any(MATMUL_NAMES.search(scope) for scope in scopes[:2]):
        return MATMUL
    if any(LOSS_SCOPES.search(scope) for scope in scopes):
        return LOSS
    if any(PACKING_SCOPES.search(scope) for scope in scopes):
        return COPIES
    if fused is not None:
        return CASTS if _only_casts(fused[1]) else REST
    return CASTS if any(CAST_SCOPES.search(scope) for scope in scopes[:5]) else REST


def _only_casts(operators: str) -> bool:
    """Whether a fused kernel, judged by the operators in its name ("_scaled_mm__to_copy_abs_max_t"), only casts.

    The first of a cast's two kernels only computes the scale and converts nothing.
    """
    own = CONVERSION.sub(" cast ", NEIGHBOURS.sub(" ", operators)).replace("_", " ").split()
    words = set(own) - VIEW_PARTS
    if not words <= CAST_PARTS:
        return False
    return words == {"cast"} or any(parts <= words for parts in SCALE_PARTS)


def _per_step(
    items: Iterable[tuple[str, float, float]], steps: Sequence[tuple[float, float]]
) -> dict[str, tuple[float, int]]:
    """Label -> seconds and calls per step of what begins in a traced step. items: label, begin, duration."""
    sums: dict[str, tuple[float, int]] = {}
    for label, begin, duration in items:
        if any(first <= begin < last for first, last in steps):
            seconds, calls = sums.get(label, (0.0, 0))
            sums[label] = (seconds + duration / 1e6, calls + 1)
    return {label: (seconds / len(steps), round(calls / len(steps))) for label, (seconds, calls) in sums.items()}
