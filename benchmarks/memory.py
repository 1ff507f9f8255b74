"""How much memory a call takes at its peak, beyond what was there before it.

Two ways, which check each other: PyTorch's own record of every allocation (exact, the same on every run,
blind to what is allocated behind PyTorch's back), and the system's count of a process's pages (sees
everything, in a child of its own). Both on a CPU.
"""

import json
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports its own comings and goings

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """The most bytes that PyTorch held at a time on the device during the call, beyond those before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event["name"] == "[memory]"]
    sizes = [event["args"]["Bytes"] for event in sorted(found, key=lambda event: event["ts"])]
    return max(accumulate(sizes, initial=0))


def peak_resident_bytes(call: Callable[[], object]) -> int:
    """By how much the call raises the most memory that a process ever had resident: in a child, forked from
    here.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        before = _most()
        call()
        sender.send(_most() - before)

    process = context.Process(target=child)
    process.start()
    grown = receiver.recv()
    process.join()
    return grown


def _most() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
