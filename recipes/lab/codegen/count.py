"""Counts in the graphs and the generated code of a block: what stays for the backward pass, kernels, bytes moved."""

import ast
from collections import Counter
from dataclasses import dataclass
from operator import getitem

import torch
from torch import Tensor
from torch.fx import Node

from recipes.lab.codegen.trace import Traced

ATTENTION = ("_scaled_dot_product", "_varlen_attn", "_flash_attention", "_efficient_attention")
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_mm")


@dataclass(frozen=True)
class Saved:
    """A tensor that the forward pass keeps for the backward pass."""

    name: str
    """Name of the node in the graph that computes it."""
    source: str
    """Name of the operator that computes it, or "input"."""
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    kind: str
    """ "activation"; "weights": computed from parameters alone; "shared" by all layers: cosines and sines."""


def saved_tensors(traced: Traced) -> list[Saved]:
    """What the backward pass reads of the forward pass, each memory once, largest first. Parameters are left out."""
    nodes = {node.name: node for node in traced.forward.module.graph.nodes}
    read = [node.name for node in traced.backward.module.graph.nodes if node.op == "placeholder" and node.name in nodes]
    bases = dict.fromkeys(_base(nodes[name]) for name in read)
    inputs = traced.forward.inputs
    found = [_saved(node, inputs) for node in bases if inputs.get(node.name) != "parameter"]
    return sorted(found, key=lambda saved: -saved.bytes)


def _saved(node: Node, inputs: dict[str, str]) -> Saved:
    kinds = {inputs[name] for name in _inputs_of(node)}
    kind = "activation" if "activation" in kinds else "weights" if "parameter" in kinds else "shared"
    value: Tensor = node.meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    return Saved(node.name, _source(node), dtype, tuple(value.shape), value.numel() * value.element_size(), kind)


def _base(node: Node) -> Node:
    """The node whose memory this one shares: itself, unless it is a view."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _inputs_of(node: Node) -> set[str]:
    """Names of the graph's inputs from which the node is computed."""
    seen, waiting = {node}, [node]
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if before not in seen:
                seen.add(before)
                waiting.append(before)
    return {node.name for node in seen if node.op == "placeholder"}


def _source(node: Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.target is getitem:  # one of several results
        return _source(node.all_input_nodes[0])
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else str(node.target)


@dataclass(frozen=True)
class Code:
    """What one generated module launches."""

    calls: dict[str, int]
    """ "product", "attention", "fused" (a Triton kernel) and "other" -> number of launches."""
    others: tuple[str, ...]
    """Names of the launches that are "other": their bytes are not counted."""
    random_states: int
    """Launches that save or restore the state of the random numbers, although a block draws none."""
    moved: dict[str, int]
    """Triton kernel -> bytes that all its launches move, by Inductor's count: each tensor once."""


def read_code(code: str) -> Code:
    """Count the launches in a module that Inductor wrote."""
    tree = ast.parse(code)
    bytes_of = {name: _moved(source) for name, (_, source) in triton_kernels(code).items()}
    launches = [name for node in ast.walk(tree) if isinstance(node, ast.Call) if (name := _launched(node))]
    moved: Counter[str] = Counter()
    for name in launches:
        if name in bytes_of:
            moved[name] += bytes_of[name]
    kinds = [_kind(name, bytes_of) for name in launches]
    others = tuple(name for name, kind in zip(launches, kinds, strict=True) if kind == "other")
    random_states = sum("rng_state" in name for name in launches)
    return Code(dict(Counter(kinds)), others, random_states, dict(moved))


def triton_kernels(code: str) -> dict[str, tuple[str, str]]:
    """Name -> (name of the function, source) of each Triton kernel that the module defines."""
    return {
        statement.targets[0].id: (ast.literal_eval(statement.value.args[0]), ast.literal_eval(statement.value.args[1]))
        for statement in ast.parse(code).body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        if isinstance(statement.value, ast.Call) and ast.unparse(statement.value.func) == "async_compile.triton"
    }


def _moved(source: str) -> int:
    """The bytes that one launch moves, from the kernel's own record."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "kernel_num_gb":
                    return round(ast.literal_eval(value) * 1e9)
    raise ValueError("Inductor did not say how many bytes a kernel moves: torch._inductor.config.profile_bandwidth")


def _launched(call: ast.Call) -> str:
    """The kernel that a call launches; "" if it launches none."""
    name = ast.unparse(call.func)
    if name.startswith("triton_") and name.endswith(".run"):
        return name.removesuffix(".run")
    if name.startswith("torch.ops.higher_order."):  # a wrapper, which takes the operator first or after its state
        return f"{name}({', '.join(ast.unparse(argument) for argument in call.args[:2])})"
    return name if name.startswith(("extern_kernels.", "torch.ops.", "aten.")) else ""


def _kind(name: str, kernels: dict[str, int]) -> str:
    if name in kernels:
        return "fused"
    if any(part in name for part in ATTENTION):
        return "attention"
    return "product" if set(PRODUCTS) & set(name.split(".")) else "other"


def assemble(code: str) -> dict[str, str]:
    """Make machine code for sm_90 of each Triton kernel, in every configuration that Inductor would try: name -> the
    error of Triton or ptxas, or ""."""
    from torch._inductor.codecache import PyCodeCache

    found = {}
    for name, (function, source) in triton_kernels(code).items():
        try:
            kernel = getattr(PyCodeCache.load(source), function)
            kernel.precompile(warm_cache_only=True)
            found[name] = "" if kernel.compile_results else "no configuration compiled"
        except Exception as error:  # whatever the compiler raises is the finding
            found[name] = f"{type(error).__name__}: {error}"
    return found
