"""Many users at once through the server: each gets exactly the offline text, and nothing is left behind."""

import asyncio
import json
import threading
from contextlib import ExitStack
from functools import cache, partial

import httpx
import pytest

from engine.cache.slots import SlotMemory
from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SUPPORTS
from engine.execution.runner import EagerWay, ModelRunner
from engine.requests.listeners import Listeners
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.server.app import create_app
from engine.server.protocol import Completions
from tests.part04.serving import DEADLINE, http, serve, wait_until
from tests.part06.fakes import (
    BlockCache,
    FakeForward,
    Gate,
    Recorder,
    assert_idle,
    at_rest,
    leave_in_the_third_step,
    run_to_end,
    told_alone,
    until,
)

WHO = [
    "a dog",
    "a red ball",
    "Tom",
    "the moon",
    "a tiny 🦊",
    "Lily",
    "her mom",
    "a boat",
    "two birds",
    "rain",
]
HOW = ["Once upon a time there was {}", "{} was very sad because", "One day, {}", "Look at {}!", "{} and {}"]
PROMPTS = [how.replace("{}", who) for who in WHO for how in HOW]


def continuous(max_num_seqs: int, budget: int):
    return partial(ContinuousScheduler, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def params_of(i: int) -> dict:
    """Two in three greedy, the others with a seed; lengths from 4 to 27."""
    sampled = {"temperature": 0.8, "seed": i, "top_p": 0.9} if i % 3 == 2 else {"temperature": 0}
    return {"max_tokens": 4 + i % 24, **sampled}


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def serving(passed):
    """serving(engine or backend) -> URL; when the test is over, no thread of it is left."""
    before = set(threading.enumerate())
    with ExitStack() as stack:

        def start(engine):
            backend = engine if isinstance(engine, EngineThread) else EngineThread(engine, "m")
            stack.enter_context(at_rest(backend, passed))
            return stack.enter_context(serve(create_app(backend, api=Completions(allow_priority=True))))

        yield start
    wait_until(lambda: set(threading.enumerate()) <= before)


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=4 * DEADLINE, limits=limits, trust_env=False)


async def stream(client: httpx.AsyncClient, prompt: str, leave_after: int | None = None, **fields) -> str:
    """The text of one streamed completion, or what had come of it when the client left."""
    body = {"model": "m", "prompt": prompt, "stream": True, **fields}
    text, reason, events = "", None, 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                assert reason
                return text
            if line:
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, line
                text += chunk["choices"][0]["text"]
                reason = chunk["choices"][0]["finish_reason"]
                events += 1
                if events == leave_after:
                    return text
    raise AssertionError("the stream ended without [DONE]")


@pytest.fixture(scope="module")
def offline(model, tokenizer):
    """offline() -> what the engine says to each prompt when it is asked one after the other, without a
    server.
    """

    @cache
    def ask() -> list[str]:
        memory = SlotMemory(model.config, 1)
        executor = ModelRunner([EagerWay(model, memory)], memory)
        engine = LLMEngine(tokenizer, model.config, FIFOScheduler(memory.plan()), executor)
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, SamplingParams(**params_of(i)))
        done = run_to_end(engine)
        assert_idle(engine)
        return [done[str(i)].outputs[0].text for i in range(len(PROMPTS))]

    return ask


def test_fifty_streaming_clients_at_once_each_get_exactly_the_offline_text(
    slot_engine, serving, offline, recorder
):
    engine = slot_engine(continuous(16, 128), num_slots=16, listeners=Listeners([recorder]))
    gate = engine.executor.ways[0] = Gate(engine.executor.ways[0])
    backend = EngineThread(engine, "m")
    url = serving(backend)

    def all_have_asked() -> bool:
        """The first step waits at the gate; who comes meanwhile is a command that waits, too."""
        queues = engine.scheduler.running, engine.scheduler.waiting
        return gate.entered and sum(map(len, queues)) + backend._commands.qsize() == len(PROMPTS)

    async def run():
        async with client_of(url) as client:
            asking = [
                asyncio.create_task(stream(client, prompt, **params_of(i)))
                for i, prompt in enumerate(PROMPTS)
            ]
            await until(all_have_asked, *asking)
            gate.open()
            return await asyncio.gather(*asking)

    assert len(PROMPTS) == 50
    assert asyncio.run(run()) == offline()
    sizes = [len(record.request_ids) for record in recorder.records]
    assert max(sizes) == 16, "they were not served together"
    assert max(sum(record.tokens_computed) for record in recorder.records) <= 128


def test_clients_who_leave_in_the_middle_change_nothing_for_those_who_stay(slot_engine, serving, offline):
    url = serving(slot_engine(continuous(8, 64), num_slots=8))

    async def run():
        async with client_of(url) as client:
            return await asyncio.gather(
                *[
                    stream(client, prompt, **params_of(i))
                    if i % 2
                    else stream(client, prompt, leave_after=1 + i % 3, temperature=0, max_tokens=900)
                    for i, prompt in enumerate(PROMPTS[:30])
                ]
            )

    assert asyncio.run(run())[1::2] == offline()[1:30:2]


def test_a_client_who_leaves_frees_its_slot_by_the_next_step(fake_engine, serving, recorder):
    cache = BlockCache(64, 16)
    gate = Gate(FakeForward(cache), permits=2)
    engine = fake_engine(continuous(2, 64), cache, gate, listeners=Listeners([recorder]))
    backend = EngineThread(engine, "m")
    ask = {"model": "m", "prompt": "hello", "temperature": 0, "max_tokens": 100, "ignore_eos": True}
    with at_rest(backend), serve(create_app(backend)) as url, http(url) as client:
        leave_in_the_third_step(client, ask, gate, backend)
        wait_until(lambda: cache.usage().num_sequences == 0)
        seen = client.post("/v1/completions", json=ask | {"max_tokens": 3})
    assert (
        seen.json()["choices"][0]["text"]
        == told_alone("hello", SamplingParams(temperature=0, max_tokens=3)).text
    )
    steps = [ids for kind, ids in recorder.heard if kind == "schedule"]
    assert len(steps) == 3 + 3
    assert len(set(steps[:3])) == 1
    assert not set(steps[2]) & set(steps[3])


def test_a_reader_who_stands_still_does_not_slow_the_others(slot_engine, serving, offline):
    url = serving(slot_engine(continuous(4, 64), num_slots=4))

    async def run():
        async with client_of(url) as client:
            body = {"model": "m", "prompt": PROMPTS[0], "stream": True, "temperature": 0, "max_tokens": 900}
            async with client.stream("POST", "/v1/completions", json=body):  # never read
                return await asyncio.gather(
                    *[stream(client, prompt, **params_of(i)) for i, prompt in enumerate(PROMPTS[:9])]
                )

    assert asyncio.run(run()) == offline()[:9]


def test_refused_and_aborted_and_failed_and_served_requests_leave_nothing_together(fake_engine, serving):
    cache = BlockCache(40, 8)
    forward = FakeForward(cache)
    forward.fail_at = {step: RuntimeError("the cable came loose") for step in range(3, 1000, 30)}
    url = serving(fake_engine(continuous(4, 32), cache, forward, supports=SUPPORTS | {"priority"}))

    async def ask(client, i: int) -> int:
        bad = {"prompt": ""} if i % 5 == 0 else {}
        body = {
            "model": "m",
            "prompt": f"prompt {i}",
            "max_tokens": 3 + i % 7,
            "n": 1 + i % 3,
            "priority": i % 3,
        }
        return (await client.post("/v1/completions", json=body | bad)).status_code

    async def run():
        async with client_of(url) as client:
            leaving = [
                stream(client, f"leaver {i}", leave_after=1, ignore_eos=True, max_tokens=100)
                for i in range(8)
            ]
            answers = await asyncio.gather(
                *[ask(client, i) for i in range(60)], *leaving, return_exceptions=True
            )
            return answers[:60]

    statuses = asyncio.run(run())
    assert statuses[::5] == [400] * 12
    assert {status for i, status in enumerate(statuses) if i % 5} <= {200, 500}
    assert statuses.count(200) > 0
    assert statuses.count(500) > 0
