"""A span for each request, for OpenTelemetry, with the names that vLLM gives its own. Part 20.

Promises that the engine's thread never waits for the collector: ended spans go into a bounded queue, which a
thread of the library sends over HTTP (OTLP). If the collector does not answer, spans are lost, and the
library's log says so. Needs the extra `otel`. No state is global: a program's own tracer is left alone.

As in vLLM, each of n samples is a request with a span of its own, and a span's parent is the one that the
request's trace context names (`Request.trace_headers`). Unlike there, a request that was aborted or has
failed has a span, too, with what is known of it. Source: vllm/v1/engine/output_processor.py and vllm/tracing,
https://github.com/vllm-project/vllm.
"""

import os
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.machine.version import ruvon_version
from engine.requests.listeners import Listener, StepRecord
from engine.requests.request import Request
from engine.telemetry.metrics import times_of

TRACES_PATH = "/v1/traces"  # of a collector, where the endpoint has no path
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"  # vLLM reads it; HTTP is the only one here
SPAN_NAME = "llm_request"


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended."""

    request: Request
    scheduled: float | None = None  # when it was first scheduled, in seconds; None before


class RequestSpans(Listener):
    """Makes a span of each request when it ends. The engine's thread calls the `on_…` methods."""

    def __init__(self, processor: SpanProcessor) -> None:
        """`processor` gets the spans."""
        resource = Resource.create({} if _environment_has_name() else {"service.name": "ruvon"})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("ruvon", ruvon_version())
        self._propagator = TraceContextTextMapPropagator()
        # Seconds from 1970 to the 0 of `time.perf_counter`, the clock of all times here.
        self._clock_offset = time.time() - time.perf_counter()
        self._open: dict[str, OpenRequest] = {}  # by `Request.id`

    def on_arrival(self, request: Request) -> None:
        """Note the request until it ends."""
        self._open[request.id] = OpenRequest(request)

    def on_step(self, record: StepRecord) -> None:
        """Note the requests that are in a step for the first time."""
        for request_id in record.request_ids:
            open_request = self._open.get(request_id)
            if open_request is not None and open_request.scheduled is None:
                open_request.scheduled = record.start + record.schedule_seconds

    def on_finish(self, request: Request) -> None:
        """Make the request's span, from its arrival until now."""
        open_request = self._open.pop(request.id, None)
        if open_request is None:  # the request arrived before this listened
            return
        ended = time.perf_counter()
        parent = self._propagator.extract(request.trace_headers) if request.trace_headers else None
        span = self._tracer.start_span(
            SPAN_NAME,
            context=parent,
            kind=SpanKind.SERVER,
            start_time=self._nanoseconds(request.stats.arrival),
            attributes=attributes(request, open_request.scheduled, ended),
        )
        if request.error is not None:
            span.set_status(Status(StatusCode.ERROR, request.error))
        span.end(self._nanoseconds(ended))

    def _nanoseconds(self, seconds: float) -> int:
        """A time of `time.perf_counter`, in nanoseconds since 1970."""
        return int((seconds + self._clock_offset) * 1e9)

    def close(self) -> None:
        """Send what is left; the process's end does it, too. A collector that does not answer is waited for:
        OTEL_EXPORTER_OTLP_TRACES_TIMEOUT says how many seconds, by default 10.
        """
        self._provider.shutdown()


def _environment_has_name() -> bool:
    """Whether the environment names the service. A name that `Resource.create` is given would replace it."""
    pairs = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    names = {pair.partition("=")[0].strip() for pair in pairs}
    return bool(os.environ.get("OTEL_SERVICE_NAME")) or "service.name" in names


def attributes(
    request: Request, scheduled: float | None, now: float
) -> dict[str, str | int | float | tuple[str, ...]]:
    """The span's attributes, under vLLM's names; latencies are in seconds.

    `scheduled` is when the request was first scheduled for a step, None if it never was; `now` is when it
    ended. What is not known of a request, such as the first token of one that has none, is left out.
    """
    stats, params = request.stats, request.params
    values: dict[str, str | int | float | tuple[str, ...] | None] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": len(stats.token_times),
        "gen_ai.latency.e2e": now - stats.arrival,
        "gen_ai.response.finish_reasons": (str(request.output.finish_reason),),
    }
    if scheduled is not None:
        values["gen_ai.latency.time_in_queue"] = scheduled - stats.arrival
        if stats.token_times:
            times = times_of(stats, scheduled)
            values["gen_ai.latency.time_to_first_token"] = stats.time_to_first_token
            values["gen_ai.latency.time_in_model_prefill"] = times.prefill
            values["gen_ai.latency.time_in_model_decode"] = times.decode
            values["gen_ai.latency.time_in_model_inference"] = times.inference
    return {name: value for name, value in values.items() if value is not None}


def open_spans(endpoint: str) -> RequestSpans:
    """Spans that go to the collector at `endpoint`, a URL to which OTLP is sent over HTTP. Raises ValueError
    for any other text, and if PROTOCOL_VARIABLE names another protocol.
    """
    option = f"otlp_traces_endpoint={endpoint!r}"
    protocol = os.environ.get(PROTOCOL_VARIABLE, "http/protobuf")
    if protocol != "http/protobuf":
        raise ValueError(f"{option} with {PROTOCOL_VARIABLE}={protocol}: http/protobuf is accepted")
    try:
        url = urlsplit(endpoint)
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ValueError(f"{option}: an address is accepted such as http://localhost:4318{TRACES_PATH}")
    if url.path in ("", "/"):
        endpoint = url._replace(path=TRACES_PATH).geturl()
    return RequestSpans(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
