"""The process of rank 1, 2, …: `python -m engine.wiring.rank`. Extension A.

Rank 0 starts this process (engine/parallel/launch.py), and sends it orders through standard input. The
process ends when rank 0's process ends, even if rank 0's process is killed.
"""

import json
import os
import signal
import sys
import threading
from typing import NoReturn

import torch

from engine.parallel.executor import follow
from engine.parallel.group import Group
from engine.parallel.launch import READY
from engine.parallel.rank import ProcessRank
from engine.requests.request import error_text
from engine.wiring.devices import load_one_device
from engine.wiring.engine_args import EngineArgs


def main(rank_0_pipe: int) -> NoReturn:
    """Compute what rank 0 orders, until the order to stop. Does not return: the process exits with code 0
    after that order, and with code 1 after an error, or if rank 0's process ends before.

    `rank_0_pipe` is the file descriptor of a pipe whose other end is closed when rank 0's process ends. The
    first line of standard input is JSON, with rank, size, store, backend, threads and args. When the
    arguments are read, READY is written to standard output.
    """
    # A terminal or a supervisor may signal the whole group. The signal is for rank 0, which ends the others.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_rank_0, args=(rank_0_pipe,), daemon=True).start()
    options = json.loads(sys.stdin.buffer.readline())
    rank = options["rank"]
    try:
        torch.set_num_threads(options["threads"])
        args = EngineArgs(**options["args"])
        os.write(sys.stdout.fileno(), READY)
        # From here on, what a library prints goes to standard error: rank 0 no longer reads standard output.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        device = torch.device(str(args.device))
        group = Group(rank, options["size"], options["store"], device, options["backend"])
        devices = load_one_device(args, ProcessRank(group))
        follow(devices.runner, devices.slots, sys.stdin.buffer)
    except Exception as error:
        print(f"rank {rank}: {error_text(error)}", file=sys.stderr, flush=True)
        os._exit(1)  # other threads may wait for ranks that are gone
    os._exit(0)


def _exit_with_rank_0(rank_0_pipe: int) -> None:
    """Exit when the other end of the pipe is closed. Nothing is ever written to the pipe, so the read returns
    only then.
    """
    os.read(rank_0_pipe, 1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
