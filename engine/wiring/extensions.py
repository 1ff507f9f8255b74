"""Lettered extensions: which there are, and whether their files are here. Part 20.

An extension comes after Part 20, so no file of Part 20 imports it by name. It is found by a convention
instead: its slug is the name of its module in this room, and of one in cli/ if it brings commands. Imports no
torch.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.core.llm_engine import Capability, Preparation

# letter -> slug, as in its part.toml
EXTENSIONS = {"A": "many_devices", "B": "structured_output", "C": "any_model"}
BRING_CAPABILITIES = ("B",)  # their module has `brought(devices)`, which returns what an engine gets of them


class Brought(NamedTuple):
    """What an extension brings to an engine, beside its options."""

    capability: "Capability"
    preparation: "Preparation"
    supports: frozenset[str]  # fields of SamplingParams


def is_here(letter: str) -> bool:
    """Whether this tree has the extension's files."""
    return find_spec(f"{__package__}.{EXTENSIONS[letter]}") is not None


def wiring_of(letter: str) -> ModuleType:
    """The extension's module in this room. Raises ModuleNotFoundError: it is not here."""
    return import_module(f"{__package__}.{EXTENSIONS[letter]}")


def found(name: str) -> ModuleType | None:
    """The module `name` of this room, which an extension brings; None if it is not here."""
    module = f"{__package__}.{name}"
    return None if find_spec(module) is None else import_module(module)
