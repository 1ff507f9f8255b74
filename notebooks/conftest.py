"""A notebook's kernel and its test talk through files, not through ports: two kernels that start at the same
moment may pick the same ports, and one of them never answers.
"""

import sys
from itertools import count
from tempfile import TemporaryDirectory

import nbval.kernel
from jupyter_client.manager import KernelManager

SOCKETS, NUMBERS = TemporaryDirectory(prefix="kernels-"), count()


def manager(**options) -> KernelManager:
    return KernelManager(transport="ipc", ip=f"{SOCKETS.name}/{next(NUMBERS)}", **options)


if sys.platform != "win32":
    nbval.kernel.KernelManager = manager
