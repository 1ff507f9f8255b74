"""Finds the modules of lettered extensions in this room. Part 20.

An extension that adds to the server has a module here, named by the extension's slug.
"""

from importlib import import_module
from types import ModuleType


def module_of(slug: str) -> ModuleType:
    """The extension's module in this room. Raises ModuleNotFoundError if the tree does not have it."""
    return import_module(f"{__package__}.{slug}")
