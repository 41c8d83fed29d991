"""How widely the axes of the mesh are known, which is what a new one would cost."""

import ast

import pytest

from parallel.axes import EXPERT, NAMES
from tests.sources import nodes
from tests.test_architecture import FILES, name

OWNERS = {"parallel/axes.py", "parallel/config.py", "parallel/mesh.py"}
HAVING = {"mesh", "degrees", "work", "own", "layout"}
"""What is called so has axes as attributes; torch.tensor() is none."""
FILES_THAT_NAME = {"pipeline": 31, "replicate": 21, "shard": 18, "context": 28, "tensor": 39, "expert": 17}
"""At most 20 is the goal. A new axis may need no more; where fewer are left, write their number."""


def is_named_by(node: ast.AST, axis: str) -> bool:
    """Whether the node is `mesh.tensor`, "tensor" or "mesh.tensor"."""
    if isinstance(node, ast.Attribute):
        owner = node.value
        called = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        return node.attr == axis and called in HAVING
    return isinstance(node, ast.Constant) and node.value in (axis, f"mesh.{axis}")


@pytest.mark.parametrize("axis", [*NAMES, EXPERT])
def test_so_many_files_outside_its_owners_name_an_axis(axis: str) -> None:
    files = [name(file) for file in FILES if any(is_named_by(node, axis) for node in nodes(file))]
    others = sorted({*files} - OWNERS)
    assert len(others) <= FILES_THAT_NAME[axis], others
