"""The engine's metrics for Prometheus, under vLLM's names, and the data of the dashboards. Part 11.

Promises that all counters and histograms come from what the engine passes to its listeners (RequestStats,
StepRecord), that all times are differences of one monotonic clock, and that no state is global: each engine
has its own registry. The engine's thread updates counters and histograms. Gauges are read from the scheduler
and from the machine when the registry is read.
Knows no HTTP: the routes are in engine/server/telemetry_routes.py.

Metrics are counted at the same moments as in vLLM's V1 engine. Source: vllm/v1/metrics/stats.py,
https://github.com/vllm-project/vllm. Names, labels and buckets are in metric_names.py.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

from engine.core.llm_engine import LLMEngine
from engine.decoding.outputs import RequestStats
from engine.machine.host_memory import host_memory
from engine.requests.listeners import Listener, StepRecord
from engine.requests.request import Request
from engine.telemetry import families
from engine.telemetry.gpu_memory import gpu_gauges, gpus
from engine.telemetry.histogram import Histogram
from engine.telemetry.history import History, Point
from engine.telemetry.metric_names import (
    COUNTERS,
    EARLY_REASONS,
    FINISHED_REASONS,
    LABELLED_COUNTERS,
    SUCCESS_REASONS,
    TPOT,
    TTFT,
    histograms,
)
from engine.telemetry.request_times import RequestProgress, Times, observations


def times_of(stats: RequestStats, scheduled: float) -> Times:
    """The times of a request that has ended well. Such a request has at least one output token.

    `stats.arrival` is the time of its arrival, and `stats.token_times` has the time of each output token.
    `scheduled` is the time when the request was first scheduled for a step, on the clock of `stats`. If the
    request was preempted, the time until it was scheduled again is part of prefill if the request had no
    output token yet, and of decode otherwise (as in vLLM).
    """
    first, last = stats.token_times[0], stats.token_times[-1]
    return Times(
        queue=scheduled - stats.arrival,
        prefill=first - scheduled,
        decode=last - first,
        inference=last - scheduled,
        e2e=last - stats.arrival,
    )


class EngineMetrics(Listener):
    """Listens to one engine, and is the collector of that engine's registry. The engine's thread calls the
    `on_…` methods; any thread may call `collect` and `snapshot`.
    """

    def __init__(self, engine: LLMEngine, model_name: str) -> None:
        """Adds itself to the engine's listeners. `model_name` is the value of the label `model_name`."""
        self.engine, self.model_name = engine, model_name
        self.started = time.perf_counter()  # on the clock of all times here
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.succeeded: dict[str, int] = dict.fromkeys(SUCCESS_REASONS, 0)
        self.ended_early: dict[str, int] = dict.fromkeys(EARLY_REASONS, 0)
        self.executor_counters: dict[str, float] = {}  # StepRecord.counters, added up
        # Panels that other parts add to the dashboard. Each function returns {"title", "value", "note",
        # "rows"}. The first three are texts. A row is [label, length of the bar from 0 to 1, text, colour];
        # the colour is a CSS class of dashboard.css, "a" or "b".
        self.panels: list[Callable[[], dict]] = []
        self._histogram_specs = histograms(engine.max_model_len)
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in self._histogram_specs.items()}
        self.history = History(self.started)
        self._in_progress: dict[str, RequestProgress] = {}  # by Request.id
        self._lock = threading.Lock()  # between the engine's thread and readers
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._own_process = ProcessCollector(registry=self.registry)  # memory, processor time
        engine.listeners.add(self)

    # What the engine tells its listeners.

    def on_arrival(self, request: Request) -> None:
        """Start to count a sample. It joins the group of its parent, which has arrived before."""
        with self._lock:
            progress = self._in_progress[request.id] = RequestProgress(request)
            if request.parent is not None:
                progress.group = self._in_progress[request.parent.id].group
            progress.group.under_way += 1

    def on_reject(self, request_id: str, error: Exception) -> None:
        """Count a request that the engine has refused."""
        with self._lock:
            self.ended_early["reject"] += 1

    def on_preempt(self, request: Request) -> None:
        """Count a preemption."""
        with self._lock:
            self.counters["vllm:num_preemptions"] += 1

    def on_step(self, record: StepRecord) -> None:
        """Count a step that has ended, failed or not, and the new tokens of each request in the step.

        A request that ended while the step was under way counts only in the step's own metrics.
        """
        with self._lock:
            counters = self.counters
            # 1. Each request in the step: count its first step, and its new tokens.
            num_tokens_before = self._num_counted_tokens()
            for s, request_id in enumerate(record.request_ids):
                progress = self._in_progress.get(request_id)
                if progress is None:  # aborted while the step was under way
                    continue
                if progress.scheduled is None:
                    progress.scheduled = record.start + record.schedule_seconds
                    counters["vllm:prefix_cache_queries"] += progress.request.num_prompt_tokens
                    counters["vllm:prefix_cache_hits"] += record.tokens_cached[s]
                if len(progress.request.stats.token_times) > progress.num_counted:
                    if not progress.num_counted:
                        counters["vllm:prompt_tokens_cached"] += progress.request.num_cached_tokens
                    self._observe_tokens(progress)
            num_new_tokens = self._num_counted_tokens() - num_tokens_before
            # 2. The step itself.
            counters["ruvon:steps"] += 1
            counters["ruvon:step_sequences"] += len(record.request_ids)
            counters["ruvon:step_tokens"] += sum(record.tokens_computed)
            if record.error is not None:
                counters["ruvon:failed_steps"] += 1
            for name, amount in record.counters.items():
                self.executor_counters[name] = self.executor_counters.get(name, 0) + amount
            if num_new_tokens:  # as in vLLM, a step without a new output token is not observed
                self.histograms["vllm:iteration_tokens_total"].observe(num_new_tokens)
            self.histograms["ruvon:step_seconds"].observe(record.end - record.start)
            # 3. The dashboard's history.
            self.history.note(record.end, self._point())

    def _num_counted_tokens(self) -> int:
        """Prompt tokens and output tokens that are counted so far."""
        return self.counters["vllm:prompt_tokens"] + self.counters["vllm:generation_tokens"]

    def _observe_tokens(self, progress: RequestProgress) -> None:
        """Count the new output tokens of a request: `stats.token_times` after the first `num_counted`.

        `token_times` has the time of each output token, in seconds. There is at least one new token.

        1. Add the number of new tokens to vllm:generation_tokens.
        2. If no token was counted before, the first output token is among the new ones. Observe
           `stats.time_to_first_token` in the histogram TTFT, for Prometheus, and record it with
           `history.sample` for the dashboards: kind "ttft", the time of the first token, the value. Add the
           prompt's tokens to vllm:prompt_tokens. Observe no inter-token latency, even if more tokens came
           together with the first.
        3. Otherwise, observe one inter-token latency, in vllm:inter_token_latency_seconds, from the last
           counted token to the newest, however many tokens came at once (Part 16). vLLM does the same.
        4. Set `num_counted` to the number of all output tokens.
        """
        stats, counters = progress.request.stats, self.counters
        times = stats.token_times
        counters["vllm:generation_tokens"] += len(times) - progress.num_counted
        if progress.num_counted:
            gap = times[-1] - times[progress.num_counted - 1]
            self.histograms["vllm:inter_token_latency_seconds"].observe(gap)
        else:
            counters["vllm:prompt_tokens"] += progress.request.num_prompt_tokens
            self.histograms[TTFT].observe(stats.time_to_first_token)
            self.history.sample("ttft", times[0], stats.time_to_first_token)
        progress.num_counted = len(times)

    def on_finish(self, request: Request) -> None:
        """Count a request that has ended. A request that did not end well (EARLY_REASONS) adds only to
        `ended_early`.
        """
        with self._lock:
            progress = self._in_progress.pop(request.id, None)
            if progress is None:  # the request arrived before this listened
                return
            reason = request.output.finish_reason
            assert reason is not None  # it has ended
            if reason in self.succeeded:
                assert progress.scheduled is not None  # its tokens come from a step
                self.succeeded[reason] += 1
                self._observe_finished(request, progress.scheduled)
                group = progress.group
                group.max_output_tokens = max(group.max_output_tokens, len(request.stats.token_times))
            else:
                self.ended_early[reason] += 1
            progress.group.under_way -= 1
            if progress.group.max_output_tokens and not progress.group.under_way:
                histogram = self.histograms["vllm:request_max_num_generation_tokens"]
                histogram.observe(progress.group.max_output_tokens)
            self.history.note(time.perf_counter(), self._point())

    def _observe_finished(self, request: Request, scheduled: float) -> None:
        """Observe the times and the sizes of a request that has ended well. `scheduled`: see `times_of`."""
        stats = request.stats
        for name, value in observations(request, times_of(stats, scheduled)).items():
            self.histograms[name].observe(value)
        if len(stats.token_times) > 1:  # with one token there is no time between tokens
            self.history.sample("tpot", stats.token_times[-1], stats.time_per_output_token)
        if request.parent is None:  # the first of n samples
            self.histograms["vllm:request_params_n"].observe(request.params.n)

    # What other threads read.

    def _point(self) -> Point:
        """The counters and gauges of the dashboards, as of now."""
        scheduler, counters = self.engine.scheduler, self.counters
        return Point(
            generation_tokens=counters["vllm:generation_tokens"],
            prompt_tokens=counters["vllm:prompt_tokens"],
            steps=counters["ruvon:steps"],
            step_sequences=counters["ruvon:step_sequences"],
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=scheduler.cache.usage().share,
        )

    def collect(self) -> Iterator[Metric]:
        """The metrics, for the registry.

        Counters and histograms are copied under the lock, so that they agree with each other. Gauges are read
        without the lock.
        """
        with self._lock:
            counters = dict(self.counters)
            succeeded, ended_early = dict(self.succeeded), dict(self.ended_early)
            executor_counters = dict(self.executor_counters)
            observed = {
                name: (histogram.prometheus_buckets(), histogram.sum)
                for name, histogram in self.histograms.items()
            }
        for name, count in counters.items():
            yield families.counter(name, COUNTERS[name], self.model_name, count)
        num_cached = counters["vllm:prompt_tokens_cached"]
        num_computed = counters["vllm:prompt_tokens"] - num_cached
        by_source = {"local_compute": num_computed, "local_cache_hit": num_cached}
        ended = succeeded | ended_early
        finished = {reason: ended.get(reason, 0) for reason in FINISHED_REASONS}
        labelled: dict[str, Mapping[str, float]] = {
            "vllm:prompt_tokens_by_source": by_source,
            "vllm:request_success": finished,
            "ruvon:requests_ended_early": ended_early,
            "ruvon:executor": executor_counters,
        }
        for name, amounts in labelled.items():
            label, documentation = LABELLED_COUNTERS[name]
            yield families.counter_by(label, name, documentation, self.model_name, amounts)
        for name, (buckets, total) in observed.items():
            documentation, _ = self._histogram_specs[name]
            yield families.histogram(name, documentation, self.model_name, buckets, total)
        for name, documentation, value in self._gauges():
            yield families.gauge(name, documentation, self.model_name, value)
        yield from gpu_gauges(self.model_name)

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        """(name, documentation, value) of each gauge, as of now."""
        point = self._point()
        yield "vllm:num_requests_running", "Requests that hold memory in the cache.", point.running
        yield "vllm:num_requests_waiting", "Requests in the queue.", point.waiting
        yield "vllm:kv_cache_usage_perc", "Share of the cache that is taken, 0 to 1.", point.kv_usage
        total = host_memory().total
        if total is not None:
            yield "ruvon:host_memory_total_bytes", "Memory of this machine.", total

    def snapshot(self) -> dict:
        """All data of the dashboards, as JSON data. Times are in seconds, memory in bytes.

        "seconds" is the result of `HistorySnapshot.read`; "window" is the window of its percentiles.
        """
        now = time.perf_counter()
        process_values = {metric.name: metric.samples[0].value for metric in self._own_process.collect()}
        memory = process_values.get("process_resident_memory_bytes")  # None on a system without /proc
        with self._lock:
            point = self._point()
            snapshot = {
                "model_name": self.model_name,
                "uptime": round(now - self.started, 3),
                "now": {
                    "running": point.running,
                    "waiting": point.waiting,
                    "kv_usage": point.kv_usage,
                    "memory": memory,
                    "memory_total": host_memory().total,
                    "gpus": gpus(),
                },
                "totals": dict(self.counters),
                "ended": self.succeeded | self.ended_early,
                "buckets": {"ttft": self._buckets(TTFT), "tpot": self._buckets(TPOT)},
            }
            recent = self.history.copy()
        panels = [panel() for panel in self.panels]
        return snapshot | {"window": recent.window, "seconds": recent.read(now), "panels": panels}

    def _buckets(self, name: str) -> dict:
        """A histogram's bounds and cumulative counts, under Prometheus' names, as JSON data."""
        histogram = self.histograms[name]
        return {"le": histogram.bounds, "cumulative": histogram.cumulative()}
