"""What a call comes to: its result or the error it raised, so that one assertion can name the broken rule."""

from collections.abc import Callable
from typing import Any


def outcome(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result, or the error as text. An open exercise's announcement passes through."""
    try:
        return call(*arguments, **named)
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
