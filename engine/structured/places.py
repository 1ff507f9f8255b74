"""Where in a JSON schema something is refused: the keyword, and the way to it. Extension B.

A library that refuses a schema says why, but not where. So parts of the schema are tried, one by one. First
the smallest schema within the schema is searched that is refused for the same reason. Then, in this smallest
schema, the keyword without which it is not refused.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from engine.structured.schemas import DEFINITIONS, escaped, schemas_within

MAX_SECONDS = 0.5  # of the thread's processor time: a part may take as long as the schema itself
WhyRefused = Callable[[Any], str | None]  # a schema -> why it is refused, or None


def place_of_refusal(schema: Any, why_refused: WhyRefused) -> str:
    """The place of what is refused in `schema`, as a JSON pointer, such as "#/properties/age/not". If the
    search takes more than MAX_SECONDS, the result is a place above it.
    """
    reason = why_refused(schema)
    deadline = time.thread_time() + MAX_SECONDS
    definitions = {}
    if isinstance(schema, Mapping):
        definitions = {keyword: schema[keyword] for keyword in DEFINITIONS if keyword in schema}

    def is_refused(part: Any) -> bool:
        """Whether a part is refused for the same reason. False if no time is left."""
        with_definitions = {**definitions, **part} if isinstance(part, Mapping) else part
        return time.thread_time() < deadline and why_refused(with_definitions) == reason

    def refused_within(outer: Any) -> tuple[str, Any] | None:
        """The first schema directly within `outer` that is refused, as (its steps in a JSON pointer, the
        schema); None if none is.
        """
        for steps, part in schemas_within(outer):
            if is_refused(part):
                return steps, part
        return None

    # 1. Go down to the smallest schema that is refused.
    pointer, smallest = "#", schema
    inner = refused_within(schema)
    while inner is not None:
        steps, smallest = inner
        pointer += f"/{steps}"
        inner = refused_within(smallest)
    # 2. There, find the keyword without which the schema is not refused. The reason may name the keyword, so
    #    keywords in it are tried first.
    keywords = list(smallest) if isinstance(smallest, Mapping) else []
    named = [keyword for keyword in keywords if keyword in (reason or "")]
    others = [keyword for keyword in keywords if keyword not in named]
    for keyword in [*named, *others]:
        without_keyword = {name: value for name, value in smallest.items() if name != keyword}
        if not is_refused(without_keyword) and time.thread_time() < deadline:
            return f"{pointer}/{escaped(keyword)}"
    return pointer
