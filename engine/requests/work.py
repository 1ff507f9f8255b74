"""Work that a request needs before it can be made. Part 6."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class Work(NamedTuple):
    """Something to be done. Work of the same name is the same work."""

    name: Hashable
    function: Callable[[], Any]
