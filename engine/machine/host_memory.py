"""How much memory this machine has, and how much of it is free, as far as its system says. Part 1."""

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")  # Linux
CONTAINER_LIMITS = (  # cgroup 2 and 1; "max", or a number beyond all machines, where there is none
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_memory() -> tuple[int | None, int | None]:
    """(free, total) in bytes; None where the system does not say: macOS has no number for what is free,
    and Windows for neither.
    """
    return _bytes("SC_AVPHYS_PAGES"), _bytes("SC_PHYS_PAGES")


def available_memory() -> int | None:
    """Bytes that programs may still take before the system ends one of them: what is free, what it keeps of
    files and can drop, and swap; not more than a container's limit. All there is where the system does not
    say what is in use; None where it says nothing.
    """
    try:
        fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        available = sum(1024 * int(fields[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        _, total = host_memory()
        if total is None:
            return None
        available = total
    return min([available, *filter(None, map(_container_limit, CONTAINER_LIMITS))])


def _container_limit(path: Path) -> int | None:
    """Bytes that this container may use; None: there is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no container, or no limit
        return None


def _bytes(pages: str) -> int | None:
    """Bytes of the pages that sysconf counts under this name; None: it does not."""
    try:
        return os.sysconf("SC_PAGESIZE") * os.sysconf(pages)
    except (AttributeError, ValueError, OSError):  # no such function, no such name, no number for it
        return None
