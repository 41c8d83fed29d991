"""Several passes over a compiled graph where Inductor takes one."""

from collections.abc import Sequence
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph


class InTurn(CustomGraphPass):
    """Calls each of these passes."""

    def __init__(self, passes: Sequence[CustomGraphPass]) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any:
        """Part of the key of Inductor's cache."""
        return [each.uuid() for each in self.passes]
