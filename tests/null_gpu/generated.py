"""What the modules that torch.compile generates launch, and the bytes that their fused kernels move.

A fused kernel moves each tensor that it reads or writes once. The least for a module is what remains if all its fused
kernels were one: what others computed, read once, and what others read, written once. Imports no torch.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from recipes.files.markdown import markdown_table

ATTENTION = ("_scaled_dot_product", "_varlen_attn", "_flash_attention", "_efficient_attention")
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_mm")
KINDS = ("fused", "products", "attention", "other")
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "i64": 8, "i32": 4, "i8": 1, "u8": 1, "i1": 1}
WIDTHS |= {"fp8e4nv": 1, "fp8e5": 1}
"""Bytes of an element, by Triton's name of its type."""


@dataclass
class _Module:
    """The statements of a generated module, read one after the other."""

    signatures: Mapping[str, Mapping[str, str]]
    """Fused kernel -> its arguments -> their types."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    views: dict[str, str] = field(default_factory=dict)
    """Name -> the tensor whose memory it has, and whose numbers until somebody writes to it."""
    launches: list[str] = field(default_factory=list)
    moved: int = 0
    written: dict[str, int] = field(default_factory=dict)
    """Tensors that fused kernels wrote, and their bytes."""
    by_others: set[str] = field(default_factory=set)
    """Tensors that something else wrote."""
    from_others: dict[str, int] = field(default_factory=dict)
    """Tensors that fused kernels read but did not write, and their bytes."""
    for_others: set[str] = field(default_factory=set)
    """Tensors that something else reads."""
    symbols: set[str] = field(default_factory=set)
    """Sizes that are known only when the module runs, each counted as 1."""

    def owner(self, tensor: ast.expr) -> str:
        """The tensor whose numbers are meant: a view's is the viewed one."""
        name = _name_of(tensor)
        while name in self.views and name not in self.written and name not in self.by_others:
            name = self.views[name]
        return name

    def read(self, statement: ast.stmt) -> None:
        """Follow one statement."""
        if isinstance(statement, ast.Return) and statement.value:
            self.for_others |= {self.owner(name) for name in _names(statement.value)}
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self.call(statement.value)
        elif isinstance(statement, ast.Assign):
            self.assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.With):
            for inner in statement.body:
                self.read(inner)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Follow `target = value`: a new tensor, a view, or what an operator answers."""
        if isinstance(target, ast.Tuple):  # the arguments of the module
            self.for_others |= {name.id for name in target.elts if isinstance(name, ast.Name)}
        elif isinstance(target, ast.Name):
            function = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
            if function.startswith("empty_strided"):
                self.shapes[target.id] = self.sizes(value.args[0])  # type: ignore[attr-defined]
            elif isinstance(value, ast.Name | ast.Subscript) or function == "reinterpret_tensor":
                self.views[target.id] = _name_of(value)
                if shape := self.shape(value):
                    self.shapes[target.id] = shape
            elif isinstance(value, ast.Call):
                self.call(value)
                self.by_others.add(target.id)

    def call(self, call: ast.Call) -> None:
        """Follow a call: a statement about a shape, a fused kernel, or another one."""
        function = ast.unparse(call.func)
        if function.startswith("assert_size_stride"):
            tensors, shapes = call.args[:2]
            grouped = isinstance(tensors, ast.Tuple) and isinstance(shapes, ast.Tuple)  # from torch 2.15 on
            for tensor, shape in zip(tensors.elts, shapes.elts, strict=True) if grouped else [(tensors, shapes)]:  # type: ignore[attr-defined]
                self.shapes[_name_of(tensor)] = self.sizes(shape)
        elif function.removesuffix(".run") in self.signatures:
            self.launch(function.removesuffix(".run"), call.args)
        elif function.startswith(("extern_kernels.", "torch.ops.", "aten.")):
            first = f"({ast.unparse(call.args[0])})" if function.startswith("torch.ops.higher_order.") else ""
            self.launches.append(function + first)
            outputs = {keyword.value.id for keyword in call.keywords if isinstance(keyword.value, ast.Name)}
            self.for_others |= {self.owner(name) for value in call.args for name in _names(value)}
            self.by_others |= outputs
            for name in outputs:  # memory that was a fused kernel's
                self.written.pop(name, None)

    def launch(self, kernel: str, arguments: Sequence[ast.expr]) -> None:
        """Follow the launch of a fused kernel."""
        self.launches.append(kernel)
        writes: dict[str, int] = {}
        for (name, kind), tensor in zip(self.signatures[kernel].items(), arguments, strict=False):
            if not kind.startswith("*"):
                continue
            size = prod(self.shape(tensor)) * WIDTHS[kind[1:]]
            if name.startswith("in_"):
                self.moved += size
                if (owner := self.owner(tensor)) not in self.written:
                    self.from_others.setdefault(owner, size)
            if name.startswith(("out_", "in_out_")):
                self.moved += size
                writes[_name_of(tensor)] = size
        self.written |= writes

    def shape(self, tensor: ast.expr) -> tuple[int, ...]:
        """The shape of a tensor or a view; () if nothing says it."""
        if isinstance(tensor, ast.Call):
            return self.sizes(tensor.args[1])
        return self.shapes.get(_name_of(tensor), ())

    def sizes(self, shape: ast.expr) -> tuple[int, ...]:
        """A shape as numbers."""
        assert isinstance(shape, ast.Tuple)
        self.symbols |= {name.id for name in _names(shape)}
        return tuple(1 if isinstance(size, ast.Name) else int(ast.literal_eval(size)) for size in shape.elts)

    @property
    def least(self) -> int:
        """Bytes that one fused kernel would move."""
        needed = {name: size for name, size in self.written.items() if name in self.for_others}
        return sum(self.from_others.values()) + sum(needed.values())


def count(code: str) -> dict[str, Any]:
    """What a generated module is part of ("what"), its launches by kind, and the bytes moved and the least."""
    tree = ast.parse(code)
    module = _Module(dict(_signatures(tree)))
    [calls] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    for statement in calls.body:
        module.read(statement)
    launches = Counter(_kind(name, module.signatures) for name in module.launches)
    if launches["attention"]:
        what = "block, backward" if "AOT ID: ['0_backward']" in code else "block, forward"
    else:
        what = "loss, a row of logits" if module.symbols else "update"
    return {"what": what, **{kind: launches[kind] for kind in KINDS}, "moved": module.moved, "least": module.least}


def table(counted: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[str]:
    """Markdown: recipe -> a line for each module that was generated for it, the same ones once."""
    lines = []
    for recipe, modules in counted.items():
        for cells, times in Counter(tuple(module.items()) for module in modules).items():
            module = dict(cells)
            sizes = f"{module['moved'] / 1e6:,.4g}", f"{module['least'] / 1e6:,.4g}"
            ratio = f"{module['moved'] / module['least']:.2f}" if module["least"] else ""
            lines.append((recipe, module["what"], times, *(module[kind] for kind in KINDS), *sizes, ratio))
    return markdown_table(("recipe", "module", "times", *KINDS, "moved, MB", "least", "ratio"), lines)


def _signatures(tree: ast.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Each fused kernel and the types of its arguments, without constants of the compiler."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Assign)):
        if isinstance(call.value, ast.Call) and ast.unparse(call.value.func) == "async_compile.triton":
            source = ast.parse(ast.literal_eval(call.value.args[1]))
            tables = (node for node in ast.walk(source) if isinstance(node, ast.Dict))
            entries = (pair for node in tables for pair in zip(node.keys, node.values, strict=True))
            values = (value for key, value in entries if isinstance(key, ast.Constant) and key.value == "signature")
            signature = ast.literal_eval(next(values))
            yield _name_of(call.targets[0]), {name: kind for name, kind in signature.items() if kind != "constexpr"}


def _kind(name: str, kernels: Mapping[str, Any]) -> str:
    if name in kernels:
        return "fused"
    if any(part in name for part in ATTENTION):
        return "attention"
    return "products" if set(PRODUCTS) & set(name.split(".")) else "other"


def _name_of(tensor: ast.expr) -> str:
    """The name of a tensor, or that of the tensor that it is a view or a part of."""
    if isinstance(tensor, ast.Call):
        tensor = tensor.args[0]
    return ast.unparse(tensor)


def _names(value: ast.expr) -> Iterator[ast.Name]:
    return (node for node in ast.walk(value) if isinstance(node, ast.Name))
