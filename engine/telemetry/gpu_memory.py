"""The memory of the GPUs that this process uses, for Prometheus and for the dashboards. Part 11."""

from collections.abc import Iterator

import torch
from prometheus_client.core import Metric

from engine.telemetry import families


def gpus() -> list[dict]:
    """{"device", "used", "total"} of each GPU on which this process has memory.

    "used" is the memory in use by any process, and "total" all memory of the GPU, both in bytes.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    gpus_in_use = []
    for index in range(torch.cuda.device_count()):
        if not torch.cuda.memory_reserved(index):  # mem_get_info would create a CUDA context on this GPU
            continue
        free, total = torch.cuda.mem_get_info(index)
        gpus_in_use.append({"device": f"cuda:{index}", "used": total - free, "total": total})
    return gpus_in_use


def gpu_gauges(model_name: str) -> Iterator[Metric]:
    """Used and total memory, in bytes, of each GPU of `gpus`. `model_name`: the value of this label."""
    gpus_in_use = gpus()  # read once, so that used and total are of the same moment
    for kind, documentation in (
        ("used", "GPU memory that is in use by any process."),
        ("total", "GPU memory that is installed."),
    ):
        num_bytes = {gpu["device"]: gpu[kind] for gpu in gpus_in_use}
        name = f"ruvon:gpu_memory_{kind}_bytes"
        yield families.gauge_by("device", name, documentation, model_name, num_bytes)
