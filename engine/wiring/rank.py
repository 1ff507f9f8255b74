"""The process of rank 1, 2, …: `python -m engine.wiring.rank`. Extension A.

Rank 0 starts this process (engine/parallel/launch.py), and sends it orders through standard input. The
process ends when rank 0's process ends, even if that one is killed.
"""

import json
import os
import signal
import sys
import threading

import torch

from engine.core.mailbox import error_text
from engine.parallel.executor import follow
from engine.parallel.group import Group
from engine.parallel.launch import READY
from engine.parallel.rank import Rank
from engine.wiring.devices import load_one_device
from engine.wiring.engine_args import EngineArgs


def main(life: int) -> None:
    """Compute what rank 0 orders, until its last order.

    `life` is the file descriptor of a pipe whose other end is closed when rank 0's process ends. The first
    line of standard input is JSON, with rank, size, store, backend, threads and args. When the arguments are
    read, READY is written to standard output. The process's exit code is 0 after the last order, and 1 after
    an error or without rank 0.
    """
    # A terminal or a supervisor may signal the whole group. The signal is for rank 0, which ends the others.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    hello = json.loads(sys.stdin.buffer.readline())
    rank = hello["rank"]
    try:
        torch.set_num_threads(hello["threads"])
        args = EngineArgs(**hello["args"])
        os.write(sys.stdout.fileno(), READY)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads what a library may print
        group = Group(rank, hello["size"], hello["store"], torch.device(str(args.device)), hello["backend"])
        devices = load_one_device(args, Rank(group))
        follow(devices.runner, devices.slots, sys.stdin.buffer)
    except Exception as error:
        print(f"rank {rank}: {error_text(error)}", file=sys.stderr, flush=True)
        os._exit(1)  # other threads may wait for ranks that are gone
    os._exit(0)


def _end_with(life: int) -> None:
    """End this process when the other end of the pipe is closed."""
    os.read(life, 1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
