"""What another machine says, read with care: by the terminal's board (Part 11), chats (14), loads (15).

Promises that an answer is bounded, that JSON nested too deeply is an error like any other, and that text for
a terminal commands nothing. Knows no HTTP.
"""

import json
import re
import sys
from dataclasses import dataclass
from typing import Any

MAX_ANSWER_BYTES = 2**26  # some 250,000 tokens as events
MAX_COUNT = 2**53  # whole numbers that JSON's readers agree on
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all but a tab and a line's end


def is_this_machine(host: str | None) -> bool:
    """Whether a server of this name is on this machine: then it is asked without a proxy, which the
    environment may name, and which could not reach it.
    """
    return host in ("localhost", "127.0.0.1", "::1")


@dataclass
class ByteLimit:
    """How much of an answer may still come."""

    left: int = MAX_ANSWER_BYTES

    def take(self, piece: bytes) -> bytes:
        """Gives it back. Raises ValueError: it is more than there may be."""
        self.left -= len(piece)
        if self.left < 0:
            raise ValueError(f"the answer is longer than {MAX_ANSWER_BYTES:,} bytes")
        return piece


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None


def token_count(value: Any) -> int | None:
    """A number of tokens, as JSON has it; None stays None. Raises ValueError."""
    if value is not None and not (type(value) is int and 0 <= value <= MAX_COUNT):
        raise ValueError("the number of tokens is no whole number from 0 on")
    return value


def shown(text: str) -> str:
    """Text for a terminal: characters that would command it, or are none, become a mark."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def for_stdout(text: str) -> str:
    """As it is; but as `shown` if stdout is a terminal."""
    return shown(text) if sys.stdout.isatty() else text
