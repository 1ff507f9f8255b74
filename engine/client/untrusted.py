"""Answers of servers that are not trusted, for the terminal's board (Part 11), chats (14), loads (15).

Promises that an answer is bounded, that JSON nested too deeply is a ValueError like any other, and that text
cannot control a terminal. Knows no HTTP.
"""

import json
import re
import sys
from dataclasses import dataclass
from typing import Any

MAX_ANSWER_BYTES = 2**26  # some 250,000 tokens as events
MAX_COUNT = 2**53  # up to which all readers of JSON agree on whole numbers
# Control characters but tab and line feed; halves of characters, which no terminal can show.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def is_this_machine(host: str | None) -> bool:
    """Whether a server of this name is on this machine. It is asked without a proxy, though the environment
    may name one: that could not reach it.
    """
    return host in ("localhost", "127.0.0.1", "::1")


@dataclass
class ByteLimit:
    """How many bytes of an answer may still come."""

    bytes_left: int = MAX_ANSWER_BYTES

    def take(self, piece: bytes) -> bytes:
        """The piece, once it is counted. Raises ValueError: the answer is too long."""
        self.bytes_left -= len(piece)
        if self.bytes_left < 0:
            raise ValueError(f"the answer is longer than {MAX_ANSWER_BYTES:,} bytes")
        return piece


def parse_json(text: str | bytes) -> Any:
    """What the JSON says. Raises ValueError: it is no JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None


def token_count(value: Any) -> int | None:
    """A number of tokens in JSON; None stays None. Raises ValueError."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError("the number of tokens is no whole number from 0 on")
    return value


def printable(text: str) -> str:
    """Text for a terminal, with U+FFFD for each of the CONTROL characters."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def for_stdout(text: str) -> str:
    """`printable` if stdout is a terminal; else the text as it is."""
    return printable(text) if sys.stdout.isatty() else text
