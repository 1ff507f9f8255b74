"""What a server of `ruvon serve` tells Prometheus beside its engine's metrics, under vLLM's names."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import EngineArgs
from engine.cli.serve_flags import ServeFlags
from engine.cli.serving import Service
from engine.server.http_metrics import CountRequests, HttpMetrics
from engine.telemetry.info import AdapterInfo
from tests.part04.serving import serve

ADAPTERS = Path(__file__).parents[2] / "adapters"
ASK = {"model": "storyteller-draft", "prompt": "Once upon a time", "max_tokens": 3}


def samples(client: httpx.Client) -> dict[tuple[str, frozenset], float]:
    """(name, labels without the model's and the engine's) -> value, of all that /metrics shows."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def of(found: dict, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


@pytest.fixture
def client():
    service = Service(EngineArgs(model="storyteller-draft", block_size=8, kv_cache_memory_bytes=1 << 22))
    app = service.app([], "secret", False, None, "/llm")
    headers = {"Authorization": "Bearer secret"}
    with serve(app) as url, httpx.Client(base_url=url, headers=headers, timeout=240) as client:
        yield client


def test_requests_are_counted_by_route_and_never_by_path(client):
    client.post("/v1/completions", json=ASK)
    client.post("/llm/v1/completions", json=ASK | {"stream": True})
    client.post("/v1/completions", json={"model": "storyteller-draft"})
    client.post("/v1/completions", json=ASK, headers={"Authorization": "Bearer wrong"})
    client.get("/v1/completions")
    for i in range(5):
        client.get(f"/v1/models/unknown-{i}")
        client.get(f"/nowhere/{i}")
        client.request(f"VERB{i}", "/v1/models")
    client.get("/v1/models")
    client.get("/health")
    found = samples(client)
    counted = {
        tuple(sorted(dict(labels).items())): value
        for (name, labels), value in found.items()
        if name == "http_requests_total"
    }
    assert counted == {
        (("handler", handler), ("method", method), ("status", status)): number
        for handler, method, status, number in [
            ("/v1/completions", "POST", "2xx", 2),
            ("/v1/completions", "POST", "4xx", 2),
            ("/v1/completions", "GET", "4xx", 1),
            ("/v1/models/{name:path}", "GET", "4xx", 5),
            ("/v1/models", "GET", "2xx", 1),
            ("/v1/models", "OTHER", "4xx", 5),
            ("none", "GET", "4xx", 5),
        ]
    }, "a path of a client's makes no series, and /health and /metrics are not counted, as in vLLM"
    count = of(found, "http_request_duration_seconds_count", handler="/v1/completions", method="POST")
    assert count == 4
    assert of(found, "http_request_duration_seconds_bucket", le="+Inf", handler="none", method="GET") == 5
    assert of(found, "http_request_duration_highr_seconds_count") == 21
    assert of(found, "http_request_duration_highr_seconds_bucket", le="60.0") == 21
    total = of(found, "http_request_duration_seconds_sum", handler="/v1/completions", method="POST")
    assert total >= of(found, "vllm:e2e_request_latency_seconds_sum"), "up to the answer's end"


def test_a_route_that_raises_is_a_5xx_and_lasts_until_then():
    metrics = HttpMetrics()

    async def broken(scope, receive, send):
        await asyncio.sleep(0.02)
        raise RuntimeError("broken")

    class Routes:
        routes = ()

    middleware = CountRequests(broken, metrics, Routes, ())
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(middleware({"type": "http", "path": "/x", "method": "GET"}, None, None))
    counter, by_route, _ = metrics.collect()
    (sample,) = counter.samples
    assert sample.labels == {"handler": "none", "method": "GET", "status": "5xx"}
    assert next(s.value for s in by_route.samples if s.name.endswith("_sum")) >= 0.02


def test_the_caches_size_stands_in_labels(client):
    service = Service(
        EngineArgs(model="storyteller-draft", kv_cache="slots", max_num_seqs=3, max_model_len=50)
    )
    for metrics, expected in (
        (samples(client), {"block_size": "8", "enable_prefix_caching": "True", "num_cpu_blocks": "0"}),
        (None, {"block_size": "50", "enable_prefix_caching": "False", "num_gpu_blocks": "3"}),
    ):
        if metrics is None:
            app = service.app([], None, False, None)
            with serve(app) as url, httpx.Client(base_url=url, timeout=240) as other:
                metrics = samples(other)
        ((_, labels),) = [key for key in metrics if key[0] == "vllm:cache_config_info"]
        found = dict(labels)
        assert found.items() >= expected.items()
        assert int(found["num_gpu_blocks"]) * int(found["block_size"]) == int(found["kv_cache_size_tokens"])
        assert metrics["vllm:cache_config_info", labels] == 1


def test_cached_prompt_tokens_are_counted_and_python_is_named(client):
    long = ASK | {"prompt": "Once upon a time there was a little dog who liked to play in the park. " * 2}
    client.post("/v1/completions", json=long)
    once = samples(client)
    assert of(once, "vllm:prompt_tokens_cached_total") == 0
    client.post("/v1/completions", json=long)
    found = samples(client)
    cached = of(found, "vllm:prompt_tokens_cached_total")
    assert cached == of(found, "vllm:prefix_cache_hits_total") >= 16
    prompts = of(found, "vllm:prompt_tokens_total")
    assert of(found, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == cached
    assert of(found, "vllm:prompt_tokens_by_source_total", source="local_compute") == prompts - cached
    assert of(found, "vllm:request_prefill_kv_computed_tokens_sum") == prompts - cached
    assert any(name == "python_info" for name, _ in found)
    assert any(name == "python_gc_collections_total" for name, _ in found)


def test_adapters_of_running_and_waiting_requests_are_named():
    class One:
        def __init__(self, adapter):
            self.adapter = adapter

    running, waiting = [One("b@7"), One(None), One("a@1"), One("b@9")], [One("who@home@2")]
    (gauge,) = AdapterInfo(SimpleNamespace(running=running, waiting=waiting), 3).collect()
    (sample,) = gauge.samples
    assert sample.name == "vllm:lora_requests_info"
    assert sample.labels == {
        "max_lora": "3", "running_lora_adapters": "a,b", "waiting_lora_adapters": "who@home"
    }  # fmt: skip
    assert abs(sample.value - time.time()) < 60


def test_a_server_with_adapters_says_which_run():
    modules = [f"poetry={ADAPTERS / 'poetry'}"]
    args = EngineArgs(model="storyteller", enable_lora=True, max_loras=2)
    service = Service(args, ServeFlags(lora_modules=modules))
    with serve(service.app([], None, False, None)) as url, httpx.Client(base_url=url, timeout=240) as client:
        ask = ASK | {"model": "poetry", "max_tokens": 400, "ignore_eos": True, "stream": True}
        name, idle = "vllm:lora_requests_info", {"running_lora_adapters": "", "waiting_lora_adapters": ""}
        assert of(samples(client), name, max_lora="2", **idle) is not None
        with client.stream("POST", "/v1/completions", json=ask) as answer:
            lines = answer.iter_lines()  # kept: without it, httpx would close the connection
            next(lines)
            running = of(samples(client), name, max_lora="2", **idle | {"running_lora_adapters": "poetry"})
            assert running == pytest.approx(time.time(), abs=60)
