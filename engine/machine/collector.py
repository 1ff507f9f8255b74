"""Python's garbage collector, run less often while steps run. Part 6.

A step of many requests makes more objects than Python allows between two searches for cycles (700 by
default), and none of them is in a cycle. The old threshold is set again afterwards: a library does not change
the process that uses it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 10_000  # between two searches for cycles: more than the records of a step


@contextmanager
def rare_collections() -> Iterator[None]:
    """Inside the block Python searches for cycles after NEW_OBJECTS. A threshold that is higher already, or 0
    (never), stays as it is.
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
