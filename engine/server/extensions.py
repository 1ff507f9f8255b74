"""Finds modules of lettered extensions in this folder. Part 20.

No file of Part 20 imports an extension's, so who needs such a module asks for it by its name. Each folder has
its own function for that: a computed name may only be that of a module beside it, since otherwise no test
could see which folder imports which.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def optional_module(name: str) -> ModuleType | None:
    """The module `name` of this folder, which belongs to an extension; None if this tree does not have it."""
    module = f"{__package__}.{name}"
    return None if find_spec(module) is None else import_module(module)
