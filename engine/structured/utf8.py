"""Sets of characters as expressions over their bytes in UTF-8. Extension B.

A character beyond ASCII is two to four bytes, and a model writes it byte by byte, in tokens that may end
inside of a character. So a set of characters becomes a choice of sequences of byte ranges. For example, the
characters of one or two bytes are `[00-7F]` or `[C2-DF][80-BF]`.
Source: RFC 3629, and Cox 2010, https://swtch.com/~rsc/regexp/regexp3.html.
"""

from collections.abc import Iterable, Iterator

from engine.structured.derivative import Expression, byte_set, chain, either

Ranges = list[tuple[int, int]]  # ranges of code points: the first and the last of each
LAST = 0x10FFFF  # the last code point
SURROGATES = (0xD800, 0xDFFF)  # halves of characters in UTF-16: no characters, and not in UTF-8
LENGTH_ENDS = (0x7F, 0x7FF, 0xFFFF, LAST)  # the last code point that takes one, two, three and four bytes


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same set as sorted ranges with gaps between them: ranges that overlap or touch are joined."""
    joined: Ranges = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return joined


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All characters that are in none of the ranges, as sorted ranges. Surrogates are no characters."""
    rest, next_low = [], 0
    for low, high in merged([*ranges, SURROGATES]):
        if low > next_low:
            rest.append((next_low, low - 1))
        next_low = high + 1
    if next_low <= LAST:
        rest.append((next_low, LAST))
    return rest


def characters(ranges: Iterable[tuple[int, int]]) -> Expression:
    """An expression that matches one character of the ranges."""
    sequences = []
    for low, high in _without_surrogates(ranges):
        sequences += [chain(*byte_sets) for byte_sets in _byte_sequences(low, high)]
    return either(*sequences)


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same set without surrogates: the complement's complement, because no complement has them."""
    return complement(complement(ranges))


def _byte_sequences(low: int, high: int) -> Iterator[list[Expression]]:
    """Sequences of byte ranges that together match the characters `low` to `high`, and no other bytes."""
    # 1. Split where the number of bytes changes.
    for end in LENGTH_ENDS[:-1]:
        if low <= end < high:
            yield from _byte_sequences(low, end)
            yield from _byte_sequences(end + 1, high)
            return
    if high <= LENGTH_ENDS[0]:
        yield [_byte_range(low, high)]
        return
    # 2. A product of byte ranges is a range of characters only if all bytes after the first one that differs
    #    take all of their values. So split off the ends where they do not. A byte after the first has six
    #    bits of the code point: `last_bits` are the bits of the last one, two or three bytes.
    for num_bits in (6, 12, 18):
        last_bits = (1 << num_bits) - 1
        if low & ~last_bits == high & ~last_bits:  # only the last bytes differ
            continue
        if low & last_bits:
            yield from _byte_sequences(low, low | last_bits)
            yield from _byte_sequences((low | last_bits) + 1, high)
            return
        if high & last_bits != last_bits:
            yield from _byte_sequences(low, (high & ~last_bits) - 1)
            yield from _byte_sequences(high & ~last_bits, high)
            return
    first, last = chr(low).encode(), chr(high).encode()
    yield [_byte_range(a, b) for a, b in zip(first, last, strict=True)]


def _byte_range(low: int, high: int) -> Expression:
    """One byte from `low` to `high`."""
    return byte_set((1 << high + 1) - (1 << low))  # the bits `low` to `high` are 1
