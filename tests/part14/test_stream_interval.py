"""`stream_interval`: a reader gets the first token at once, and then several at a time."""

import asyncio
import json
from contextlib import aclosing
from itertools import pairwise

from engine.client.sse import events, lines
from engine.decoding.params import SamplingParams
from tests.part04.serving import http
from tests.part06.fakes import ask, told_alone, until

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ALONE = told_alone("hello", GREEDY)


async def told(outputs, gate, steps: int) -> list[int]:
    """How many tokens each sample has in the next output, when the engine may make so many steps more."""
    gate.allow(steps)
    return [len(sample.token_ids) for sample in (await anext(outputs)).outputs]


def test_the_first_token_comes_at_once_and_then_so_many_at_a_time(engine, gate):
    engine.stream_interval = 4

    async def run():
        outputs = await engine.generate("hello", GREEDY, "a")
        assert await told(outputs, gate, 1) == [1], "nobody waits longer for the first word"
        assert await told(outputs, gate, 4) == [5], "then four tokens come in one output"
        assert await told(outputs, gate, 4) == [9]
        gate.open()
        return [output async for output in outputs]

    last = asyncio.run(run())[-1]
    assert (last.finished, last.outputs[0].token_ids) == (True, ALONE.token_ids), "nothing is lost by it"
    assert last.outputs[0].text == ALONE.text


def test_the_end_is_told_at_once_although_fewer_have_come(engine, gate):
    engine.stream_interval = 100

    async def run():
        outputs = await engine.generate("hello", GREEDY, "a")
        assert await told(outputs, gate, 1) == [1]
        assert await told(outputs, gate, 19) == [20], "the last output waits for no further token"

    asyncio.run(run())


def test_who_is_aborted_is_told_all_that_was_computed(engine, gate):
    engine.stream_interval = 100

    async def run():
        async with aclosing(await engine.generate("hello", GREEDY, "a")) as outputs:
            assert await told(outputs, gate, 1) == [1]
            gate.allow(2)
            await until(lambda: gate.entered == 4)  # three steps are over, and the fourth waits
            await engine.abort("a")
            gate.allow(1)
            return await anext(outputs)

    last = asyncio.run(run())
    assert last.outputs[0].finish_reason == "abort"
    assert len(last.outputs[0].token_ids) == 4, "an abort gives out what was held back"


def test_of_several_samples_the_mean_counts(engine, gate):
    engine.stream_interval = 4
    both = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, n=2)

    async def run():
        gate.open()
        return await ask(engine, "hello", both, "a")

    outputs = asyncio.run(run())
    counts = [sum(len(sample.token_ids) for sample in output.outputs) for output in outputs]
    steps = [after - before for before, after in pairwise(counts[:-1])]
    assert all(new >= 8 for new in steps), "two samples, four tokens of each in the mean"
    assert [sample.token_ids for sample in outputs[-1].outputs] == [ALONE.token_ids] * 2


def test_over_http_a_stream_of_twenty_tokens_takes_three_events(serving):
    url = serving()
    serving.backend.stream_interval = 10
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    body |= {"max_tokens": 20, "ignore_eos": True}
    with http(url) as client:
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        stream = client.post("/v1/chat/completions", json=body | {"stream": True}).content
    chunks = [json.loads(data) for data in events(lines([stream])) if data != "[DONE]"]
    said = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(said) == whole
    assert said[0] == "", "who speaks is told before anything is computed"
    assert len(said[1:]) <= 3, "one token, ten, and the last nine; fewer if the reader was late"
