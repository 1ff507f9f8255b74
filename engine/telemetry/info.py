"""Facts for routers and dashboards: the size of a server's cache, and the adapters in use. Part 20.

Both are gauges whose labels have the facts. The names are vLLM's, which the Gateway API's inference extension
reads. Register the collectors with the registry of Part 11's `EngineMetrics`.
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
    """A collector of the gauge `vllm:cache_config_info`, which is always 1. Its labels have the size of the
    cache and of its blocks.
    """

    def __init__(self, cache: PagedCache | SlotCache, **options: object) -> None:
        """`options` are further labels: options of the engine, under vLLM's names.

        A slot is shown as a block, because a router wants to know into how many pieces the cache is divided,
        and how many tokens a piece holds.
        """
        if isinstance(cache, PagedCache):
            block_size, num_blocks = cache.block_size, cache.num_blocks
            num_swap_blocks = cache.swap.blocks.num_blocks
        else:
            block_size, num_blocks, num_swap_blocks = cache.slot_tokens, cache.num_slots, 0
        labels = {
            "engine": ENGINE,
            "block_size": block_size,
            "num_gpu_blocks": num_blocks,
            "num_cpu_blocks": num_swap_blocks,
            "kv_cache_size_tokens": block_size * num_blocks,
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
    """A collector of the gauge `vllm:lora_requests_info`, whose value is the time. Its labels have the
    adapters of running and of waiting requests.
    """

    def __init__(self, scheduler: Scheduler, max_loras: int) -> None:
        """`max_loras`: how many adapters may share a step."""
        self.scheduler, self.max_loras = scheduler, max_loras

    def collect(self) -> Iterator[Metric]:
        """The metric, for the registry. Any thread may call this, because `adapters_of` copies the lists that
        the engine's thread changes.
        """
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Names of the adapters of running and of waiting requests; the value is the Unix time.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        running, waiting = adapters_of(self.scheduler.running), adapters_of(self.scheduler.waiting)
        gauge.add_metric((str(self.max_loras), ",".join(running), ",".join(waiting)), time.time())
        yield gauge


def adapters_of(requests: Sequence[Request]) -> list[str]:
    """The names of these requests' adapters, each once, sorted."""
    keys = [request.adapter for request in list(requests) if request.adapter is not None]
    # A key is the adapter's name, "@" and the number of the load, such as "poetry@1".
    return sorted({key.rpartition("@")[0] for key in keys})
