"""Bytes become lines, wherever the network cuts them. From small to large."""

from itertools import combinations, pairwise

import pytest

from engine.client import sse
from engine.client.sse import LINE_END, lines


def cut(data: bytes, *places: int) -> list[bytes]:
    """`data` in pieces that end at these places."""
    bounds = [0, *places, len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def test_a_line_ends_with_lf_crlf_or_cr():
    for end in (b"\n", b"\r\n", b"\r"):
        got = list(lines([b"one" + end + b"two" + end]))
        assert got == ["one", "two"], f"a line ends with {end!r}"
    assert list(lines([b"a\n\r\nb\r\r\n"])) == ["a", "", "b", ""], "each end makes a line, an empty one too"


def test_blanks_at_the_end_of_a_line_are_part_of_it():
    got = list(lines([b"one \n two\t\r\n \r"]))
    assert got == ["one ", " two\t", " "], "the end is no part of the line, and nothing else is left out"


def test_what_has_no_end_is_no_line():
    assert list(lines([b"one\ntwo"])) == ["one"], "the last line never ended, so it is none"
    assert list(lines([])) == []


# Where `str.splitlines` cuts as well. JSON escapes those below U+0020; it may leave the last three.
@pytest.mark.parametrize("character", "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", ids=ascii)
def test_no_other_character_ends_a_line(character):
    got = list(lines([f"one{character}two\n".encode()]))
    assert got == [f"one{character}two"], f"{character!a} is part of the line: it ends none"


def test_a_line_may_come_in_pieces():
    assert list(lines([b"o", b"ne\ntw", b"o\n"])) == ["one", "two"], "a line may come in pieces"
    assert list(lines([b"", b"one", b"", b"\n", b""])) == ["one"], "an empty piece changes nothing"
    assert list(lines([b"o", b"n", b"e\n"])) == ["one"], "a line may come in more than two pieces"


def test_a_character_may_come_in_pieces():
    data = "é🐉\n".encode()
    for place in range(1, len(data)):
        got = list(lines(cut(data, place)))
        assert got == ["é🐉"], "a piece may end inside a character: put bytes together before you decode them"


def test_cr_and_lf_are_one_end_also_in_two_pieces():
    assert list(lines([b"one\r", b"\ntwo\r", b"\n"])) == ["one", "two"], (
        "CR at the end of a piece and LF at the beginning of the next are one end"
    )
    assert list(lines([b"one\r", b"", b"\n"])) == ["one"], "an empty piece between CR and LF changes nothing"
    assert list(lines([b"one\r", b"two\n", b"\n"])) == ["one", "two", ""], (
        "only an LF right behind the CR belongs to it"
    )
    for pieces in ([b"one\r", b"\n", b"\n"], [b"one\r", b"\n\n"]):
        assert list(lines(pieces)) == ["one", ""], (
            "a CR takes one LF with it, and the next LF ends a line of its own"
        )


def test_a_line_is_there_as_soon_as_its_end_is():
    """The pieces are a wire: whoever asks for one more than is needed waits, perhaps for ever."""

    def wire(*pieces):
        yield from pieces
        raise AssertionError(
            "a line is given as soon as its end is there, before the next piece is asked for"
        )

    for piece in (b"one\n", b"one\r\n", b"one\r"):
        assert next(lines(wire(piece))) == "one"
    two = lines(wire(b"one\ntwo\n"))
    assert [next(two), next(two)] == ["one", "two"]


def test_a_byte_order_mark_is_left_out_in_front_alone():
    mark = "\ufeff".encode()
    assert list(lines([mark + b"one\n"])) == ["one"], (
        "a byte order mark before everything is no part of a line"
    )
    assert list(lines([mark[:1], mark[1:] + b"one\n"])) == ["one"], "it may come in pieces, too"
    assert list(lines([b"one\n" + mark + b"two\n"])) == ["one", "\ufefftwo"], (
        "later, the mark is a character like any other"
    )
    assert list(lines([b"\n" + mark + b"two\n"])) == ["", "\ufefftwo"], (
        "later, the mark is a character like any other: an empty first line was the first one"
    )


def test_what_is_not_utf8_becomes_a_mark():
    try:
        got = list(lines([b"a\xffb\n"]))
    except UnicodeDecodeError as error:
        got = [str(error)]
    assert got == ["a\ufffdb"], "bytes that are not UTF-8 become U+FFFD"


def test_however_the_bytes_are_cut_the_lines_are_the_same():
    data = "a\r\n\r\né\u2028🐉\n\r\rz\r\n".encode()
    whole = ["a", "", "é\u2028🐉", "", "", "z"]
    for places in combinations(range(len(data) + 1), 2):
        got = list(lines(cut(data, *places)))
        assert got == whole, f"cut at {places[0]} and {places[1]}, the lines are others"
    assert list(lines(data[i : i + 1] for i in range(len(data)))) == whole, "cut into single bytes"


class Counted:
    """LINE_END, and how many bytes it was asked to look at."""

    num_bytes = 0

    def __getattr__(self, name):
        def call(data, start=0, *more):
            self.num_bytes += len(data) - start
            method = getattr(LINE_END, name)
            return method(data, start, *more) if start or more else method(data)

        return call


def test_a_long_line_is_searched_once(monkeypatch):
    """Who writes without LINE_END is not seen here."""
    counted = Counted()
    monkeypatch.setattr(sse, "LINE_END", counted)
    assert list(lines([b"x" * 100] * 500 + [b"\n"])) == ["x" * 50_000]
    assert counted.num_bytes <= 2 * 50_001, (
        "each byte is searched for an end once: a line that has none yet is not searched again"
    )
