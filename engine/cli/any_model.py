"""Extension C's line in `ruvon doctor`: whether models without a file of ours can run here.

The extension adds no command. engine/cli/extensions.py finds this module by its name.
"""

from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

COMMANDS = ()


def findings() -> Iterator[tuple[str, bool, str]]:
    """The lines of `ruvon doctor`: (what is checked, whether it is available, how to use or to get it)."""
    has_transformers = find_spec("transformers") is not None
    message = "transformers is missing; pip install 'ruvon[transformers]'"
    if has_transformers:
        message = f"transformers {version('transformers')} computes decoders of text without a file of ours"
    yield "any model", has_transformers, message
