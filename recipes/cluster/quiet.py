"""How a launcher imports torch: in advance, if it will replace another one, and with little of torch's logs."""

import logging
import os
import select

from recipes.cluster.restarts import WAITS
from recipes.files.screen import tell

QUIET_SECONDS = 20.0
"""How long a launcher that starts in advance waits before it imports torch: the workers start meanwhile."""


class OnlyKills(logging.Handler):
    """Prints of torchrun's log only that a worker had to be killed."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Unable to shutdown process"):
            tell("launch: a worker did not stop in time and was killed")


def import_torch_distributed() -> None:
    """Import it without its C++ warnings, and reduce torchrun's log to OnlyKills unless LOGLEVEL is set."""
    # torch reads it at import. Losing the store is expected here: node 0's goes first at the end. The workers may warn.
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch.distributed  # noqa: F401  installs log handlers, so ours come after it; later imports already log

    if quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    if "LOGLEVEL" not in os.environ:
        logger = logging.getLogger("torch.distributed")
        logger.handlers, logger.propagate = [OnlyKills()], False


def await_turn() -> None:
    """If another launcher still runs, import torch, and wait until this one is needed. Signals stay blocked."""
    if not os.environ.pop(WAITS, ""):
        return
    if not select.select([0], [], [], QUIET_SECONDS)[0]:
        import_torch_distributed()
        import torch.distributed.run  # noqa: F401
    if not os.read(0, 1):  # the supervisor has ended, which closes the pipe
        os._exit(0)
    os.dup2(nothing := os.open(os.devnull, os.O_RDONLY), 0)
    os.close(nothing)
