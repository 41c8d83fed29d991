"""Python's garbage collector, off the step path.

It would run in the middle of any step, on each rank in another one, and all ranks wait for the slowest.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Inside, garbage is collected only where gc.collect() is called. What is there at the beginning is left alone."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
