"""One step ahead, everything at once: many requests of all kinds, the engine's thread, a real model."""

import asyncio
import random

import pytest

from engine.cache.memory import PageMemory
from engine.cache.slots import SlotMemory
from engine.core.ahead import AheadEngine
from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.scores import logprobs_of
from engine.models.loader import load_model
from engine.requests.listeners import Listeners
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scored_rows import scored_rows
from tests.part01.reference import random_gpt2, save
from tests.part06.fakes import (
    CONFIG,
    TOKENIZER,
    BlockCache,
    Recorder,
    ask,
    assert_idle,
    at_rest,
)
from tests.part12.pages import TWO_LAYERS, WatchedCache
from tests.part13.aheads import CPU, GREEDY, MOST_STEPS, ahead, assert_told, mixed, run_to_end

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
        for request in waiting[: rng.choice([0, 2, 8])]:
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

    with at_rest(EngineThread(engine, "fake")) as running:
        running.start()
        told = asyncio.run(run())
    for (name, prompt), outputs in zip(prompts.items(), told, strict=True):
        assert_told(outputs[-1], prompt, mixed(int(name)))


# A real model.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    theirs = random_gpt2(vocab_size=CONFIG.vocab_size, n_positions=128, tie_word_embeddings=False)
    return load_model(save(theirs, tmp_path_factory.mktemp("gpt2")))


def memory_and_plan(model, name: str):
    if name == "slots":
        memory = SlotMemory(model.config, 3)
        return memory, memory.plan()
    memory = PageMemory(model.config, 26, 8, num_swap_blocks=30)
    return memory, memory.plan(preemption_mode="swap")


@pytest.mark.parametrize("name", ["slots", "paged"])
def test_a_models_tokens_and_scores_are_those_of_one_step_at_a_time(model, name):
    prompts = {str(i): "the same beginning " * (i % 3) + "abcdefgh"[i % 8] * (3 * i) for i in range(1, 15)}

    def told(engine) -> dict:
        for request, prompt in prompts.items():
            engine.add_request(request, prompt, mixed(int(request)))
        done = run_to_end(engine)
        assert_idle(engine)
        return done

    def engine(kind, last: LastTokens | None):
        memory, cache = memory_and_plan(model, name)
        way = EagerWay(model, memory, upload=last.upload) if last else EagerWay(model, memory)
        runner = ModelRunner([way], memory, scores=logprobs_of(TOKENIZER, model.logits), last_tokens=last)
        scheduler = ContinuousScheduler(cache, 6, 20, select_rows=scored_rows)
        return kind(TOKENIZER, model.config, scheduler, runner, supports=SUPPORTS)

    want = told(engine(LLMEngine, None))
    got = told(engine(AheadEngine, LastTokens(6, CPU)))
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
