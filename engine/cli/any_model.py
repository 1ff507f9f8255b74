"""Extension C's line in `ruvon doctor`: whether models without a file of ours can run here.

The extension adds no command. engine/cli/extensions.py finds this module by its name.
"""

from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

from engine.cli.extensions import Finding

COMMANDS = ()


def findings() -> Iterator[Finding]:
    """The extension's line of `ruvon doctor`."""
    has_transformers = find_spec("transformers") is not None
    message = "transformers is missing; pip install 'ruvon[transformers]'"
    if has_transformers:
        message = f"transformers {version('transformers')} computes decoders of text without a file of ours"
    yield Finding("any model", message, ok=has_transformers)
