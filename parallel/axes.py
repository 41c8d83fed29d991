"""The axes of the mesh, and what each of them is for: the table that everything about axes derives from.

Processes along an axis that neither reads other data, nor sums losses, nor shards hold the same sequences, the same
loss and the same shards. **Every reduction names its axes; nothing sums over the world by default.**
Imports no torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh."""

    name: str
    reads_data: bool = False
    """Whether processes along it read different sequences."""
    sums_loss: bool = False
    """Whether losses are summed over it: each process has that of other tokens, or has none, before the last stage."""
    shards: bool = False
    """Whether FSDP shards parameters, gradients and optimizer states along it."""
    cuts_layers: bool = False
    """Whether processes along it hold parts of the same layers. From these axes that of experts is borrowed."""
    cuts_rows: bool = False
    """Whether processes along it hold other tokens of the same rows, where routers see them."""


AXES = (
    Axis("pipeline", sums_loss=True),  # parts of the model, one after the other
    Axis("replicate", reads_data=True, sums_loss=True),  # copies of the sharded model
    Axis("shard", reads_data=True, sums_loss=True, shards=True, cuts_layers=True),
    Axis("context", sums_loss=True, shards=True, cuts_layers=True, cuts_rows=True),  # parts of every row of tokens
    Axis("tensor", cuts_layers=True, cuts_rows=True),  # parts of every matrix
)
"""The axes, outermost first: neighbouring ranks are in the same tensor group."""
EXPERT = "expert"
"""The axis that divides experts. It has a DeviceMesh of its own; see MeshDegrees.dimensions_of_experts()."""

NAMES = tuple(axis.name for axis in AXES)
DATA_AXES = tuple(axis.name for axis in AXES if axis.reads_data)
"""Over these, token counts are summed. They are dimensions of the DeviceMesh even where they have one process."""
LOSS_AXES = tuple(axis.name for axis in AXES if axis.sums_loss)
FSDP_AXES = tuple(axis.name for axis in AXES if axis.shards)
LAYER_AXES = tuple(axis.name for axis in AXES if axis.cuts_layers)
"""Over these, Muon brings the parts of a matrix together."""
ROW_AXES = tuple(axis.name for axis in AXES if axis.cuts_rows)
"""Over these, routers count the tokens of whole rows."""
TOKEN_AXES = tuple(axis.name for axis in AXES if axis.reads_data or axis.cuts_rows)
"""Over these, the loads of experts are summed."""


def axis_of_experts(count: int, rows: int, *, shards: int) -> int:
    """Along which axis of a stack of matrices (count, rows, columns) FSDP cuts a process's experts.

    Fewer experts than processes would leave some of them padding only: then each process has rows of all.
    """
    return 1 if count % shards and not rows % shards else 0
