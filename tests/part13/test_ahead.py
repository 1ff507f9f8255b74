"""One step ahead: the tokens of one step at a time, whatever happens while a step is in flight."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from engine.ahead import AheadEngine, AheadExecutor, AheadForward, LastTokens
from engine.async_engine import AsyncLLMEngine
from engine.cache.paged import PagedCache
from engine.cache.slots import SlotCache
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import NO_TOKEN
from engine.executor import ModelForward, Pending
from engine.listeners import Listeners
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.request import PLACEHOLDER
from engine.scheduling.scheduler import take
from engine.scoring import ScoringExecutor
from tests.part01.reference import random_gpt2, save
from tests.part06.fakes import (
    CONFIG,
    TOKENIZER,
    BlockCache,
    FakeForward,
    Recorder,
    ask,
    assert_idle,
    at_rest,
    told_alone,
)
from tests.part10.test_scoring_executor import assert_right
from tests.part12.pages import TWO_LAYERS, PageReader, WatchedCache, sequence

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MOST_STEPS = 2000  # more than any test here needs


class FakeAhead(AheadForward):
    """The fake model, which finds its tokens as a real one does."""

    def __init__(self, cache, last: LastTokens) -> None:
        super().__init__(nn.Linear(1, 1), cache, last)
        self.fake = PageReader(cache) if isinstance(cache, PagedCache) else FakeForward(cache)
        self.seen: list[dict[str, int]] = []  # by step: the last token that each request came with
        self.broken: dict[str, int] = {}  # request -> the position after which nothing can be chosen

    def hidden(self, batch):
        token_ids = self.inputs(batch)[0].tolist()
        self.seen.append(
            {r.id: token_ids[end - 1] for r, end in zip(batch.requests, batch.query_start[1:], strict=True)}
        )
        logits = self.fake(replace(batch, token_ids=tuple(token_ids)))
        rows = [(r.id, batch.positions[i]) for r, own in zip(batch.requests, batch.logit_rows) for i in own]
        for row, (name, position) in enumerate(rows):
            if self.broken.get(name) == position:
                logits[row] = torch.nan
        return logits

    def logits(self, hidden):
        return hidden


def ahead(cache, seats=5, budget=24, executor_class=AheadExecutor, **options) -> AheadEngine:
    last = LastTokens(seats, CPU)
    executor = executor_class(FakeAhead(cache, last), TOKENIZER, last)
    scheduler = ContinuousScheduler(cache, seats, budget)
    return AheadEngine(TOKENIZER, CONFIG, scheduler, executor, supports=SUPPORTS, **options)


def forward_of(engine: AheadEngine) -> FakeAhead:
    return engine.executor.forward


def steps_of(engine: LLMEngine) -> Iterator[list[RequestOutput]]:
    """What each step gives, until nothing is unfinished."""
    for _ in range(MOST_STEPS):
        if not engine.has_unfinished_requests():
            return
        yield engine.step()
    raise AssertionError("the engine comes to no end")


def run_to_end(engine: LLMEngine) -> dict[str, RequestOutput]:
    """request id -> its last output."""
    return {
        output.request_id: output for outputs in steps_of(engine) for output in outputs if output.finished
    }


def log_of(engine: AheadEngine) -> list[str]:
    """What it does from now on: "launch" for each step that somebody is in, and "land"."""
    log, launch, land = [], engine.launch, engine.land

    def launching():
        flight = launch()
        log.extend(["launch"] if flight else [])
        return flight

    def landing(flight):
        log.append("land")
        return land(flight)

    engine.launch, engine.land = launching, landing
    return log


# 1. The tokens chosen last.


def test_a_placeholder_stands_for_the_row_that_its_request_had_in_the_last_step():
    a, b, c = (sequence(name, [1, 2, 3]) for name in "abc")
    last = LastTokens(4, CPU)
    batch = take([(a, 3), (b, 2), (c, 3)])  # b's prompt is not complete: it has no row
    last.remember(batch, torch.tensor([50, 52]))
    assert last.chosen.tolist()[:2] == [50, 52]
    c.token_ids.append(PLACEHOLDER)
    a.token_ids.append(PLACEHOLDER)
    assert last.sources(take([(c, 1), (b, 1), (a, 1)])) == [1, -1, 0], "by request, not by place"
    new = sequence("d", [7, 8])
    b.token_ids.append(33)
    c.token_ids[-1:] = [52, PLACEHOLDER]
    assert last.sources(take([(new, 2), (c, 1), (b, 1)])) == [-1, -1, 1, -1]


def test_tokens_that_lie_in_their_place_already_are_left_there():
    (a,) = [sequence("a", [1, 2])]
    last = LastTokens(4, CPU)
    last.chosen[0] = 9
    last.remember(take([(a, 2)]), last.chosen[:1])
    a.token_ids.append(PLACEHOLDER)
    assert last.sources(take([(a, 1)])) == [0]
    assert last.chosen[0] == 9


def test_a_forward_pass_gets_the_token_itself_and_token_0_where_there_was_none():
    cache = BlockCache(8, 8)
    last = LastTokens(4, CPU)
    forward = FakeAhead(cache, last)
    a, b, c = (sequence(name, [1, 2]) for name in "abc")
    last.remember(take([(a, 2), (b, 2), (c, 1)]), torch.tensor([50, NO_TOKEN]))
    for request in (a, b):
        request.token_ids.append(PLACEHOLDER)
    token_ids, positions, wanted = forward.inputs(take([(b, 1), (c, 1), (a, 1)]))
    assert token_ids.tolist() == [0, 2, 50]
    assert positions.tolist() == [2, 1, 2]
    assert wanted.tolist() == [0, 1, 2]


# 2. When what happens.


def test_the_next_step_is_launched_before_the_last_one_lands():
    engine = ahead(BlockCache(60, 8))
    log = log_of(engine)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=3))
    assert engine.step() == [], "nothing has landed yet"
    assert log == ["launch"]
    (output,) = engine.step()
    assert log == ["launch", "launch", "land"]
    assert len(output.outputs[0].token_ids) == 1
    run_to_end(engine)
    assert log == ["launch", "launch", "land", "launch", "land", "land"]


def test_rows_inside_a_prompt_give_no_token():
    engine = ahead(BlockCache(60, 8), seats=4, budget=4)
    engine.add_request("a", "hello, you", replace(GREEDY, max_tokens=3, prompt_logprobs=0))
    engine.step()
    (request,) = engine.scheduler.running
    rule = "a chunk inside a prompt wants rows for their scores, and chooses no token: none is expected"
    assert PLACEHOLDER not in request.token_ids, rule
    (output,) = run_to_end(engine).values()
    assert output.outputs[0].token_ids == told_alone("hello, you", replace(GREEDY, max_tokens=3)).token_ids


def test_an_end_by_length_wastes_no_step_and_one_by_a_stop_wastes_one():
    for params, wasted in ((GREEDY, 0), (replace(GREEDY, max_tokens=50, stop=("z", "y", "x", "a", "e")), 1)):
        engine = ahead(BlockCache(60, 8))
        engine.add_request("a", "hello", params)
        (output,) = run_to_end(engine).values()
        assert output.outputs[0].token_ids == told_alone("hello", params).token_ids
        assert len(output.outputs[0].token_ids) > 1
        assert output.outputs[0].finish_reason == ("stop" if wasted else "length")
        assert forward_of(engine).fake.steps == len(output.outputs[0].token_ids) + wasted


def test_whoever_has_penalties_waits_for_the_last_token():
    """They count the output so far, on the host."""
    for adjusted in ({"repetition_penalty": 1.5}, {"min_tokens": 2}, {"logit_bias": {65: 3.0}}):
        engine = ahead(BlockCache(60, 8))
        log = log_of(engine)
        engine.add_request("a", "hello", replace(GREEDY, max_tokens=4, **adjusted))
        run_to_end(engine)
        assert log == ["launch", "land"] * 4


def test_there_is_something_unfinished_until_the_last_flight_has_landed():
    engine = ahead(BlockCache(60, 8))
    params = replace(GREEDY, max_tokens=50, stop=("z", "y", "x", "a", "e"))
    engine.add_request("a", "hello", params)
    next(outputs for outputs in steps_of(engine) if any(output.finished for output in outputs))
    assert engine.unfinished_request_ids() == []
    assert engine.has_unfinished_requests(), "a step was launched for it, and has not landed"
    assert engine.step() == [], "nobody hears of a token after the end"
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert_idle(engine)


def test_an_aborted_requests_flight_lands_for_nobody():
    engine = ahead(BlockCache(60, 8))
    engine.add_request("a", "hello", GREEDY)
    engine.add_request("b", "world", GREEDY)
    engine.step(), engine.step()
    assert engine.abort_request("a").outputs[0].finish_reason == "abort"
    assert [output.request_id for output in engine.step()] == ["b"]
    engine.add_request("a", "again", GREEDY)  # the name is free, and its old flight is nobody's
    done = run_to_end(engine)
    for name, prompt in {"a": "again", "b": "world"}.items():
        assert done[name].outputs[0].token_ids == told_alone(prompt, GREEDY).token_ids
    assert_idle(engine)


def test_a_request_that_can_never_run_fails_as_ever():
    cache = BlockCache(30, 8)
    engine = ahead(cache)
    cache.begin = lambda seq: None
    engine.add_request("a", "hello", GREEDY)
    done = run_to_end(engine)
    assert "no room" in done["a"].error
    assert_idle(engine)


class CountingExecutor(AheadExecutor):
    """Counts how often each step's result is asked for."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.asked: list[int] = []

    def submit(self, batch):
        pending, number = super().submit(batch), len(self.asked)
        self.asked.append(0)

        def result():
            self.asked[number] += 1
            return type(pending).result(pending)

        object.__setattr__(pending, "result", result)
        return pending


def test_a_steps_result_is_asked_for_once():
    engine = ahead(BlockCache(60, 8), executor_class=CountingExecutor)
    for number in range(6):
        engine.add_request(str(number), "hello", mixed(number))
    run_to_end(engine)
    rule = "`land` alone asks: with log probabilities, a result is a good deal of work for the host"
    assert set(engine.executor.asked) == {1}, rule


# 3. What goes wrong.


@pytest.mark.parametrize("position", [4, 7])
def test_a_row_without_a_token_fails_alone_and_reads_token_0_meanwhile(position):
    """Its next step is under way when it is found out."""
    engine = ahead(BlockCache(60, 8))
    forward_of(engine).broken = {"b/0": position}
    for name, prompt in {"a": "hello", "b": "world", "c": "there"}.items():
        engine.add_request(name, prompt, GREEDY)
    done = run_to_end(engine)
    assert done["b"].error == "ArithmeticError: the model's logits are not finite numbers"
    assert done["b"].outputs[0].token_ids == told_alone("world", GREEDY).token_ids[: position - 4]
    assert [seen["b/0"] for seen in forward_of(engine).seen if "b/0" in seen][-1] == 0
    for name, prompt in {"a": "hello", "c": "there"}.items():
        assert done[name].error is None
        assert done[name].outputs[0].token_ids == told_alone(prompt, GREEDY).token_ids
    assert_idle(engine)


@dataclass(frozen=True)
class Lost(Pending):
    """A step that went wrong on the device: it is found out when it lands."""

    def result(self):
        raise RuntimeError("lost")


class LosingExecutor(AheadExecutor):
    lose: frozenset[int] = frozenset()
    submitted = 0

    def submit(self, batch):
        pending = super().submit(batch)
        self.submitted += 1
        if self.submitted in self.lose:
            self.last.chosen.fill_(65)  # what is left there is worth nothing
            return Lost(batch, pending.token_ids)
        return pending


FAILING = frozenset({1, 4, 5, 9, 14})


@pytest.mark.parametrize("when", ["launched", "landed"])
def test_a_step_that_fails_with_another_in_flight_costs_no_token(when):
    engine = ahead(BlockCache(60, 8), executor_class=LosingExecutor, recover=lambda batch, error: [])
    if when == "launched":
        forward_of(engine).fake.fail_at = {step: RuntimeError("again") for step in FAILING}
    else:
        engine.executor.lose = FAILING
    prompts = {str(i): "the same beginning " + "abc"[i % 3] * 9 for i in range(9)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, mixed(int(name)))
    done = run_to_end(engine)
    for name, prompt in prompts.items():
        assert_told(done[name], prompt, mixed(int(name)))
    assert_idle(engine)


@pytest.mark.parametrize("when", ["launched", "landed"])
def test_whoever_was_in_the_failed_step_fails_and_nobody_else(when):
    engine = ahead(BlockCache(60, 8), seats=2, executor_class=LosingExecutor)
    if when == "launched":
        forward_of(engine).fake.fail_at = {5: RuntimeError("lost")}
    else:
        engine.executor.lose = {5}
    for name in "abcd":
        engine.add_request(name, f"prompt {name}", GREEDY)
    done = run_to_end(engine)
    assert [name for name in "abcd" if done[name].error] == ["a", "b"]
    assert done["a"].error == "RuntimeError: lost"
    assert done["a"].outputs[0].token_ids == told_alone("prompt a", GREEDY).token_ids[:4]
    for name in "cd":
        assert done[name].outputs[0].token_ids == told_alone(f"prompt {name}", GREEDY).token_ids
    assert_idle(engine)


# 4. Everything at once.


def mixed(i: int) -> SamplingParams:
    """Greedy, sampled, with penalties, stop strings, several samples, log probabilities."""
    kind = [
        {"temperature": 0},
        {"temperature": 0.9},
        {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "min_tokens": 3},
        {"temperature": 1.0, "stop": ("a", "e", "zz")},
        {"temperature": 0.8, "n": 2},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.7, "logprobs": 3, "top_k": 9},
    ][i % 7]
    return SamplingParams(seed=i, max_tokens=4 + i % 17, **kind)


def assert_told(output, prompt: str, params: SamplingParams) -> None:
    """What the fake model says to this prompt alone, and its scores, if asked for."""
    assert output.error is None
    quiet = replace(params, logprobs=None, prompt_logprobs=None)
    for index, sample in enumerate(output.outputs):
        want = told_alone(prompt, quiet, index)
        assert sample.token_ids == want.token_ids
        assert (sample.text, sample.finish_reason) == (want.text, want.finish_reason)
    if params.prompt_logprobs is not None:
        assert_right(output, params)


CACHES = {
    "slots": lambda blocks: BlockCache(blocks, 8),
    "recompute": lambda blocks: WatchedCache(TWO_LAYERS, blocks, 8, preemption_mode="recompute"),
    "swap": lambda blocks: WatchedCache(TWO_LAYERS, blocks, 8, num_swap_blocks=40, preemption_mode="swap"),
}


@pytest.mark.parametrize("blocks", [26, 90], ids=["small", "large"])
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("seed", range(2))
def test_everybody_gets_the_tokens_of_one_step_at_a_time(name, blocks, seed):
    """Newcomers and aborts while steps are in flight, prompts in chunks, and in the small memory
    preemptions.
    """
    rng = random.Random(seed)
    recorder = Recorder()
    cache = CACHES[name](blocks)
    engine = ahead(cache, seats=8, budget=32, listeners=Listeners([recorder]))
    same = "the same beginning "
    prompts = {str(i): same * (i % 3) + "abcdefgh"[i % 8] * rng.randint(1, 60) for i in range(28)}
    waiting, done, aborted = list(prompts), {}, set()
    for _ in range(MOST_STEPS):
        for request in waiting[: rng.choice([0, 1, 4])]:
            engine.add_request(request, prompts[request], mixed(int(request)))
            waiting.remove(request)
        if rng.random() < 0.03 and engine.abort_request(request := rng.choice(list(prompts))):
            aborted.add(request)
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if not waiting and not engine.has_unfinished_requests():
            break
    assert set(done) | aborted == set(prompts)
    assert aborted
    for request, output in done.items():
        assert_told(output, prompts[request], mixed(int(request)))
    preempted = sum(event == "preempt" for event, _ in recorder.heard)
    assert (preempted > 0) == (blocks == 26)
    assert name == "slots" or cache.hit_tokens > 0
    assert name != "swap" or (cache.num_swapped > 0) == (blocks == 26)
    assert_idle(engine)


def test_many_users_at_once_through_the_engines_thread():
    engine = ahead(BlockCache(60, 8))
    prompts = {str(i): f"prompt {i}" for i in range(21)}

    async def leave_early():
        stream = await running.generate("hello", GREEDY, "left")
        await anext(stream)
        await stream.aclose()

    async def run():
        asked = [ask(running, prompt, mixed(int(name)), name) for name, prompt in prompts.items()]
        return (await asyncio.gather(*asked, leave_early()))[:-1]

    with at_rest(AsyncLLMEngine(engine, "fake")) as running:
        running.start()
        told = asyncio.run(run())
    for (name, prompt), outputs in zip(prompts.items(), told, strict=True):
        assert_told(outputs[-1], prompt, mixed(int(name)))


# 5. A real model.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    theirs = random_gpt2(vocab_size=CONFIG.vocab_size, n_positions=128, tie_word_embeddings=False)
    return load_model(save(theirs, tmp_path_factory.mktemp("gpt2")))


def real_cache(model, name: str):
    if name == "slots":
        return SlotCache(model.config, 3)
    return PagedCache(model.config, 26, 8, num_swap_blocks=30, preemption_mode="swap")


@pytest.mark.parametrize("name", ["slots", "paged"])
def test_a_models_tokens_and_scores_are_those_of_one_step_at_a_time(model, name):
    prompts = {str(i): "the same beginning " * (i % 3) + "abcdefgh"[i % 8] * (3 * i) for i in range(1, 15)}

    def told(engine) -> dict:
        for request, prompt in prompts.items():
            engine.add_request(request, prompt, mixed(int(request)))
        done = run_to_end(engine)
        assert_idle(engine)
        return done

    def options(cache, executor):
        return TOKENIZER, model.config, ContinuousScheduler(cache, 6, 20), executor

    cache = real_cache(model, name)
    want = told(
        LLMEngine(*options(cache, ScoringExecutor(ModelForward(model, cache), TOKENIZER)), supports=SUPPORTS)
    )
    cache = real_cache(model, name)
    last = LastTokens(6, CPU)
    executor = AheadExecutor(AheadForward(model, cache, last), TOKENIZER, last)
    got = told(AheadEngine(*options(cache, executor), supports=SUPPORTS))
    for request, output in want.items():
        assert output.error is None
        for mine, theirs in zip(got[request].outputs, output.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert (mine.text, mine.finish_reason) == (theirs.text, theirs.finish_reason)
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            for a, b in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
                assert list(a) == list(b)
                assert [a[id].logprob for id in a] == pytest.approx([b[id].logprob for id in b], abs=1e-3)
        assert (got[request].prompt_logprobs is None) == (output.prompt_logprobs is None)
        for a, b in zip(got[request].prompt_logprobs or [], output.prompt_logprobs or [], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert [a[id].logprob for id in a] == pytest.approx([b[id].logprob for id in b], abs=1e-3)
