"""What the engine does, as numbers that Prometheus can read, under the names vLLM gave them. Part 11.

Promises that every figure comes from what the engine tells its listeners (RequestStats, StepRecord), that
times are differences of one monotonic clock, and that nothing is global: each engine has a registry of its
own. Counters and histograms are kept up to date by the engine's thread; gauges are read when the registry is.
Knows no HTTP (engine/server/telemetry_routes.py).

Source of names, labels, buckets and of what counts when: vLLM's V1 engine, vllm/v1/metrics/loggers.py and
stats.py, https://github.com/vllm-project/vllm. What vLLM has no name for begins with `ruvon:`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine.core.llm_engine import LLMEngine
from engine.decoding.outputs import RequestStats
from engine.machine.host_memory import host_memory
from engine.requests.listeners import Listener, StepRecord
from engine.requests.request import Request
from engine.telemetry.histogram import Histogram
from engine.telemetry.history import History, Point

LABEL_NAMES = ("model_name", "engine")
ENGINE = "0"  # the value of `engine`: vLLM numbers its replicas; one server here is one engine

COUNTERS = {
    "vllm:prompt_tokens": "Prompt tokens, counted when the prompt's first answer token is there.",
    "vllm:generation_tokens": "Output tokens.",
    "vllm:num_preemptions": "Running requests whose memory was taken for others.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the cache when their request first ran.",
    "vllm:prefix_cache_hits": "Of these, tokens whose keys and values were there (Part 12).",
    "ruvon:steps": "Steps of the engine.",
    "ruvon:failed_steps": "Steps that ended with an error, so that their work was for nothing.",
    "ruvon:step_sequences": "Requests in all steps together; divided by the steps: the batch size.",
    "ruvon:step_tokens": "Tokens computed in all steps together, prompts and outputs.",
}
SUCCESS_REASONS = ("stop", "length")
EARLY_REASONS = ("abort", "error", "reject")  # vLLM counts such requests in none of its request metrics

# The upper bounds of histograms' buckets, in seconds if nothing else is said.
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
    640, 2560,
)  # fmt: skip
BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TOKENS_PER_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # our own choice

TTFT, TPOT = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"


def one_two_five(maximum: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to `maximum`: vLLM's buckets for counts that the model's length bounds."""
    bounds, power = [], 1
    while power <= maximum:
        bounds += [factor * power for factor in (1, 2, 5) if factor * power <= maximum]
        power *= 10
    return tuple(bounds)


def histograms(max_model_len: int) -> dict[str, tuple[str, tuple[float, ...]]]:
    """name -> (documentation, the upper bounds of its buckets)."""
    lengths = one_two_five(max_model_len)
    return {
        "vllm:iteration_tokens_total": ("Tokens computed in a step.", TOKENS_PER_STEP),
        TTFT: ("Seconds from arrival to the first output token.", FIRST_TOKEN),
        "vllm:inter_token_latency_seconds": ("Seconds between a request's output tokens.", BETWEEN_TOKENS),
        TPOT: ("Mean seconds between a finished request's output tokens.", BETWEEN_TOKENS),
        "vllm:e2e_request_latency_seconds": ("Seconds from arrival to the last output token.", LATENCY),
        "vllm:request_queue_time_seconds": ("Seconds from arrival to the first step it is in.", LATENCY),
        "vllm:request_prefill_time_seconds": ("Seconds from there to the first output token.", LATENCY),
        "vllm:request_decode_time_seconds": ("Seconds from the first output token to the last.", LATENCY),
        "vllm:request_inference_time_seconds": ("Seconds from its first step to its last token.", LATENCY),
        "vllm:request_prompt_tokens": ("Prompt tokens of a finished request.", lengths),
        "vllm:request_generation_tokens": ("Output tokens of a finished request.", lengths),
        "vllm:request_max_num_generation_tokens": ("Output tokens of the longest of n samples.", lengths),
        "vllm:request_params_max_tokens": ("max_tokens of finished requests, at most the model's.", lengths),
        "vllm:request_params_n": ("n of a request, once for all its samples.", (1, 2, 5, 10, 20)),
        "ruvon:step_seconds": ("Seconds that a step took.", STEP),
    }


@dataclass(frozen=True)
class Times:
    """Where the seconds of a finished request went. queue + prefill + decode = e2e."""

    queue: float  # from arrival to the first step it was in
    prefill: float  # from there to its first output token
    decode: float  # from its first output token to its last
    inference: float  # prefill and decode
    e2e: float  # from arrival to its last output token


def times_of(stats: RequestStats, scheduled: float) -> Times:
    """The times of a request that has ended well, and so has an output token at least.

    `scheduled` is when it was first chosen for a step. If it was preempted, the time it waited for its second
    admission belongs to prefill when it had no output token yet, and to decode when it had (as in vLLM).
    """
    first, last = stats.token_times[0], stats.token_times[-1]
    return Times(
        queue=scheduled - stats.arrival,
        prefill=first - scheduled,
        decode=last - first,
        inference=last - scheduled,
        e2e=last - stats.arrival,
    )


@dataclass(slots=True)
class SampleGroup:
    """The n samples that were asked for together, each a request."""

    under_way: int = 0  # samples that have not ended
    max_output_tokens: int = 0  # of the samples that have ended well


@dataclass(slots=True)
class RequestProgress:
    """A request under way."""

    request: Request
    scheduled: float | None = None  # when it was first chosen for a step
    num_counted: int = 0  # of its output tokens, how many the metrics have
    group: SampleGroup = field(default_factory=SampleGroup)


class EngineMetrics(Listener):
    """Listens to one engine, and is the collector of its registry."""

    def __init__(self, engine: LLMEngine, model_name: str) -> None:
        """Begins to listen. `model_name` is the label's value: what clients call the model."""
        self.engine, self.model_name = engine, model_name
        self.started = time.perf_counter()
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.succeeded: dict[str, int] = dict.fromkeys(SUCCESS_REASONS, 0)
        self.ended_early: dict[str, int] = dict.fromkeys(EARLY_REASONS, 0)
        self.from_executor: dict[str, float] = {}  # StepRecord.counters, added up
        # What other parts add to the dashboards: each gives title, value and note as text, and rows of
        # [label, share of the bar, text, colour], where a colour is a class of dashboard.css, "a" or "b".
        self.panels: list[Callable[[], dict]] = []
        self._histogram_specs = histograms(engine.max_model_len)
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in self._histogram_specs.items()}
        self.history = History(self.started)
        self._in_progress: dict[str, RequestProgress] = {}  # by the request's own id
        self._lock = threading.Lock()  # between the engine's thread and readers
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._process = ProcessCollector(registry=self.registry)  # memory and processor time of this process
        engine.listeners.add(self)

    # What the engine tells its listeners.

    def on_arrival(self, request: Request) -> None:
        """A sample joins the group of its parent, which has arrived before it."""
        with self._lock:
            progress = self._in_progress[request.id] = RequestProgress(request)
            if request.parent is not None:
                progress.group = self._in_progress[request.parent.id].group
            progress.group.under_way += 1

    def on_reject(self, request_id: str, error: Exception) -> None:
        with self._lock:
            self.ended_early["reject"] += 1

    def on_preempt(self, request: Request) -> None:
        with self._lock:
            self.counters["vllm:num_preemptions"] += 1

    def on_step(self, record: StepRecord) -> None:
        """Count a step that has ended, failed or not, and what is new of each request in it. A request that
        ended while the step was under way is counted in the step alone. Times are in seconds.
        """
        with self._lock:
            counters, in_progress = self.counters, self._in_progress
            # 1. Each request in the step: is it its first, and has it new tokens?
            for s, request_id in enumerate(record.request_ids):
                progress = in_progress.get(request_id)
                if progress is None:  # aborted while the step was under way
                    continue
                if progress.scheduled is None:
                    progress.scheduled = record.start + record.schedule_seconds
                    counters["vllm:prefix_cache_queries"] += progress.request.num_prompt_tokens
                    counters["vllm:prefix_cache_hits"] += record.tokens_cached[s]
                if len(progress.request.stats.token_times) > progress.num_counted:
                    self._observe_tokens(progress)
            # 2. The step itself.
            tokens = sum(record.tokens_computed)
            counters["ruvon:steps"] += 1
            counters["ruvon:step_sequences"] += len(record.request_ids)
            counters["ruvon:step_tokens"] += tokens
            if record.error is not None:
                counters["ruvon:failed_steps"] += 1
            for name, amount in record.counters.items():
                self.from_executor[name] = self.from_executor.get(name, 0) + amount
            self.histograms["vllm:iteration_tokens_total"].observe(tokens)
            self.histograms["ruvon:step_seconds"].observe(record.end - record.start)
            # 3. The dashboard's history.
            self.history.note(record.end, self._point())

    def _observe_tokens(self, progress: RequestProgress) -> None:
        """Count what is new of a request: `stats.token_times` beyond the `num_counted` first, one at least.

        1. All of it goes to vllm:generation_tokens.
        2. With the first output token, the wait for it is observed twice: in the histogram TTFT, for
           Prometheus, and one by one for the dashboards (`history.sample`, kind "ttft", when it came, how
           long). The prompt's tokens go to vllm:prompt_tokens. No gap yet, whatever came with that token.
        3. In any later step, one inter-token latency is observed: from the last token that was counted to
           the newest, as in vLLM, however many came at once (Part 16).
        4. `num_counted` is brought up to date.
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
        """A request that ended well is in every request metric; any other only in ours."""
        with self._lock:
            progress = self._in_progress.pop(request.id, None)
            if progress is None:  # it was here before we listened
                return
            reason = request.output.finish_reason
            assert reason is not None  # it has ended
            if reason in self.succeeded:
                assert progress.scheduled is not None  # its tokens came from a step
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
        stats, params, observed = request.stats, request.params, self.histograms
        times = times_of(stats, scheduled)
        observed["vllm:e2e_request_latency_seconds"].observe(times.e2e)
        observed["vllm:request_queue_time_seconds"].observe(times.queue)
        observed["vllm:request_prefill_time_seconds"].observe(times.prefill)
        observed["vllm:request_decode_time_seconds"].observe(times.decode)
        observed["vllm:request_inference_time_seconds"].observe(times.inference)
        observed[TPOT].observe(stats.time_per_output_token)
        if len(stats.token_times) > 1:  # a single token has no rhythm
            self.history.sample("tpot", stats.token_times[-1], stats.time_per_output_token)
        observed["vllm:request_prompt_tokens"].observe(request.num_prompt_tokens)
        observed["vllm:request_generation_tokens"].observe(len(stats.token_times))
        if params.max_tokens is not None:
            max_tokens = min(params.max_tokens, self.engine.max_model_len)  # 10**400 would be no float
            observed["vllm:request_params_max_tokens"].observe(max_tokens)
        if request.parent is None:
            observed["vllm:request_params_n"].observe(params.n)

    # What other threads read.

    def _point(self) -> Point:
        """The counters and gauges of the dashboards as they are now."""
        scheduler, counters = self.engine.scheduler, self.counters
        return Point(
            counters["vllm:generation_tokens"],
            counters["vllm:prompt_tokens"],
            counters["ruvon:steps"],
            counters["ruvon:step_sequences"],
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.cache.usage().share,
        )

    def collect(self) -> Iterator[Metric]:
        """For the registry. Counters and histograms are taken in one moment, so that they fit together; each
        gauge is read when it is asked for.
        """
        with self._lock:
            counters = dict(self.counters)
            succeeded, ended_early = dict(self.succeeded), dict(self.ended_early)
            from_executor = dict(self.from_executor)
            observed = {name: (h.bounds, h.cumulative(), h.sum) for name, h in self.histograms.items()}
        label_values = (self.model_name, ENGINE)
        for name, count in counters.items():
            counter = CounterMetricFamily(name, COUNTERS[name], labels=LABEL_NAMES)
            counter.add_metric(label_values, count)
            yield counter
        early = "Requests that were aborted, failed, or were refused by the engine."
        for name, label_name, documentation, amounts in (
            ("vllm:request_success", "finished_reason", "Requests that ended well.", succeeded),
            ("ruvon:requests_ended_early", "reason", early, ended_early),
            ("ruvon:executor", "counter", "What the executor told of its steps.", from_executor),
        ):
            counter = CounterMetricFamily(name, documentation, labels=(*LABEL_NAMES, label_name))
            for label_value, amount in amounts.items():
                counter.add_metric((*label_values, label_value), amount)
            yield counter
        for name, (bounds, cumulative, total) in observed.items():
            documentation, _ = self._histogram_specs[name]
            histogram = HistogramMetricFamily(name, documentation, labels=LABEL_NAMES)
            upper_bounds = [*(str(float(bound)) for bound in bounds), "+Inf"]
            histogram.add_metric(label_values, list(zip(upper_bounds, cumulative, strict=True)), total)
            yield histogram
        for name, documentation, value in self._gauges():
            gauge = GaugeMetricFamily(name, documentation, labels=LABEL_NAMES)
            gauge.add_metric(label_values, value)
            yield gauge
        yield from self._gpu_gauges()

    def _gpu_gauges(self) -> Iterator[Metric]:
        """Memory in bytes of each GPU that this process has touched."""
        for kind, words in (("used", "in use, by anyone"), ("total", "there is")):
            name, documentation = f"ruvon:gpu_memory_{kind}_bytes", f"GPU memory that is {words}."
            gauge = GaugeMetricFamily(name, documentation, labels=(*LABEL_NAMES, "device"))
            for gpu in gpus():
                gauge.add_metric((self.model_name, ENGINE, gpu["device"]), gpu[kind])
            yield gauge

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        """(name, documentation, value), as they are now."""
        point = self._point()
        yield "vllm:num_requests_running", "Requests that hold memory in the cache.", point.running
        yield "vllm:num_requests_waiting", "Requests in the queue.", point.waiting
        yield "vllm:kv_cache_usage_perc", "Share of the cache that is taken, 0 to 1.", point.kv_usage
        _, total = host_memory()
        if total is not None:
            yield "ruvon:host_memory_total_bytes", "Memory of this machine.", total

    def snapshot(self) -> dict:
        """All that the dashboards show, as JSON has it. See `History.read` for `seconds`."""
        now = time.perf_counter()
        process_values = {metric.name: metric.samples[0].value for metric in self._process.collect()}
        with self._lock:
            point = self._point()
            snapshot = {
                "model_name": self.model_name,
                "uptime": round(now - self.started, 3),
                "now": {
                    "running": point.running,
                    "waiting": point.waiting,
                    "kv_usage": point.kv_usage,
                    "memory": process_values.get(
                        "process_resident_memory_bytes"
                    ),  # None where there is no /proc
                    "memory_total": host_memory()[1],
                    "gpus": gpus(),
                },
                "totals": dict(self.counters),
                "ended": self.succeeded | self.ended_early,
                "buckets": {
                    short: {
                        "le": self.histograms[name].bounds,
                        "cumulative": self.histograms[name].cumulative(),
                    }
                    for short, name in (("ttft", TTFT), ("tpot", TPOT))
                },
            }
            recent = self.history.copy()
        panels = [panel() for panel in self.panels]
        return snapshot | {"window": recent.window, "seconds": recent.read(now), "panels": panels}


def gpus() -> list[dict]:
    """Of each GPU that this process has touched: device, bytes used (by anyone) and in total."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    touched = []
    for index in range(torch.cuda.device_count()):
        if not torch.cuda.memory_reserved(index):  # asking would open it
            continue
        free, total = torch.cuda.mem_get_info(index)
        touched.append({"device": f"cuda:{index}", "used": total - free, "total": total})
    return touched
