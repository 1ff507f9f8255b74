"""What `ruvon doctor` says of Extension C: whether models without a file of ours can run here.

It brings no command. Found by its name (engine/cli/extensions.py).
"""

from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

COMMANDS = ()


def findings() -> Iterator[tuple[str, bool, str]]:
    """For `ruvon doctor`: (what, whether it is to be had, how)."""
    has_transformers = find_spec("transformers") is not None
    how = "transformers is missing; pip install 'ruvon[transformers]'"
    if has_transformers:
        how = f"transformers {version('transformers')} computes decoders of text without a file of ours"
    yield "any model", has_transformers, how
