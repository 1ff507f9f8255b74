"""Seams that later parts use, each held open by a small fake of the part, until the part itself lands.

parts/SEAMS.md says which seam is whose.
"""

import asyncio
import random
from dataclasses import replace

import pytest

from engine.async_engine import AsyncLLMEngine
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.sampling import SUPPORTS
from engine.executor import Executor, Pending
from engine.llm_engine import Flight, LLMEngine
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.request import PLACEHOLDER, State
from tests.part06.fakes import (
    CONFIG,
    TOKENIZER,
    BlockCache,
    FakeForward,
    assert_idle,
    read,
    told_alone,
)


class OneAhead(LLMEngine):
    """A fake of Part 13's engine: the next step is launched before the last one's tokens are read. Overrides
    `step` alone.
    """

    flight: Flight | None = None
    most_in_flight = 0

    def step(self):
        ahead = self.launch()
        if ahead:
            for request, rows in zip(ahead.batch.requests, ahead.batch.logit_rows, strict=True):
                if rows:
                    request.expect()
        landing, self.flight = self.flight, ahead
        if landing is None:
            return [] if ahead else self._stuck()
        self.most_in_flight = max(self.most_in_flight, 1 + bool(ahead))
        try:
            landing.pending.result()
        except Exception:
            # What was launched on top of a failed step is worth nothing: taken back first, newest first.
            if ahead:
                self.flight = None
                self.scheduler.rollback(ahead.batch)
        return self.land(landing)


class LateReading(Executor):
    """A device that has chosen the tokens long before anybody reads them: PLACEHOLDER means the row's own
    last choice, which is here and not yet on the host.
    """

    def __init__(self, forward, **options):
        super().__init__(self._with_last_tokens(forward), **options)
        self.last: dict[str, int] = {}

    def _with_last_tokens(self, forward):
        def run(batch):
            token_ids = list(batch.token_ids)
            for s, request in enumerate(batch.requests):
                for i in range(*batch.query_start[s : s + 2]):
                    if token_ids[i] == PLACEHOLDER:
                        token_ids[i] = self.last[request.id]
            return forward(replace(batch, token_ids=tuple(token_ids)))

        return run

    def submit(self, batch) -> Pending:
        pending = super().submit(batch)
        chosen = iter(pending.token_ids.tolist())
        for request, rows in zip(batch.requests, batch.logit_rows, strict=True):
            for _ in rows:
                self.last[request.id] = next(chosen)
        return pending


class Sharing(BlockCache):
    """A fake of Part 12's prefix cache: what was committed may be found by whoever begins with it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.shared: dict[tuple[int, ...], bool] = {}
        self.hits = 0

    def begin(self, seq):
        if super().begin(seq) is None:
            return None
        known = (
            seq.token_ids
            if PLACEHOLDER not in seq.token_ids
            else seq.token_ids[: seq.token_ids.index(PLACEHOLDER)]
        )
        length = next((n for n in range(len(known) - 1, 0, -1) if tuple(known[:n]) in self.shared), 0)
        if not self.reserve(seq, length):
            self.release(seq)
            return None
        self.tokens[seq.id] = list(known[:length])
        self.hits += length
        return length

    def commit(self, seq, total):
        super().commit(seq, total)
        self.shared[tuple(seq.token_ids[:total])] = True


def pipelined(cache, forward, seats=5, budget=24, **options) -> OneAhead:
    scheduler = ContinuousScheduler(cache, seats, budget)
    return OneAhead(TOKENIZER, CONFIG, scheduler, LateReading(forward), **options)


def params(seed: int) -> SamplingParams:
    """Greedy and seeded, ending by length, by the end of sequence, and by stop strings."""
    return SamplingParams(
        temperature=0 if seed % 2 else 0.9, seed=seed, max_tokens=5 + seed % 17, min_tokens=seed % 4,
        stop=("a",) if seed % 5 == 0 else (),
    )  # fmt: skip


@pytest.mark.parametrize("blocks", [26, 60])
@pytest.mark.parametrize("cache_class", [BlockCache, Sharing])
@pytest.mark.parametrize("seed", range(3))
def test_one_step_ahead_gives_the_tokens_of_one_step_at_a_time(blocks, cache_class, seed):
    """Joins, chunks, aborts in flight, and in the small memory preemptions."""
    rng = random.Random(seed)
    cache = cache_class(blocks, 8)
    engine = pipelined(cache, FakeForward(cache))
    prompts = {str(i): "abcdefgh"[i % 8] * rng.randint(1, 60) for i in range(20)}
    waiting, done, aborted = list(prompts), {}, set()
    while waiting or engine.has_unfinished_requests() or engine.flight:
        for name in waiting[: rng.choice([0, 1, 4])]:
            engine.add_request(name, prompts[name], params(int(name)))
            waiting.remove(name)
        if rng.random() < 0.03 and engine.abort_request(name := rng.choice(list(prompts))):
            aborted.add(name)
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert set(done) | aborted == set(prompts)
    for name, output in done.items():
        assert output.outputs[0].token_ids == told_alone(prompts[name], params(int(name))).token_ids
    assert engine.most_in_flight == 2
    assert_idle(engine)


def test_a_request_that_ends_by_length_is_never_computed_beyond_it():
    """Its end is foreseen, so nothing is wasted on it; one that ends by a stop token wastes one token."""
    cache = BlockCache(60, 8)
    forward = FakeForward(cache)
    engine = pipelined(cache, forward)
    engine.add_request("a", "hello", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    while engine.has_unfinished_requests() or engine.flight:
        engine.step()
    assert forward.steps == 6


def test_a_step_that_fails_with_another_in_flight_poisons_no_prefix_cache_and_costs_no_token():
    cache = Sharing(60, 8)
    forward = FakeForward(cache)
    forward.fail_at = {step: RuntimeError("again") for step in (1, 4, 5, 9, 14)}
    engine = pipelined(cache, forward, recover=lambda batch, error: [])
    prompts = {str(i): "the same beginning " + "abc"[i % 3] * 9 for i in range(9)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params(int(name)))
    done = {}
    while engine.has_unfinished_requests() or engine.flight:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    for name, prompt in prompts.items():
        assert done[name].outputs[0].token_ids == told_alone(prompt, params(int(name))).token_ids
    assert cache.hits > 0
    assert all(PLACEHOLDER not in prefix for prefix in cache.shared)


def test_an_adapter_that_is_not_loaded_is_refused_at_the_door():
    """Part 18's set of adapters changes while the engine runs."""
    loaded = {"poetry"}
    cache = BlockCache(60, 8)
    engine = LLMEngine(
        TOKENIZER, CONFIG, ContinuousScheduler(cache, 3, 64), Executor(FakeForward(cache)),
        supports=SUPPORTS | {"adapter"}, adapters=loaded,
    )  # fmt: skip
    engine.make_requests("a", "hello", adapter="poetry")
    with pytest.raises(ParameterError, match="business"):
        engine.make_requests("a", "hello", adapter="business")
    loaded.add("business")
    assert engine.make_requests("a", "hello", adapter="business")[0].adapter == "business"
    plain = LLMEngine(TOKENIZER, CONFIG, ContinuousScheduler(cache, 3, 64), Executor(FakeForward(cache)))
    with pytest.raises(ParameterError, match="not supported"):
        plain.make_requests("a", "hello", adapter="poetry")


class Admission:
    """A fake of Part 15: so many requests at once, counted from `generate` until their stream is closed."""

    def __init__(self, backend, places: int):
        self.backend, self.places = backend, places

    async def generate(self, *asked, **options):
        if not self.places:
            raise ParameterError("request", "too many requests")
        stream = await self.backend.generate(*asked, **options)
        self.places -= 1
        return self.Admitted(self, stream)

    class Admitted:
        def __init__(self, admission, stream):
            self.admission, self.stream, self.closed = admission, stream, False

        def __aiter__(self):
            return self

        async def __anext__(self):
            return await anext(self.stream)

        async def aclose(self):
            if not self.closed:
                self.closed = True
                self.admission.places += 1
                await self.stream.aclose()


def test_a_place_taken_by_a_request_that_was_never_read_comes_back():
    cache = BlockCache(60, 8)
    engine = LLMEngine(TOKENIZER, CONFIG, ContinuousScheduler(cache, 3, 64), Executor(FakeForward(cache)))

    async def run():
        async with AsyncLLMEngine(engine, "fake") as running:
            backend = Admission(running, places=2)
            streams = [await backend.generate("hello", params(1), name) for name in "ab"]
            with pytest.raises(ParameterError, match="too many"):
                await backend.generate("hello", params(1), "c")
            for stream in streams:
                await stream.aclose()
            assert backend.places == 2
            stream = await backend.generate("hello", params(1), "d")
            assert (await read(stream))[-1].finished

    asyncio.run(run())


def test_finishing_twice_and_withdrawing_nothing_change_nothing():
    cache = BlockCache(60, 8)
    engine = LLMEngine(TOKENIZER, CONFIG, ContinuousScheduler(cache, 3, 64), Executor(FakeForward(cache)))
    (request,) = engine.make_requests("a", "hello", params(1))
    before = list(request.token_ids)
    request.withdraw()
    assert request.token_ids == before
    request.expect(), request.expect()
    assert request.token_ids == [*before, PLACEHOLDER, PLACEHOLDER]
    request.confirm(65, 0.0)
    assert request.token_ids == [*before, 65, PLACEHOLDER]
    request.withdraw()
    assert request.token_ids == [*before, 65]
    assert request.state is State.WAITING
    assert request.output.token_ids == [65]
