"""When Python's garbage collector runs: at logged steps, and never in the middle of one."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside, garbage is collected only by gc.collect(), and what exists at the beginning is left alone.

    Python would collect in the middle of any step, on each rank in a different one, and all ranks wait for the slowest.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
