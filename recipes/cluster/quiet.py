"""What a launcher prints of torch's and torchrun's logs."""

import logging
import os

from recipes.files.screen import tell


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
