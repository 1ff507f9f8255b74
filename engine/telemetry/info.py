"""What routers and dashboards read of a server: its cache's size, and who has which adapter. Part 20.

Both are gauges whose labels are the information, under vLLM's names, which the Gateway API's inference
extension reads. Register them with the registry of Part 11's `EngineMetrics`.
"""

import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from engine.cache.paged import PagedCache
from engine.cache.slots import SlotCache
from engine.requests.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.metric_names import ENGINE


class CacheInfo:
    """`vllm:cache_config_info`, always 1: the size of the cache and of its blocks, in its labels."""

    def __init__(self, cache: PagedCache | SlotCache, **options: object) -> None:
        """`options` are further labels: options of the engine, under vLLM's names.

        A slot counts as a block, since it is what a router may count on: memory that a sequence has alone.
        """
        if isinstance(cache, PagedCache):
            size, number, num_cpu = cache.block_size, cache.num_blocks, cache.swap.blocks.num_blocks
        else:
            size, number, num_cpu = cache.slot_tokens, cache.num_slots, 0
        labels = {
            "engine": ENGINE,
            "block_size": size,
            "num_gpu_blocks": number,
            "num_cpu_blocks": num_cpu,
            "kv_cache_size_tokens": size * number,
            **options,
        }
        self._labels = {name: str(value) for name, value in labels.items()}

    def collect(self) -> Iterator[Metric]:
        """The metric, for the registry."""
        names = sorted(self._labels)
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The cache, in labels.", labels=names)
        gauge.add_metric([self._labels[name] for name in names], 1)
        yield gauge


class AdapterInfo:
    """`vllm:lora_requests_info`: whose adapters run and wait, in its labels; its value is the time."""

    def __init__(self, scheduler: Scheduler, max_loras: int) -> None:
        self.scheduler, self.max_loras = scheduler, max_loras

    def collect(self) -> Iterator[Metric]:
        """The metric, for the registry. Another thread than the engine's may read it: it copies lists."""
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Names of the adapters of running and of waiting requests; the value is the Unix time.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        running, waiting = adapters_of(self.scheduler.running), adapters_of(self.scheduler.waiting)
        gauge.add_metric((str(self.max_loras), ",".join(running), ",".join(waiting)), time.time())
        yield gauge


def adapters_of(requests: Sequence[Request]) -> list[str]:
    """The names of these requests' adapters, each once, in order. A key is a name, "@" and a number."""
    keys = [request.adapter for request in list(requests) if request.adapter is not None]
    return sorted({key.rpartition("@")[0] for key in keys})
