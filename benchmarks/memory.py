"""How much memory a call takes at its peak, beyond what was there before it.

On a CPU by PyTorch's own record of every allocation: exact, the same on every run, and blind to what is
allocated behind PyTorch's back.
"""

import json
import os
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
