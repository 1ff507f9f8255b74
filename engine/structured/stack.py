"""Calls a function with a large stack, for code that calls itself as deep as its input is nested. Extension
B.

A schema may refer to another, that to a third, and so on a thousand times. llguidance follows such a chain by
calling itself, and a stack that overflows ends the process. The length of a schema is bounded, and so is the
chain that fits into it: the stack here is larger than the longest one needs.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
STACK_BYTES = 512 << 20  # of addresses; memory is taken for what is used alone
_LOCK = threading.Lock()  # Python has one stack size for all threads that begin


def call_deep(function: Callable[[], Result]) -> Result:
    """What `function` returns or raises, called in a thread of its own."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="compile", daemon=True)
    with _LOCK:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
