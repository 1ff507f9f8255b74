"""How much memory this machine has, and how much is free, as the system reports it. Part 1."""

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")  # Linux
# Where a container finds its memory's limit, its use, and what of this use the system can drop: in cgroup 2
# and in cgroup 1.
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def host_memory() -> tuple[int | None, int | None]:
    """(free, total) memory in bytes. A number that the system does not report is None: macOS does not report
    free memory, and Windows reports neither number.
    """
    return _bytes("SC_AVPHYS_PAGES"), _bytes("SC_PHYS_PAGES")


def available_memory() -> int | None:
    """Bytes that programs may still allocate before the system kills a program for lack of memory.

    The number is the sum of free memory, cached files that the system can drop, and free swap. It is at most
    what the container has left, if there is one; its cached files count as left, too. Where MEMINFO cannot be
    read, all memory counts as free. Returns None if the system does not report how much that is.
    """
    try:
        fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        available = sum(1024 * int(fields[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        _, total = host_memory()
        if total is None:
            return None
        available = total
    left = [_left_in_container(*cgroup) for cgroup in CGROUPS]
    return min([available, *(num_bytes for num_bytes in left if num_bytes is not None)])


def _left_in_container(folder: Path, limit: str, used: str, droppable: tuple[str, ...]) -> int | None:
    """Bytes that this container may still allocate: its limit less its use. The limit if its use cannot be
    read; None if there is no container, or no limit.

    `limit` and `used` are files in `folder`, and `droppable` are fields of its memory.stat. Without a limit,
    cgroup 1 has a number larger than any machine's memory, and the result is about as large.
    """
    try:
        max_bytes = int((folder / limit).read_text())
    except (OSError, ValueError):  # the file does not exist, or holds "max"
        return None
    try:
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        num_used = int((folder / used).read_text()) - sum(int(fields[name]) for name in droppable)
    except (OSError, KeyError, ValueError):
        num_used = 0
    return max(0, max_bytes - num_used)


def _bytes(pages: str) -> int | None:
    """The bytes of the pages that sysconf counts under the name `pages`, or None without such a name."""
    try:
        return os.sysconf("SC_PAGESIZE") * os.sysconf(pages)
    except (AttributeError, ValueError, OSError):  # no sysconf (Windows), an unknown name, or no value
        return None
