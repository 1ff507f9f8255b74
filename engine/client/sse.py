"""Reads server-sent events: bytes go in, the data of each event come out. Part 14.

The result follows the standard wherever the network cuts the bytes. The data are text; their meaning is the
caller's business. Part 4 writes such events. Source:
https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

import re
from collections.abc import Iterable, Iterator

LINE_END = re.compile(rb"\r\n|\n|\r")


def lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a text that comes in pieces, each line as soon as its end has come.

    A line ends with CRLF, LF or CR, and with nothing else. (`str.splitlines` also cuts at eight other
    characters, some of which JSON contains unescaped.) The end is no part of the line, and a line may be
    empty. A piece may end anywhere: in a line, in a character, or between CR and LF, which still are one end
    and not two. A byte order mark at the very beginning is left out. Bytes that are not UTF-8 become U+FFFD.
    Text whose end has not come when the pieces are over is not a line.
    """
    unfinished = bytearray()  # the bytes so far of the line whose end has not come
    after_cr = False  # whether the last byte was a CR
    # For the first line "utf-8-sig", which leaves out a byte order mark.
    encoding = "utf-8-sig"
    for piece in filter(None, pieces):
        text = piece.removeprefix(b"\n") if after_cr else piece
        after_cr = piece.endswith(b"\r")
        *tails, rest = LINE_END.split(text)
        for tail in tails:
            line = unfinished + tail
            unfinished = bytearray()
            yield line.decode(encoding, errors="replace")
            encoding = "utf-8"
        unfinished += rest


def events(text_lines: Iterable[str]) -> Iterator[str]:
    """Yield the data of each event, as soon as the empty line that ends the event has come.

    A line is `name:value`; one space after the colon is not part of the value. A line without a colon is a
    name with an empty value. An event's data are the values of its lines named `data`, joined by line breaks.
    Lines with other names are skipped. So are comments, which begin with a colon: servers send comments to
    keep a connection open. An event without a `data` line is skipped, and so is an event whose empty line
    never comes.
    """
    data: list[str] = []
    for line in text_lines:
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif not line:
            if data:
                yield "\n".join(data)
            data = []
