"""How much memory this machine has, and how much is free, as the system reports it. Part 1."""

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")  # Linux
# A container's limit in bytes, for cgroup 2 and cgroup 1. Without a limit, a file holds "max", or a number
# larger than any machine's memory.
CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_memory() -> tuple[int | None, int | None]:
    """(free, total) memory in bytes. A number that the system does not report is None: macOS does not report
    free memory, and Windows reports neither number.
    """
    return _bytes("SC_AVPHYS_PAGES"), _bytes("SC_PHYS_PAGES")


def available_memory() -> int | None:
    """Bytes that programs may still allocate before the system kills a program for lack of memory.

    The number is the sum of free memory, cached files that the system can drop, and free swap, and at most
    the container's limit. If the system does not report free memory, the total memory counts as free.
    Returns None if the system does not report the total memory either.
    """
    try:
        fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        available = sum(1024 * int(fields[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        _, total = host_memory()
        if total is None:
            return None
        available = total
    limits = [_container_limit(path) for path in CONTAINER_LIMITS]
    return min([available, *(limit for limit in limits if limit)])


def _container_limit(path: Path) -> int | None:
    """Bytes that this container may use, or None if there is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # the file does not exist, or holds "max"
        return None


def _bytes(pages: str) -> int | None:
    """The bytes of the pages that sysconf counts under the name `pages`, or None without such a name."""
    try:
        return os.sysconf("SC_PAGESIZE") * os.sysconf(pages)
    except (AttributeError, ValueError, OSError):  # no sysconf (Windows), an unknown name, or no value
        return None
