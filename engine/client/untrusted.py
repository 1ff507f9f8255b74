"""Checks for answers of servers that a client does not trust. Part 11; also used by Parts 14 and 15.

The checks bound an answer's length, turn JSON that is nested too deeply into a ValueError, and replace the
characters with which text controls a terminal. Two functions are about the server's address.
"""

import json
import re
import sys
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_ANSWER_BYTES = 2**26  # about 250,000 tokens as events
MAX_COUNT = 2**53  # up to here, all readers of JSON agree on whole numbers
# Control characters except tab and line feed; and surrogates (half characters), which UTF-8 cannot encode.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def is_this_machine(host: str | None) -> bool:
    """Whether `host` names this machine. A client asks a server on this machine without a proxy, even if the
    environment names one: the proxy could not reach the server.
    """
    return host in ("localhost", "127.0.0.1", "::1")


def check_port(url: str) -> None:
    """Raise ValueError if the address has a port that is no number from 0 to 65535. A system may connect to
    such a port modulo 65536, where another server may be.
    """
    _ = urlsplit(url).port  # raises ValueError


@dataclass
class ByteLimit:
    """Counts the bytes of one answer, which may have `bytes_left` bytes more."""

    bytes_left: int = MAX_ANSWER_BYTES

    def take(self, piece: bytes) -> bytes:
        """Count the piece, and return it. Raises ValueError if the answer is now too long."""
        self.bytes_left -= len(piece)
        if self.bytes_left < 0:
            raise ValueError(f"the answer is longer than {MAX_ANSWER_BYTES:,} bytes")
        return piece


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if the text is not JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None


def token_count(value: Any) -> int | None:
    """A number of tokens from a server's JSON; None stays None. Raises ValueError if `value` is anything but
    an integer from 0 to MAX_COUNT.
    """
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"the number of tokens is no whole number from 0 to {MAX_COUNT}")
    return value


def printable(text: str) -> str:
    """The text with U+FFFD in place of each character of CONTROL, so that it can be printed in a terminal."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def one_printable_line(error: Exception) -> str:
    """The error's message, which may quote a stranger's file: without line breaks and control characters."""
    return printable(" ".join(str(error).split()))


def for_stdout(text: str) -> str:
    """`printable(text)` if stdout is a terminal; otherwise the text as it is."""
    return printable(text) if sys.stdout.isatty() else text
