"""Sets of characters as expressions over their bytes in UTF-8. Extension B.

A character beyond ASCII is two to four bytes, and a model writes it byte by byte, in tokens that end
anywhere. So a set of characters is a choice of sequences of ranges of bytes: of all characters, `[00-7F]` or
`[C2-DF][80-BF]` or longer ones. Source: RFC 3629, and Cox 2010, https://swtch.com/~rsc/regexp/regexp3.html.
"""

from collections.abc import Iterable, Iterator

from engine.structured.derivative import Expression, chain, either, one_of

Ranges = list[tuple[int, int]]  # of code points, both ends included, in order, and none beside another
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # halves of characters in UTF-16: no characters, and not in UTF-8
BYTES_END = (0x7F, 0x7FF, 0xFFFF, LAST)  # the last code point of one, two, three and four bytes


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same set in order, with ranges that touch made one."""
    joined: Ranges = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return joined


def others(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All characters that are in none of the ranges."""
    rest, next_low = [], 0
    for low, high in normal([*ranges, SURROGATES]):
        if low > next_low:
            rest.append((next_low, low - 1))
        next_low = high + 1
    return [*rest, (next_low, LAST)] if next_low <= LAST else rest


def characters(ranges: Iterable[tuple[int, int]]) -> Expression:
    """One character of the ranges."""
    kept = others(others(ranges))  # without surrogates
    return either(*(chain(*steps) for low, high in kept for steps in _encoded(low, high)))


def _encoded(low: int, high: int) -> Iterator[list[Expression]]:
    """Sequences of sets of bytes that together encode the characters low to high."""
    # 1. Split where the number of bytes changes.
    for end in BYTES_END[:-1]:
        if low <= end < high:
            yield from _encoded(low, end)
            yield from _encoded(end + 1, high)
            return
    if high <= BYTES_END[0]:
        yield [_byte_range(low, high)]
        return
    # 2. Split until only the first byte that differs is a part of its range, and those behind it are whole.
    for shift in (6, 12, 18):
        rest = (1 << shift) - 1
        if low & ~rest == high & ~rest:
            continue
        if low & rest:
            yield from _encoded(low, low | rest)
            yield from _encoded((low | rest) + 1, high)
            return
        if high & rest != rest:
            yield from _encoded(low, (high & ~rest) - 1)
            yield from _encoded(high & ~rest, high)
            return
    yield [_byte_range(a, b) for a, b in zip(chr(low).encode(), chr(high).encode(), strict=True)]


def _byte_range(low: int, high: int) -> Expression:
    """One byte from low to high."""
    return one_of((1 << high + 1) - (1 << low))
