"""Python's garbage collector, run less often while steps run. Part 6.

By default Python searches for reference cycles after some hundreds of new objects (700 in Python 3.12). A
step of many requests creates more objects than that, and hardly any of them is in a cycle. The old threshold
is restored after the block, because a library must not change the process that uses it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 10_000  # new objects between two searches for cycles: more than a step keeps


@contextmanager
def rare_collections() -> Iterator[None]:
    """Raise the collector's threshold to NEW_OBJECTS inside the block.

    A threshold that is already as high, or 0 (the collector never runs), stays as it is.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < NEW_OBJECTS:
        yield
        return
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
