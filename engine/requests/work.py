"""Work that a request needs before it can be made, and that may take longer than a step. Part 6."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class SlowWork(NamedTuple):
    """A function to call. Work of the same name is the same work."""

    name: Hashable
    function: Callable[[], Any]
