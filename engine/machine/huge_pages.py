"""Weights on huge pages: a step looks up fewer addresses. Part 17.

A processor addresses memory in pages of 4 KiB, and remembers where a few thousand of them are (its TLB). A
step reads every weight, so it must look most of their pages up again. Linux can put 2 MiB behind one such
entry. Promises nothing but speed: on another system, with Linux before 6.1, or where no 2 MiB are free in one
piece, nothing changes. Source: madvise(2), MADV_COLLAPSE.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MADV_COLLAPSE = 25  # in Linux's mman.h
HUGE_PAGE = 2**21  # bytes
MAPS = Path("/proc/self/maps")  # what Linux says of this process's memory
Region = tuple[int, int]  # the first address, and the first one behind


@contextmanager
def huge_pages() -> Iterator[None]:
    """Memory that this process takes inside the block lies on huge pages afterwards, as far as Linux can."""
    before = _writable_regions()
    yield
    for start, end in new_regions(_writable_regions(), before):
        if end - start >= HUGE_PAGE:  # if madvise fails, nothing has changed
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def new_regions(regions: Iterable[Region], before: list[Region]) -> Iterator[Region]:
    """The pieces of `regions` that are in none of `before`. Both are sorted by their addresses."""
    for start, end in regions:
        for old_start, old_end in before:
            if old_start < end and start < old_end:
                if start < old_start:
                    yield start, old_start
                start = old_end
        if start < end:
            yield start, end


def _writable_regions() -> list[Region]:
    """This process's memory that it may write to and that is no file; empty where the system does not say."""
    regions = []
    # Files of other encodings may be mapped; their names do not matter here.
    for line in MAPS.read_text("utf-8", errors="replace").splitlines() if MAPS.exists() else ():
        addresses, rights, _, _, _, *name = line.split()
        if rights.startswith("rw") and name in ([], ["[heap]"]):
            start, end = addresses.split("-")
            regions.append((int(start, 16), int(end, 16)))
    return regions
