"""`--otlp-traces-endpoint URL`: a span for each request, under vLLM's names, in the client's own trace."""

import asyncio
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine import LLM, AsyncLLMEngine, EngineArgs, SamplingParams
from engine.cli.serving import Service
from engine.core.llm_engine import LLMEngine
from engine.execution.runner import ModelRunner
from engine.requests.listeners import Listeners
from engine.scheduling.fifo import FIFOScheduler
from engine.telemetry.spans import RequestSpans, open_spans
from engine.wiring import watchers
from engine.wiring.compose import build_engine
from tests.part04.serving import serve
from tests.part06.fakes import CONFIG, TOKENIZER, BlockCache, FakeForward, run_to_end
from tests.system.test_commands import refusal
from tests.system.tools import DEADLINE

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=b"}
ALWAYS = {  # vLLM 0.32's, of each request that has a token
    "gen_ai.request.id", "gen_ai.request.n", "gen_ai.request.top_p", "gen_ai.request.max_tokens",
    "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens", "gen_ai.latency.e2e",
    "gen_ai.latency.time_in_queue", "gen_ai.latency.time_to_first_token",
    "gen_ai.latency.time_in_model_prefill", "gen_ai.latency.time_in_model_decode",
    "gen_ai.latency.time_in_model_inference", "gen_ai.request.temperature",
}  # fmt: skip
ASK = {"model": "storyteller-draft", "prompt": "Once upon a time", "max_tokens": 5, "temperature": 0.5}


@pytest.fixture
def exported(monkeypatch) -> InMemorySpanExporter:
    """Where the spans of engines go that are made with an endpoint."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(watchers, "_open_spans", lambda endpoint: RequestSpans(SimpleSpanProcessor(exporter)))
    return exporter


@pytest.fixture
def client(exported):
    service = Service(EngineArgs(model="storyteller-draft", otlp_traces_endpoint="http://x"))
    app = service.app([], None, False, None)
    with serve(app) as url, httpx.Client(base_url=url, timeout=DEADLINE, trust_env=False) as client:
        yield client


def test_a_request_has_a_span_with_vllms_names(exported):
    llm = LLM("storyteller-draft", otlp_traces_endpoint="http://x")
    params = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7, ignore_eos=True)
    (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    (span,) = exported.get_finished_spans()
    assert (span.name, span.kind, span.parent) == ("llm_request", SpanKind.SERVER, None)
    values = dict(span.attributes)
    assert set(values) >= ALWAYS
    assert values["gen_ai.request.id"] == output.request_id
    assert values["gen_ai.request.n"] == 1
    assert (values["gen_ai.request.temperature"], values["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert values["gen_ai.request.max_tokens"] == values["gen_ai.usage.completion_tokens"] == 7
    assert values["gen_ai.usage.prompt_tokens"] == len(output.prompt_token_ids)
    assert values["gen_ai.response.finish_reasons"] == ("length",)
    latency = {
        name.removeprefix("gen_ai.latency."): value for name, value in values.items() if "latency" in name
    }
    assert latency["time_to_first_token"] == pytest.approx(output.stats.time_to_first_token)
    assert latency["time_in_queue"] + latency["time_in_model_prefill"] == pytest.approx(
        latency["time_to_first_token"]
    )
    assert latency["time_in_model_inference"] <= latency["e2e"]
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(latency["e2e"], abs=0.1)
    assert span.resource.attributes["service.name"] == "ruvon"


def test_a_parameter_that_was_not_given_is_in_no_span(exported):
    LLM("storyteller-draft", otlp_traces_endpoint="http://x", max_model_len=16).generate(
        "The dog", SamplingParams(max_tokens=None), use_tqdm=False
    )
    (span,) = exported.get_finished_spans()
    assert "gen_ai.request.max_tokens" not in span.attributes


@pytest.mark.parametrize("body", [{}, {"stream": True}])
def test_over_http_a_span_is_a_part_of_the_clients_trace(client, exported, body):
    client.post("/v1/completions", json=ASK | body, headers=PARENT).read()
    (span,) = exported.get_finished_spans()
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert span.context.trace_id == span.parent.trace_id
    assert dict(span.context.trace_state) == {"a": "b"}


def test_chats_and_each_prompt_and_sample_have_theirs(client, exported):
    client.post("/v1/completions", json=ASK | {"prompt": ["a", "b"], "n": 2}, headers=PARENT)
    assert [span.attributes["gen_ai.request.n"] for span in exported.get_finished_spans()] == [2] * 4
    messages = [{"role": "user", "content": "A story, please."}]
    chat = {"model": "storyteller-draft", "messages": messages, "max_tokens": 3}
    assert client.post("/v1/chat/completions", json=chat, headers=PARENT).status_code == 200
    assert {f"{span.context.trace_id:032x}" for span in exported.get_finished_spans()} == {TRACE}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"traceparent": "no such thing"},
        {"traceparent": f"00-{'0' * 32}-{SPAN}-01"},
        {"tracestate": "a=b"},
        {"traceparent": "x" * 10_000},
    ],
    ids=["none", "words", "zeros", "state alone", "long"],
)
def test_a_client_without_a_trace_of_its_own_gets_a_new_one(client, exported, headers):
    assert client.post("/v1/completions", json=ASK, headers=headers).status_code == 200
    assert client.post("/v1/completions", json=ASK, headers=headers).status_code == 200
    spans = exported.get_finished_spans()
    assert [span.parent for span in spans] == [None, None]
    assert len({span.context.trace_id for span in spans}) == 2


def test_a_program_names_the_trace_of_its_request_as_in_vllm(exported):
    async def run():
        engine = AsyncLLMEngine(EngineArgs(model="storyteller-draft", otlp_traces_endpoint="http://x"))
        try:
            outputs = engine.generate("Hi", SamplingParams(max_tokens=2), "a", trace_headers=PARENT)
            assert [output async for output in outputs][-1].finished
        finally:
            engine.shutdown()

    asyncio.run(run())
    (span,) = exported.get_finished_spans()
    assert f"{span.parent.span_id:016x}" == SPAN


def test_one_requests_trace_is_not_the_nexts(client, exported):
    for headers in (PARENT, {}):
        client.post("/v1/completions", json=ASK, headers=headers)
    first, second = exported.get_finished_spans()
    assert first.parent is not None
    assert second.parent is None


def test_a_trace_that_the_client_does_not_record_is_not_recorded_here(client, exported):
    unsampled = {"traceparent": PARENT["traceparent"][:-2] + "00"}
    assert client.post("/v1/completions", json=ASK, headers=unsampled).status_code == 200
    assert exported.get_finished_spans() == ()


def test_who_leaves_has_a_span_and_who_fails_says_why(exported):
    engine = build_engine(EngineArgs(model="storyteller-draft", otlp_traces_endpoint="http://x"))
    engine.add_request("runs", "The dog", SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step(), engine.step()
    engine.add_request("waits", "The dog")
    for name in ("waits", "runs"):
        engine.abort_request(name)
    waits, runs = exported.get_finished_spans()
    assert waits.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert "gen_ai.latency.time_to_first_token" not in waits.attributes
    assert "gen_ai.latency.time_in_queue" not in waits.attributes
    assert runs.attributes["gen_ai.usage.completion_tokens"] == 2


def test_a_failed_request_has_the_status_of_an_error():
    cache, exported = BlockCache(64, 16), InMemorySpanExporter()
    forward = FakeForward(cache)
    forward.fail_at[2] = RuntimeError("the cable came loose")
    spans = Listeners([RequestSpans(SimpleSpanProcessor(exported))])
    engine = LLMEngine(TOKENIZER, CONFIG, FIFOScheduler(cache), ModelRunner([forward]), spans)
    engine.add_request("a", "one", SamplingParams(max_tokens=5, ignore_eos=True))
    run_to_end(engine)
    (span,) = exported.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert "the cable came loose" in span.status.description


def test_spans_reach_a_collector_over_http_when_the_engine_is_shut_down():
    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        llm = LLM("storyteller-draft", otlp_traces_endpoint=f"http://127.0.0.1:{server.server_port}")
        llm.generate("The dog", SamplingParams(max_tokens=2), use_tqdm=False)
        llm.shutdown()
        server.shutdown()
    ((path, request),) = got
    assert path == "/v1/traces"
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert span.name == "llm_request"


@pytest.mark.parametrize(
    "endpoint", ["grpc://localhost:4317", "localhost:4318", "", "http://", "http://x:99999", "http://[x"]
)
def test_what_is_no_address_is_refused_before_a_model_is_loaded(endpoint):
    message = refusal("serve", "storyteller-draft", "--port", "0", "--otlp-traces-endpoint", endpoint)
    assert message.startswith(
        f"ruvon serve: otlp_traces_endpoint={endpoint!r}: an address is accepted such as"
    )


def test_another_protocol_than_http_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(ValueError, match="PROTOCOL=grpc: http/protobuf is accepted"):
        open_spans("http://localhost:4318")


def test_without_the_extra_the_option_is_refused_with_the_line_that_installs_it(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry.sdk")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "engine.telemetry.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    message = refusal("serve", "storyteller-draft", "--port", "0", "--otlp-traces-endpoint", "http://x")
    assert message.startswith("ruvon serve: otlp_traces_endpoint='http://x': opentelemetry.")
    assert message.endswith("is not installed; pip install 'ruvon[otel]'")


def test_the_programs_own_tracer_is_left_alone(exported):
    from opentelemetry import trace

    before = trace.get_tracer_provider()
    LLM("storyteller-draft", otlp_traces_endpoint="http://x")
    assert trace.get_tracer_provider() is before


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("OTEL_SERVICE_NAME", "stories", "stories"),
        ("OTEL_SERVICE_NAME", "", "ruvon"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a=b, service.name=stories", "stories"),
        ("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=shop", "ruvon"),
    ],
)
def test_a_service_has_the_name_that_the_environment_gives(monkeypatch, variable, value, name):
    monkeypatch.setenv(variable, value)
    exporter = InMemorySpanExporter()
    spans = RequestSpans(SimpleSpanProcessor(exporter))
    spans._tracer.start_span("any").end()
    assert exporter.get_finished_spans()[0].resource.attributes["service.name"] == name
