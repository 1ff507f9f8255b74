"""How much memory this machine has, and how much is free, as the system reports it. Part 1."""

import os
from pathlib import Path
from typing import NamedTuple

MEMINFO = Path("/proc/meminfo")  # Linux


class Cgroup(NamedTuple):
    """Where a container reads how many bytes of memory it may use, and how many it uses."""

    folder: Path
    limit: str  # the file in `folder` with the most bytes it may use
    used: str  # the file in `folder` with the bytes it uses
    droppable: tuple[str, ...]  # fields of memory.stat in `folder`: bytes of these that the system can drop


CGROUP_2 = Cgroup(Path("/sys/fs/cgroup"), "memory.max", "memory.current", ("active_file", "inactive_file"))
CGROUP_1 = Cgroup(
    Path("/sys/fs/cgroup/memory"),
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
CGROUPS = (CGROUP_2, CGROUP_1)


class HostMemory(NamedTuple):
    """Bytes of memory. A number that the system does not report is None: macOS does not report free memory,
    and Windows reports neither number.
    """

    free: int | None
    total: int | None


def host_memory() -> HostMemory:
    """The memory of this machine."""
    return HostMemory(_sysconf_bytes("SC_AVPHYS_PAGES"), _sysconf_bytes("SC_PHYS_PAGES"))


def available_memory() -> int | None:
    """Bytes that programs may still allocate before the system kills a program for lack of memory.

    The number is the sum of free memory, cached files that the system can drop, and free swap. It is at most
    what the container has left, if there is one; its cached files count as left, too. Where MEMINFO cannot be
    read, all memory counts as free. None if the system does not report how much that is.
    """
    try:
        lines = MEMINFO.read_text().splitlines()  # such as "MemAvailable:   500 kB"
        fields = dict(line.split(":") for line in lines)
        kib = [int(fields[name].removesuffix("kB")) for name in ("MemAvailable", "SwapFree")]
        available = 1024 * sum(kib)
    except (OSError, KeyError, ValueError):
        total = host_memory().total
        if total is None:
            return None
        available = total
    for cgroup in CGROUPS:
        free = _free_in_container(cgroup)
        if free is not None:
            available = min(available, free)
    return available


def _free_in_container(cgroup: Cgroup) -> int | None:
    """Bytes that this container may still allocate: its limit less its use. The limit if its use cannot be
    read; None if there is no container, or no limit.

    Without a limit, cgroup 1 has a number larger than any machine's memory, and the result is about as large.
    """
    try:
        max_bytes = int((cgroup.folder / cgroup.limit).read_text())
    except (OSError, ValueError):  # the file does not exist, or holds "max"
        return None
    try:
        fields = dict(line.split() for line in (cgroup.folder / "memory.stat").read_text().splitlines())
        droppable_bytes = sum(int(fields[name]) for name in cgroup.droppable)
        used_bytes = int((cgroup.folder / cgroup.used).read_text()) - droppable_bytes
    except (OSError, KeyError, ValueError):
        used_bytes = 0
    return max(0, max_bytes - used_bytes)


def _sysconf_bytes(name: str) -> int | None:
    """The bytes of the memory pages that sysconf counts under `name`, or None without such a name."""
    try:
        return os.sysconf("SC_PAGESIZE") * os.sysconf(name)
    except (AttributeError, ValueError, OSError):  # no sysconf (Windows), an unknown name, or no value
        return None
