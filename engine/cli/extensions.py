"""Finds the commands of lettered extensions. Part 20.

An extension that adds to the command line has a module in this folder, named by the extension's slug. The
module has COMMANDS, a tuple of functions that become commands of `ruvon`, and `findings`, which yields the
extension's lines in `ruvon doctor`, a `Finding` each.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from engine.wiring.extensions import EXTENSIONS


@dataclass(frozen=True)
class Finding:
    """The result of one check of `ruvon doctor`, printed as one line."""

    name: str  # what is checked
    message: str  # what was found, how to use it, or how to get it
    ok: bool = True
    needed: bool = False  # whether nothing runs if this check fails


def modules_of_extensions() -> list[ModuleType]:
    """The modules of the extensions that are in this tree, in the order of their letters."""
    slugs = [slug for slug in EXTENSIONS.values() if find_spec(f"{__package__}.{slug}")]
    return [import_module(f"{__package__}.{slug}") for slug in slugs]
