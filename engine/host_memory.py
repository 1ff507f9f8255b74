"""How much memory this machine has, and how much of it is free, as far as its system says. Part 11."""

import os


def host_memory() -> tuple[int | None, int | None]:
    """(free, there is) in bytes; None where the system does not say: macOS has no number for what is free,
    and Windows for neither.
    """
    return _bytes("SC_AVPHYS_PAGES"), _bytes("SC_PHYS_PAGES")


def _bytes(pages: str) -> int | None:
    try:
        return os.sysconf("SC_PAGESIZE") * os.sysconf(pages)
    except (AttributeError, ValueError, OSError):  # no such function, no such name, no number for it
        return None
