"""Python's collector of cycles, asked less often while steps run. Part 6.

A step of many requests makes more objects than Python lets pass between two looks for cycles (700 by
default), and none of them is in one. A program that serves may say so for good; a library puts back what it
found.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 10_000  # that Python looks for cycles after: more than one step's records


@contextmanager
def rare_collections() -> Iterator[None]:
    """Meanwhile. A threshold that is higher, or 0 (never), stays as it is; so does one that is another's, who
    puts it back.
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
