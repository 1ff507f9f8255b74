"""For assertions that say on one line what is wrong."""

from collections.abc import Callable, Sequence
from typing import Any


def outcome(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Its result, or its error as text. An open exercise's announcement passes through."""
    try:
        return call(*arguments, **named)
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Where two outputs part; empty when they are the same. A line, where pytest would print both whole."""
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return f"the same for {place} tokens, then {a} where Hugging Face has {b}"
    return "" if len(ours) == len(theirs) else f"{len(ours)} tokens, Hugging Face has {len(theirs)}"
