"""Lettered extensions: which there are, and whether their files are here. Part 20.

An extension comes after Part 20, so no file of Part 20 imports it by name. It is found by a convention
instead: its slug is the name of its module in this room, and of one in cli/ if it brings commands. Imports no
torch.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

EXTENSIONS = {"A": "many_devices", "C": "any_model"}  # letter -> slug, as in its part.toml


def is_here(letter: str) -> bool:
    """Whether this tree has the extension's files."""
    return find_spec(f"{__package__}.{EXTENSIONS[letter]}") is not None


def wiring_of(letter: str) -> ModuleType:
    """The extension's module in this room. Raises ModuleNotFoundError: it is not here."""
    return import_module(f"{__package__}.{EXTENSIONS[letter]}")
