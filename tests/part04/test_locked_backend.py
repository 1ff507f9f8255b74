"""Part 4's backend: one request at a time behind a lock, and nothing left when it is over."""

import asyncio
import threading
from contextlib import aclosing
from itertools import pairwise

import pytest
import torch

from engine.cache.single import CachedForward
from engine.decoding.params import ParameterError, SamplingParams
from engine.server.app import create_app
from engine.server.backend import LockedBackend
from tests.part04.serving import DEADLINE, http, serve, wait_until

PARAMS = SamplingParams(temperature=0, max_tokens=12)


class Watched:
    """LockedBackend over the trained model, with a note of which request computes when."""

    def __init__(self, model, tokenizer):
        self.turns: list[int] = []  # one entry for each forward pass: whose
        self.before = lambda: None  # called in each, in its thread
        self.model, self.made = model, 0
        self.backend = LockedBackend("stories", tokenizer, model.config, self.make_forward)

    def make_forward(self):
        forward, me = CachedForward(self.model), self.made
        self.made += 1

        def turn(token_ids):
            self.turns.append(me)
            self.before()
            return forward(token_ids)

        return turn


@pytest.fixture
def watched(model, tokenizer):
    watched = Watched(model, tokenizer)
    yield watched
    assert not watched.backend._live
    assert not watched.backend._lock.locked()


async def read(backend, prompt, request_id="0", params=PARAMS, **options):
    """All outputs of one request."""
    async with aclosing(await backend.generate(prompt, params, request_id, **options)) as outputs:
        return [output async for output in outputs]


async def last(*asked, **options):
    return (await read(*asked, **options))[-1]


def test_requests_at_once_are_served_one_after_the_other(watched, alone):
    prompts = ["Once upon a time", "The little dog", "A red ball"]

    async def run():
        return await asyncio.gather(*[last(watched.backend, p, str(i)) for i, p in enumerate(prompts)])

    outputs = asyncio.run(run())
    assert [output.outputs[0].text for output in outputs] == [
        alone(prompt, PARAMS).text for prompt in prompts
    ]
    assert [output.outputs[0].token_ids for output in outputs] == [
        alone(p, PARAMS).token_ids for p in prompts
    ]
    assert watched.turns == sorted(watched.turns), "two requests took turns"
    assert len(watched.turns) == 3 * PARAMS.max_tokens


def test_outputs_grow_and_the_last_one_is_finished(watched):
    async def run():
        seen = []
        async with aclosing(await watched.backend.generate("Once upon a time", PARAMS, "0")) as outputs:
            async for output in outputs:
                seen.append((len(output.outputs[0].token_ids), output.outputs[0].text, output.finished))
        return seen

    seen = asyncio.run(run())
    assert [count for count, *_ in seen] == list(range(1, 13))
    assert all(after.startswith(before) for (_, before, _), (_, after, _) in pairwise(seen))
    assert [finished for *_, finished in seen] == [False] * 11 + [True]


def test_an_output_read_late_is_as_it_was_when_it_came(watched):
    kept = asyncio.run(read(watched.backend, "Once upon a time"))
    assert [len(output.outputs[0].token_ids) for output in kept] == list(range(1, 13))
    assert [output.finished for output in kept] == [False] * 11 + [True]


def test_leaving_early_frees_the_lock_and_computes_no_more(watched, alone):
    async def run():
        async with aclosing(await watched.backend.generate("Once upon a time", PARAMS, "0")) as outputs:
            async for output in outputs:
                if len(output.outputs[0].token_ids) == 3:
                    break
        return await last(watched.backend, "The little dog", "1")

    output = asyncio.run(run())
    assert output.outputs[0].text == alone("The little dog", PARAMS).text
    assert watched.turns.count(0) in (3, 4), "more than the step that was under way"


def test_a_reader_who_does_not_read_keeps_nobody_waiting(watched, alone):
    """It has read one output and stands still. Its answer is made to the end, and the next one is served."""

    async def run():
        async with aclosing(await watched.backend.generate("Once upon a time", PARAMS, "0")) as outputs:
            first = await anext(outputs)
            assert len(first.outputs[0].token_ids) == 1
            async with asyncio.timeout(DEADLINE):
                other = await last(watched.backend, "The little dog", "1")
            return other, [output async for output in outputs]

    other, rest = asyncio.run(run())
    assert other.outputs[0].text == alone("The little dog", PARAMS).text
    assert len(rest) == 1, "it finds the latest output, which has everything"
    assert rest[0].outputs[0].text == alone("Once upon a time", PARAMS).text
    assert rest[0].finished


def test_what_was_admitted_and_never_read_is_given_back_and_computes_nothing(watched):
    async def run():
        outputs = await watched.backend.generate("Once upon a time", PARAMS, "0")
        await asyncio.sleep(0.01)
        await outputs.aclose()
        await outputs.aclose()
        return [output async for output in outputs]

    assert asyncio.run(run()) == []
    assert not watched.turns


def test_one_who_waits_for_the_lock_can_leave(watched):
    async def run():
        first = await watched.backend.generate("Once upon a time", PARAMS, "0")
        await anext(first)
        second = await watched.backend.generate("The little dog", PARAMS, "1")
        waiting = asyncio.create_task(anext(second))
        await asyncio.sleep(0)
        waiting.cancel()
        await second.aclose()
        return [output async for output in first][-1]

    assert asyncio.run(run()).finished
    assert set(watched.turns) == {0}


def test_the_backends_end_is_the_end_of_its_requests(watched):
    async def run():
        async with watched.backend as backend:
            await anext(await backend.generate("Once upon a time", PARAMS, "0"))
        assert not backend._lock.locked()

    asyncio.run(run())
    assert len(watched.turns) < PARAMS.max_tokens


def test_who_waits_for_an_output_when_the_backend_ends_waits_no_longer(watched):
    """Also who waits for the lock. (`go_on` holds up the step under way.)"""
    go_on = threading.Event()
    watched.before = lambda: go_on.wait(DEADLINE / 2)

    async def run():
        async with watched.backend as backend:
            streams = [await backend.generate("Once upon a time", PARAMS, str(i)) for i in range(2)]
            waiting = [asyncio.create_task(anext(stream, "over")) for stream in streams]
            while len(backend._live) < 2 and not any(task.done() for task in waiting):
                await asyncio.sleep(0.001)
        go_on.set()
        async with asyncio.timeout(DEADLINE):
            return await asyncio.gather(*waiting)

    assert asyncio.run(run()) == ["over", "over"]


def test_the_event_loop_does_not_tokenize(watched, monkeypatch):
    """Encoding waits until the event loop has turned: it can only be in another thread."""
    turned = threading.Event()
    encode = watched.backend.tokenizer.encode

    def patient(text, *options):
        assert turned.wait(DEADLINE), "the event loop was blocked by the tokenizer"
        return encode(text, *options)

    monkeypatch.setattr(watched.backend.tokenizer, "encode", patient)

    async def run():
        asyncio.get_running_loop().call_later(0.01, turned.set)
        return await last(watched.backend, "Once")

    assert asyncio.run(run()).finished


def test_a_text_that_cannot_fit_is_refused_without_tokenizing(watched, monkeypatch):
    monkeypatch.setattr(watched.backend.tokenizer, "encode", None)
    with pytest.raises(ParameterError, match=r"prompt has at least \d+ tokens; accepted are 1 to 1023"):
        asyncio.run(watched.backend.generate("word " * 10_000, PARAMS, "0"))


def test_abort_ends_a_request_with_that_reason(watched):
    async def run():
        outputs = await watched.backend.generate("Once upon a time", PARAMS, "0")
        seen = [await anext(outputs)]
        await watched.backend.abort("0")
        seen += [output async for output in outputs]
        await watched.backend.abort("0")  # gone already: nothing happens
        return seen[-1]

    output = asyncio.run(run())
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert len(watched.turns) <= 3


def test_an_error_in_the_model_reaches_the_reader_and_the_next_request_is_served(watched, alone):
    def broken(token_ids):
        raise OSError("out of paper")

    async def run():
        good, watched.backend.make_forward = watched.backend.make_forward, lambda: broken
        with pytest.raises(OSError, match="out of paper"):
            await last(watched.backend, "Once upon a time", "0")
        watched.backend.make_forward = good
        return await last(watched.backend, "Once upon a time", "1")

    assert asyncio.run(run()).outputs[0].text == alone("Once upon a time", PARAMS).text


@pytest.mark.parametrize(
    ("prompt", "params", "options", "field"),
    [
        ("", PARAMS, {}, "prompt"),
        ([10**6], PARAMS, {}, "prompt"),
        ("Once", SamplingParams(temperature=0.5), {}, "temperature"),
        ("Once", SamplingParams(stop_token_ids=(10**6,)), {}, "stop_token_ids"),
        ("Once", PARAMS, {"priority": 2}, "priority"),
        ("Once", PARAMS, {"cache_salt": "me"}, "cache_salt"),
    ],
)
def test_a_refusal_is_raised_by_generate_itself(watched, prompt, params, options, field):
    with pytest.raises(ParameterError) as caught:
        asyncio.run(watched.backend.generate(prompt, params, "0", **options))
    assert caught.value.field == field
    assert not watched.turns


def test_an_option_without_effect_is_accepted(watched):
    asyncio.run(last(watched.backend, "Once", priority=0))
    assert watched.turns


def test_the_event_loop_answers_while_the_model_computes(model, tokenizer):
    """The model's step waits until /health has been answered: only a free event loop gets past that."""
    asked, answered = threading.Event(), threading.Event()

    def forward(token_ids):
        asked.set()
        assert answered.wait(DEADLINE), "the event loop was blocked by the model"
        return torch.zeros(model.config.vocab_size)

    backend = LockedBackend("stories", tokenizer, model.config, lambda: forward)
    body = {"model": "stories", "prompt": "Once", "max_tokens": 1}
    with serve(create_app(backend)) as url, http(url) as client, http(url) as other:
        thread = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body})
        thread.start()
        wait_until(lambda: asked.is_set() or not thread.is_alive())
        assert asked.is_set()
        assert other.get("/health").status_code == 200
        answered.set()
        thread.join()


def test_a_client_that_leaves_lets_the_next_one_in(watched, alone):
    """Its third step takes until the server knows that it has left."""
    go_on = threading.Event()
    watched.before = lambda: watched.turns.count(0) < 3 or go_on.wait(DEADLINE)
    ask = {"model": "stories", "prompt": "Once upon a time", "temperature": 0}
    with serve(create_app(watched.backend)) as url, http(url) as client:
        endless = ask | {"stream": True, "max_tokens": 1000, "ignore_eos": True}
        try:
            with client.stream("POST", "/v1/completions", json=endless) as answer:
                lines = answer.iter_lines()  # kept: the connection closes with the iterator
                first = next(lines)
                assert "error" not in first, first
            wait_until(lambda: not watched.backend._live)
        finally:
            go_on.set()
        answer = client.post("/v1/completions", json=ask | {"max_tokens": 12})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == alone("Once upon a time", PARAMS).text
    assert watched.turns.count(0) <= 3, "more than the step that was under way"
