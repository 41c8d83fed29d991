"""The ways in which a checkpoint can be damaged. Imports no torch."""

from parallel.errors import UserError


class Damage(UserError):
    """A checkpoint is not as it was written. The text names the file, and the tensor and bytes where possible."""


class Unreadable(Damage):
    """The disk or the network returns an error for a file. Its contents may be intact."""


class OlderFormat(Damage):
    """A checkpoint in the format of torch.distributed.checkpoint, which older versions wrote."""
