"""What lettered extensions bring to the command line: a module here, named by the slug. Part 20.

Such a module has COMMANDS, a tuple of functions that become commands of `ruvon`; and `findings`, which yields
what `ruvon doctor` says of it.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from engine.wiring.extensions import EXTENSIONS


def modules_of_extensions() -> list[ModuleType]:
    """The modules of the extensions that are in this tree, in the order of their letters."""
    slugs = [slug for slug in EXTENSIONS.values() if find_spec(f"{__package__}.{slug}")]
    return [import_module(f"{__package__}.{slug}") for slug in slugs]
