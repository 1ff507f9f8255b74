"""The ranks of a model on several devices, for Prometheus and for the dashboards. Extension A.

Adds to what Part 11 shows (`EngineMetrics.panels`, its registry), and changes nothing of it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from engine.machine.host_memory import host_memory
from engine.parallel.launch import Workers
from engine.telemetry.metric_names import ENGINE, LABEL_NAMES
from engine.telemetry.metrics import EngineMetrics

COLOUR = "#4c8dd6"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class RankMetrics:
    """Which ranks there are, whether each runs, and how much of the host's memory its process has."""

    def __init__(self, workers: Workers, metrics: EngineMetrics) -> None:
        """From now on `metrics` shows the ranks, too."""
        self.workers, self.model_name = workers, metrics.model_name
        metrics.registry.register(self)
        metrics.panels.append(self.panel)

    def processes(self) -> list[tuple[int, int, bool]]:
        """(rank, process id, whether it runs), rank 0's first."""
        others = [(w.rank, w.process.pid, w.process.poll() is None) for w in self.workers.workers]
        return [(0, os.getpid(), True), *others]

    def collect(self) -> Iterator[Metric]:
        """For the registry: a gauge for each rank of whether it runs, and one of its resident memory."""
        up = GaugeMetricFamily(
            "ruvon:rank_up", "1 while this rank's process runs.", labels=(*LABEL_NAMES, "rank")
        )
        memory = GaugeMetricFamily(
            "ruvon:rank_resident_memory_bytes",
            "Memory of the host that this rank's process has.",
            labels=(*LABEL_NAMES, "rank"),
        )
        for rank, pid, runs in self.processes():
            label_values = (self.model_name, ENGINE, str(rank))
            up.add_metric(label_values, int(runs))
            if (num_bytes := resident_bytes(pid)) is not None:
                memory.add_metric(label_values, num_bytes)
        yield up
        yield memory

    def panel(self) -> dict:
        """What the page draws, all of it text: a row for each rank, with its share of the host's memory."""
        processes, total = self.processes(), host_memory()[1]
        rows = []
        for rank, pid, runs in processes:
            num_bytes = resident_bytes(pid)
            share = num_bytes / total if num_bytes and total else 0.0
            size = "" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"
            rows.append([f"rank {rank}, process {pid}", share, size if runs else "has ended", COLOUR])
        return {
            "title": "Ranks",
            "value": str(len(processes)),
            "note": "each has a part of every layer, and of all keys and values; bars: of the host's memory",
            "rows": rows,
        }


def resident_bytes(pid: int) -> int | None:
    """The memory of a process that is not swapped out; None: the system does not say, or it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return None
