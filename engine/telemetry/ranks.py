"""The ranks of a model on several devices, for Prometheus and for the dashboards. Extension A.

Adds a collector to the registry of Part 11's `EngineMetrics`, and a panel to `EngineMetrics.panels`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import Metric

from engine.machine.host_memory import host_memory
from engine.parallel.launch import Workers
from engine.telemetry import families
from engine.telemetry.metrics import EngineMetrics

COLOUR = "a"  # a CSS class of dashboard.css
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class RankProcess(NamedTuple):
    """The process of one rank."""

    rank: int
    process_id: int
    is_running: bool


class RankMetrics:
    """A collector and a panel: for each rank, whether its process runs and how much memory it has."""

    def __init__(self, workers: Workers, metrics: EngineMetrics) -> None:
        """Adds the collector to `metrics.registry`, and the panel to `metrics.panels`."""
        self.workers, self.model_name = workers, metrics.model_name
        metrics.registry.register(self)
        metrics.panels.append(self.panel)

    def processes(self) -> list[RankProcess]:
        """The process of each rank, in the order of the ranks. Rank 0 is this process."""
        processes = [RankProcess(0, os.getpid(), is_running=True)]
        for worker in self.workers.workers:
            is_running = worker.process.poll() is None
            processes.append(RankProcess(worker.rank, worker.process.pid, is_running))
        return processes

    def collect(self) -> Iterator[Metric]:
        """The metrics, for the registry: two gauges with the label `rank`. One says whether the rank's
        process runs (0 or 1), the other how much resident memory the process has, in bytes.
        """
        is_up: dict[str, int] = {}
        memory: dict[str, int] = {}
        for process in self.processes():
            is_up[str(process.rank)] = int(process.is_running)
            num_bytes = resident_bytes(process.process_id)
            if num_bytes is not None:
                memory[str(process.rank)] = num_bytes
        up_text = "1 while this rank's process runs."
        memory_name = "ruvon:rank_resident_memory_bytes"
        memory_text = "Memory of the host that this rank's process has."
        yield families.gauge_by("rank", "ruvon:rank_up", up_text, self.model_name, is_up)
        yield families.gauge_by("rank", memory_name, memory_text, self.model_name, memory)

    def panel(self) -> dict:
        """The panel for the dashboard: title, value, note, and a row for each rank.

        A row is [rank and process id, share of the host's memory from 0 to 1, memory as text, colour]. In
        the row of a process that has ended, the text says so.
        """
        processes = self.processes()
        total = host_memory().total
        rows = []
        for process in processes:
            num_bytes = resident_bytes(process.process_id)
            share = num_bytes / total if num_bytes and total else 0.0
            if not process.is_running:
                text = "has ended"
            elif num_bytes is None:
                text = ""
            else:
                text = f"{num_bytes / 2**30:.2f} GiB"
            title = f"rank {process.rank}, process {process.process_id}"
            rows.append([title, share, text, COLOUR])
        return {
            "title": "Ranks",
            "value": str(len(processes)),
            "note": "each has a part of every layer, and of all keys and values; bars: of the host's memory",
            "rows": rows,
        }


def resident_bytes(process_id: int) -> int | None:
    """The memory of a process that is not swapped out, in bytes. None if the process has ended, or if the
    system does not report it.
    """
    try:
        page_counts = Path(f"/proc/{process_id}/statm").read_text().split()  # total, resident, and others
        return int(page_counts[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return None
