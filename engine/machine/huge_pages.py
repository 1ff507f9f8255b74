"""Puts weights on huge pages, so that a step looks up fewer addresses. Part 17.

A processor addresses memory in pages of 4 KiB. Its TLB, a small cache, holds the addresses of a few thousand
pages. A step reads every weight, so the processor must look up the addresses of most pages again. With huge
pages, one entry of the TLB covers 2 MiB. Only the speed changes. On a system other than Linux, on Linux
before 6.1, or where no 2 MiB of memory are free in one piece, nothing changes. Source: madvise(2),
MADV_COLLAPSE.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MADV_COLLAPSE = 25  # in Linux's mman.h
HUGE_PAGE = 2**21  # bytes
MAPS = Path("/proc/self/maps")  # on Linux: the regions of this process's memory
Region = tuple[int, int]  # the first address of a piece of memory, and the first address after it


@contextmanager
def huge_pages() -> Iterator[None]:
    """Move the memory that this process allocates inside the block to huge pages when the block ends.

    Linux moves as much as it can. Memory that cannot be moved stays on small pages.
    """
    old_regions = _writable_regions()
    yield
    for start, end in new_regions(_writable_regions(), old_regions):
        if end - start >= HUGE_PAGE:  # madvise's result is not read: if it fails, nothing has changed
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def new_regions(regions: Iterable[Region], old_regions: list[Region]) -> Iterator[Region]:
    """The pieces of `regions` that none of `old_regions` covers. Both lists are sorted by address."""
    for start, end in regions:
        for old_start, old_end in old_regions:
            if old_start < end and start < old_end:  # they overlap: what lies before the old region is new
                if start < old_start:
                    yield start, old_start
                start = old_end  # go on behind the old region
        if start < end:
            yield start, end


def _writable_regions() -> list[Region]:
    """The regions of this process that are writable and not backed by a file, sorted by address.

    Empty on a system without MAPS.
    """
    if not MAPS.exists():
        return []
    regions = []
    # The name of a mapped file need not be UTF-8, and does not matter here.
    for line in MAPS.read_text("utf-8", errors="replace").splitlines():
        addresses, rights, _offset, _device, _inode, *name = line.split()
        is_without_file = not name or name == ["[heap]"]
        if rights.startswith("rw") and is_without_file:
            start, end = addresses.split("-")
            regions.append((int(start, 16), int(end, 16)))
    return regions
