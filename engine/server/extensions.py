"""Finds modules of lettered extensions in this room. Part 20.

No file of Part 20 imports an extension's, so who needs such a module asks for it by its name.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def optional_module(name: str) -> ModuleType | None:
    """The module `name` of this room, which belongs to an extension; None if the tree does not have it."""
    module = f"{__package__}.{name}"
    return None if find_spec(module) is None else import_module(module)
