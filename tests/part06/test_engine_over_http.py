"""The engine as the server's backend: many users, one queue."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from engine.core.engine_thread import EngineThread
from engine.decoding.params import SamplingParams
from engine.requests.listeners import Listeners
from engine.server.app import create_app
from tests.part04.serving import http, openai_client, serve, wait_until
from tests.part06.fakes import (
    BlockCache,
    FakeForward,
    Gate,
    Recorder,
    at_rest,
    leave_in_the_third_step,
    told_alone,
)

PROMPTS = ["Once upon a time", "The little dog", "A red ball"]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
ASK = {"model": "m", "temperature": 0, "max_tokens": 20}


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def serving(passed):
    """serving(engine or backend) -> URL of a server in front of it."""
    with ExitStack() as stack:

        def start(engine):
            backend = engine if isinstance(engine, EngineThread) else EngineThread(engine, "m")
            stack.enter_context(at_rest(backend, passed))
            return stack.enter_context(serve(create_app(backend)))

        yield start


@pytest.mark.parametrize("stream", [False, True])
def test_three_requests_at_once_complete_in_order_of_arrival(real_engine, serving, recorder, alone, stream):
    url = serving(real_engine(listeners=Listeners([recorder])))

    def ask(prompt):
        with openai_client(url) as client:
            answer = client.completions.create(prompt=prompt, stream=stream, **ASK)
            return "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text

    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(ask, PROMPTS))
    assert texts == [alone(prompt, GREEDY).text for prompt in PROMPTS]
    arrived, finished = (
        [id for kind, id in recorder.heard if kind == event] for event in ("arrival", "finish")
    )
    assert arrived == finished
    assert len(arrived) == 3


def test_fields_of_part_5_have_their_effect(fake_engine, serving):
    url = serving(fake_engine())
    with openai_client(url) as client:
        answer = client.completions.create(
            model="m", prompt="hello", n=2, seed=3, temperature=0.7, max_tokens=9
        )
        assert client.models.list().data[0].id == "m"
    params = SamplingParams(n=2, seed=3, temperature=0.7, max_tokens=9)
    assert [choice.text for choice in answer.choices] == [
        told_alone("hello", params, i).text for i in range(2)
    ]


def test_a_failed_step_is_a_500_or_an_event_and_the_next_request_is_served(fake_engine, serving):
    cache = BlockCache(64, 16)
    forward = FakeForward(cache)
    forward.fail_at = {2: RuntimeError("the cable came loose"), 4: RuntimeError("again")}
    url = serving(fake_engine(cache=cache, forward=forward))
    with http(url) as client:
        whole = client.post("/v1/completions", json=ASK | {"prompt": "one"})
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "engine_error", whole.text
        streamed = client.post("/v1/completions", json=ASK | {"prompt": "two", "stream": True})
        assert streamed.status_code == 200
        assert "engine_error" in streamed.text
        served = client.post("/v1/completions", json=ASK | {"prompt": "three"})
        assert served.status_code == 200, served.text
        assert served.json()["choices"][0]["text"] == told_alone("three", GREEDY).text


def test_refused_requests_never_reach_the_queue(fake_engine, serving, recorder):
    url = serving(fake_engine(listeners=Listeners([recorder])))
    with http(url) as client:
        for change in (
            {"prompt": [999]},
            {"prompt": "x" * 500},
            {"prompt": ["fine", ""]},
            {"cache_salt": "me"},
        ):
            answer = client.post("/v1/completions", json=ASK | {"prompt": "x"} | change)
            assert answer.status_code == 400, answer.text
    wait_until(lambda: [kind for kind, _ in recorder.heard] == ["reject"] * 4)


def test_a_client_that_leaves_frees_its_memory_and_the_next_one_is_served(
    real_engine, serving, recorder, alone
):
    engine = real_engine(listeners=Listeners([recorder]))
    gate = engine.executor.ways[0] = Gate(engine.executor.ways[0], permits=2)
    backend = EngineThread(engine, "m")
    url = serving(backend)
    ask = ASK | {"prompt": PROMPTS[0], "max_tokens": 1000, "ignore_eos": True}
    with http(url) as client:
        leave_in_the_third_step(client, ask, gate, backend)
        served = client.post("/v1/completions", json=ASK | {"prompt": PROMPTS[1]})
    assert served.status_code == 200, served.text
    assert served.json()["choices"][0]["text"] == alone(PROMPTS[1], GREEDY).text
    steps = 3 + len(alone(PROMPTS[1], GREEDY).token_ids)
    assert len(recorder.records) == steps, "the one who left had another step after the one under way"


@pytest.mark.parametrize("stream", [False, True])
def test_the_death_of_the_engines_thread_is_a_500_or_an_event_and_health_says_so(
    fake_engine, caplog, monkeypatch, stream
):
    """It was a 200 with the finish reason "abort"."""

    def leave() -> None:
        raise SystemExit(3)

    backend = EngineThread(fake_engine(), "m")
    monkeypatch.setattr(backend.engine, "step", leave)
    body = ASK | {"prompt": "one", "stream": stream}
    with caplog.at_level(logging.ERROR), serve(create_app(backend)) as url, http(url) as client:
        for _ in range(2):  # who reads meanwhile, and who comes later
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == (200 if stream else 500), answer.text
            assert '"code":"engine_error"' in answer.text
            assert "abort" not in answer.text
        assert client.get("/health").status_code == 503, f"the thread lives:\n{caplog.text}"
    assert not backend.engine.has_unfinished_requests()


def test_health_is_that_of_the_step_loop(fake_engine):
    backend = EngineThread(fake_engine(), "m")
    with at_rest(backend), serve(create_app(backend)) as url, http(url) as client:
        assert client.get("/health").status_code == 200
        backend.stop()
        assert client.get("/health").status_code == 503
