"""Calls a function with a large stack, for code that calls itself as deep as its input is nested. Extension
B.

A schema may refer to a second schema, which refers to a third, and so on a thousand times. llguidance follows
such references by calling itself, and a stack that overflows ends the process. The length of a schema is
bounded, and so is the number of references in it. The stack here is larger than the longest chain needs.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
STACK_BYTES = 512 << 20  # of addresses: memory is taken only for the part that is used
_STACK_SIZE_LOCK = threading.Lock()  # `threading.stack_size` holds for all threads that start after it


def call_with_large_stack(function: Callable[[], Result]) -> Result:
    """Call `function` in a new thread with a stack of STACK_BYTES, and return or raise what it does."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="compile", daemon=True)
    with _STACK_SIZE_LOCK:
        usual_size = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual_size)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
