"""A line of the log every ten seconds: what the engine did since the last one. Part 11.

The line is one more reader of the counters: it subtracts what it read before, and divides by the seconds
between. If the engine did nothing and has nothing to do, no line is written. Source of the form:
vllm/v1/metrics/loggers.py, https://github.com/vllm-project/vllm.
"""

import time
from collections.abc import Callable
from threading import Event, Thread

from engine.telemetry.metrics import EngineMetrics

INTERVAL = 10.0  # seconds between two lines, as in vLLM


class StatLog:
    """Writes a line about one engine every INTERVAL seconds, in a thread of its own, until `close`."""

    def __init__(
        self,
        metrics: EngineMetrics,
        write: Callable[[str], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`write` takes a line, such as a logger's `info`. `clock` returns seconds."""
        self._metrics, self._write, self._clock = metrics, write, clock
        self._read_at, self._before = clock(), dict(metrics.counters)
        self._closed = Event()

    def start(self) -> Thread:
        """Write lines from now on. Returns the thread, which ends soon after `close`."""
        thread = Thread(target=self._run, name="stat log", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Write no more lines. A second call does nothing."""
        self._closed.set()

    def _run(self) -> None:
        """Write the lines. The thread runs this until `close`."""
        while not self._closed.wait(INTERVAL):
            line = self.line()
            if line is not None:
                self._write(line)

    def line(self) -> str | None:
        """What the engine did since the last call, or since this was made; None if it did nothing and has
        nothing to do.
        """
        now, counters = self._clock(), dict(self._metrics.counters)
        seconds, before = now - self._read_at, self._before
        self._read_at, self._before = now, counters
        growth = {name: count - before[name] for name, count in counters.items()}
        scheduler = self._metrics.engine.scheduler
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        if not (growth["ruvon:steps"] or running or waiting):
            return None
        looked_up, hits = growth["vllm:prefix_cache_queries"], growth["vllm:prefix_cache_hits"]
        hit_share = hits / looked_up if looked_up else 0.0
        return (
            f"Prompts {growth['vllm:prompt_tokens'] / seconds:.1f} tokens/s, "
            f"output {growth['vllm:generation_tokens'] / seconds:.1f} tokens/s, "
            f"running {running}, waiting {waiting}, KV cache {scheduler.cache.usage().share:.1%} in use, "
            f"prefix cache {hit_share:.1%} hits"
        )
