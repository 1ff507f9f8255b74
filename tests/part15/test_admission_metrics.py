"""What admission control shows on /metrics."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from engine.decoding.params import SamplingParams
from engine.scheduling.elastic import ElasticScheduler
from engine.server.admission_metrics import AdmissionMetrics
from engine.server.errors import RequestError
from tests.part06.fakes import BlockCache
from tests.part15.fakes import PARAMS, TOKENS, admission

LABELS = {"model_name": "m", "engine": "0"}


def test_every_number_is_what_is_counted():
    backend = admission(reqs=3)
    scheduler = ElasticScheduler(BlockCache(10, 16), 4, 64)
    registry = CollectorRegistry()
    registry.register(AdmissionMetrics(backend, scheduler, "m"))

    def read(name: str, **labels) -> float | None:
        return registry.get_sample_value(f"ruvon:{name}", LABELS | labels)

    assert read("requests_refused_total", reason="queue_full") == 0, "it is shown before it occurs"
    assert read("admitted_sequences") == 0

    async def ask():
        await backend.generate("prompt", SamplingParams(n=2), "r")
        with pytest.raises(RequestError):
            await backend.generate("prompt", SamplingParams(n=2), "r")
        stream = await backend.generate("prompt", PARAMS, "r")
        stream.end("shutting_down")
        with pytest.raises(RequestError):
            await anext(stream)

    asyncio.run(ask())
    scheduler.num_out_of_memory, scheduler.max_num_batched_tokens = 2, 16
    assert read("requests_refused_total", reason="queue_full") == 1
    assert read("requests_refused_total", reason="shutting_down") == 1
    assert read("requests_cut_short_total", reason="shutting_down") == 0, "it had nothing to be cut short"
    assert (read("admitted_sequences"), read("admitted_tokens")) == (2, 2 * TOKENS)
    assert (read("max_num_queued_reqs"), read("max_num_queued_tokens")) == (3, 1000)
    assert (read("out_of_memory_steps_total"), read("step_token_limit")) == (2, 16)
