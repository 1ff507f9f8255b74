"""What a lettered extension brings to the server: a module here, named by its slug. Part 20."""

from importlib import import_module
from types import ModuleType


def module_of(slug: str) -> ModuleType:
    """The extension's module in this room. Raises ModuleNotFoundError: it is not here."""
    return import_module(f"{__package__}.{slug}")
