"""Weights on huge pages: a step finds them by fewer addresses. Part 17.

A processor looks memory up in pages of 4 KiB, and keeps the places of a few thousand at hand (its TLB). A
step reads every weight, and must look most of theirs up again. Linux can put 2 MiB behind one such entry.
Promises nothing but speed: on another system, with Linux before 6.1, or where no 2 MiB are free in one piece,
all is as before. Source: madvise(2), MADV_COLLAPSE.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MADV_COLLAPSE = 25
HUGE = 2**21  # bytes
MAPS = Path("/proc/self/maps")  # what Linux says of this process's memory
Region = tuple[int, int]  # the first address, and the first one behind


@contextmanager
def huge_pages() -> Iterator[None]:
    """Memory that this process takes inside the block lies on huge pages afterwards, as far as Linux can."""
    before = _taken()
    yield
    for start, end in beyond(_taken(), before):
        if end - start >= HUGE:  # what it answers changes nothing
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def beyond(regions: Iterable[Region], before: list[Region]) -> Iterator[Region]:
    """The pieces of `regions` that are in none of `before`. Both are in the order of their addresses."""
    for start, end in regions:
        for old_start, old_end in before:
            if old_start < end and start < old_end:
                if start < old_start:
                    yield start, old_start
                start = old_end
        if start < end:
            yield start, end


def _taken() -> list[Region]:
    """Memory to write to with no file behind it; none on a system that does not say."""
    regions = []
    # Files of other encodings may be mapped; their names do not matter here.
    for line in MAPS.read_text("utf-8", errors="replace").splitlines() if MAPS.exists() else ():
        addresses, rights, _, _, _, *name = line.split()
        if rights.startswith("rw") and name in ([], ["[heap]"]):
            start, end = addresses.split("-")
            regions.append((int(start, 16), int(end, 16)))
    return regions
