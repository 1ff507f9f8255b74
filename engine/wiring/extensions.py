"""Lettered extensions: which there are, and whether their files are here. Part 20.

An extension comes after Part 20, so no file of Part 20 imports an extension's. They are looked for by name
instead. Each extension has a module named by its slug in this folder (`wiring_of`), and another in cli/ if it
has something for the command line. Further modules in this folder may be there or not (`optional_module`).
Imports no torch.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.core.interfaces import Capability, Preparation

MANY_DEVICES, STRUCTURED_OUTPUT, ANY_MODEL = "A", "B", "C"
# letter -> slug, as in its part.toml
EXTENSIONS = {MANY_DEVICES: "many_devices", STRUCTURED_OUTPUT: "structured_output", ANY_MODEL: "any_model"}
# Extensions that add a capability to every engine. Their module has a function `contribution(devices)`, which
# returns a Contribution.
BRING_CAPABILITIES = (STRUCTURED_OUTPUT,)


class Contribution(NamedTuple):
    """What an extension adds to an engine, beside its options."""

    capability: "Capability"  # the engine calls it around each step
    preparation: "Preparation"  # the engine calls it for each new request
    supports: frozenset[str]  # fields of SamplingParams that have an effect with this extension


def is_here(letter: str) -> bool:
    """Whether this tree has the extension's files."""
    return find_spec(f"{__package__}.{EXTENSIONS[letter]}") is not None


def wiring_of(letter: str) -> ModuleType:
    """The module with the extension's slug in this folder. Raises ModuleNotFoundError if this tree does not
    have it.
    """
    return import_module(f"{__package__}.{EXTENSIONS[letter]}")


def optional_module(name: str) -> ModuleType | None:
    """The module `name` of this folder, which belongs to an extension; None if this tree does not have it."""
    module = f"{__package__}.{name}"
    return None if find_spec(module) is None else import_module(module)
