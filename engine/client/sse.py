"""Server-sent events, read: bytes in, the data of each event out. Part 14.

Promises what the standard demands of a reader, wherever the network cuts the bytes. Knows nothing of what the
data mean. Part 4 writes such events. Source:
https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

import re
from collections.abc import Iterable, Iterator

LINE_END = re.compile(rb"\r\n|\n|\r")


def lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """The lines of a text that comes in pieces, each as soon as its end is there.

    A line ends with CRLF, LF or CR, and with nothing else: `str.splitlines` cuts at eight more characters,
    some of which stand in JSON as they are. A piece may end anywhere: in a line, in a character, or between
    CR and LF, which are one end and not two. A byte order mark before everything is left out; bytes that are
    not UTF-8 become U+FFFD. What has no end when the pieces are over is no line.
    """
    unfinished = bytearray()  # of the line whose end has not come
    after_cr = False  # whether the last byte was a CR
    encoding = "utf-8-sig"
    for piece in filter(None, pieces):
        rest = piece.removeprefix(b"\n") if after_cr else piece
        after_cr = piece.endswith(b"\r")
        *line_ends, rest = LINE_END.split(rest)
        for line_end in line_ends:
            line = unfinished + line_end
            unfinished = bytearray()
            yield line.decode(encoding, errors="replace")
            encoding = "utf-8"
        unfinished += rest


def events(lines: Iterable[str]) -> Iterator[str]:
    """The data of each event, as soon as the empty line is there that ends it.

    A line is `name:value`; one space behind the colon is not part of the value. Without a colon, the line is
    a name, and its value empty. The values of `data` are the lines of the event's data, joined by line
    breaks; every other name is passed over, and so is a comment, which begins with a colon: servers send it
    to keep a connection open. An event without `data` is none, nor is one whose empty line never comes.
    """
    data: list[str] = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif not line:
            if data:
                yield "\n".join(data)
            data = []
