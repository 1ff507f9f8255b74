"""The engine over pages: the tokens of slots, whatever is shared, preempted, swapped or cut into chunks."""

import random
from itertools import product

import pytest

from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.requests.listeners import Listeners
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.static import StaticScheduler
from tests.part06.fakes import CONFIG, Recorder, assert_idle, run_to_end, told_alone
from tests.part12.pages import TWO_LAYERS, WatchedCache, fake_engine, reader_of

PROMPTS = [
    "Once upon a time, in a small house near the forest, there lived a",
    "Once upon a time, in a small house near the forest, there was",
    "The",
    "It rained. " * 12,
    "It rained. " * 9 + "Tom",
    "🦊",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def by_slots(model, tokenizer):
    """Each prompt's tokens, from slots with nothing chunked and nobody preempted."""
    memory = SlotMemory(model.config, 6)
    scheduler, runner = (
        ContinuousScheduler(memory.plan(), 6, 1000),
        ModelRunner([EagerWay(model, memory)], memory),
    )
    engine = LLMEngine(tokenizer, model.config, scheduler, runner)
    for prompt in PROMPTS:
        engine.add_request(prompt, prompt, GREEDY)
    return {name: output.outputs[0].token_ids for name, output in run_to_end(engine).items()}


@pytest.mark.parametrize(
    ("budget", "prefix_caching", "mode", "num_blocks"),
    [
        (budget, prefix_caching, mode, num_blocks)
        for budget, prefix_caching, (mode, num_blocks) in product(
            [1000, 17], [True, False], [(None, 80), ("recompute", 13), ("swap", 13)]
        )
    ],
)
def test_pages_give_the_tokens_that_slots_give(
    model, tokenizer, by_slots, budget, prefix_caching, mode, num_blocks
):
    """With memory for all, and with memory for two or three: recomputed or swapped, in chunks or not."""
    cache = WatchedCache(
        model.config,
        num_blocks,
        16,
        enable_prefix_caching=prefix_caching,
        num_swap_blocks=40,
        preemption_mode=mode,
    )
    recorder = Recorder()
    runner = ModelRunner([EagerWay(model, cache.memory)], cache.memory, before=[cache.check])
    engine = LLMEngine(
        tokenizer, model.config, ContinuousScheduler(cache, 6, budget), runner,
        Listeners([recorder]), max_model_len=200,
    )  # fmt: skip
    for prompt in PROMPTS:
        engine.add_request(prompt, prompt, GREEDY)
    done = run_to_end(engine)
    for prompt in PROMPTS:
        assert done[prompt].outputs[0].token_ids == by_slots[prompt], "pages give the tokens that slots give"
    preemptions = [kind for kind, _ in recorder.heard].count("preempt")
    assert (preemptions > 0) == (num_blocks < 80)
    assert (cache.num_swapped > 0) == (mode == "swap" and preemptions > 0)
    assert_idle(engine)


def params(seed: int) -> SamplingParams:
    """Every other request greedy, the others sampled, each in its own way."""
    return SamplingParams(
        temperature=0 if seed % 2 else 0.9, seed=seed, max_tokens=5 + seed % 17, min_tokens=seed % 4,
        frequency_penalty=0.5 if seed % 3 else 0, stop=("a",) if seed % 5 == 0 else (),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [26, 40, 100])
@pytest.mark.parametrize("seed", range(2))
def test_joins_aborts_and_preemptions_change_nobodys_tokens(num_blocks, mode, seed):
    rng = random.Random(seed)
    cache = WatchedCache(TWO_LAYERS, num_blocks, 8, num_swap_blocks=30, preemption_mode=mode)
    engine = fake_engine(cache, 8, 48)
    prompts = {str(i): "abcdefgh"[i % 3] * rng.randint(1, 90) for i in range(24)}
    waiting, done, aborted = list(prompts), {}, set()
    while waiting or engine.has_unfinished_requests():
        for name in waiting[: rng.choice([0, 0, 1, 5])]:
            engine.add_request(name, prompts[name], params(int(name)))
            waiting.remove(name)
        if rng.random() < 0.02 and engine.abort_request(name := rng.choice(list(prompts))):
            aborted.add(name)
        done |= {output.request_id: output for output in engine.step() if output.finished}
        cache.invariants.check()
    assert set(done) | aborted == set(prompts)
    for name, output in done.items():
        expected = told_alone(prompts[name], params(int(name))).token_ids
        assert output.outputs[0].token_ids == expected, "a request says what it says alone"
    assert cache.hit_tokens > 0
    assert_idle(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_share_their_prompt_and_each_says_what_it_says_alone(prefix_caching):
    cache = WatchedCache(TWO_LAYERS, 100, 8, enable_prefix_caching=prefix_caching)
    engine = fake_engine(cache, 8, 64)
    prompt = "a prompt of thirty-seven tokens, so.."
    asked = SamplingParams(n=6, seed=3, max_tokens=15)
    engine.add_request("a", prompt, asked)
    most = 0
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        most = max(most, cache.usage().tokens_held)
    for i, sample in enumerate(done["a"].outputs):
        assert sample.token_ids == told_alone(prompt, asked, i).token_ids
    assert reader_of(engine).computed <= 37 + 5 + 6 * 15, "the prompt was computed more than once"
    assert most <= 32 + 6 * 24, "the prompt's four full blocks were held more than once"
    assert_idle(engine)


def test_a_prompt_seen_before_is_told_to_the_user():
    cache = WatchedCache(TWO_LAYERS, 100, 8)
    engine = fake_engine(cache)
    found = []
    for name in "ab":
        engine.add_request(name, "the same long prompt", SamplingParams(temperature=0, max_tokens=3))
        found.append(run_to_end(engine)[name].num_cached_tokens)
    assert found == [0, 16], "num_cached_tokens: what the cache had when the request began"


def test_what_was_cached_at_the_start_is_not_forgotten_by_a_preemption():
    cache = WatchedCache(TWO_LAYERS, 100, 8, num_swap_blocks=9, preemption_mode="swap")
    engine = fake_engine(cache)
    engine.add_request(
        "a", "the same long prompt", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    )
    for _ in range(4):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    assert run_to_end(engine)["a"].num_cached_tokens == 0, "its own tokens, swapped back in, are no hit"


def test_a_request_that_failed_leaves_nothing_that_others_find():
    cache = WatchedCache(TWO_LAYERS, 100, 8)
    engine = fake_engine(cache)
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request("a", "a long prompt that fails", asked)
    engine.step()
    reader_of(engine).fail_next = RuntimeError("no")
    (output,) = engine.step()
    assert output.error
    engine.add_request("b", "a long prompt that fails", asked)
    assert run_to_end(engine)["b"].num_cached_tokens == 0
    assert_idle(engine)


@pytest.mark.parametrize(
    "make", [FIFOScheduler, lambda cache: StaticScheduler(cache, 3)], ids=["fifo", "static"]
)
def test_other_schedulers_run_on_pages_too(make):
    cache = WatchedCache(TWO_LAYERS, 100, 8)
    engine = fake_engine(cache)
    engine.scheduler = make(cache)
    for i in range(5):
        engine.add_request(str(i), "the same long prompt" + "x" * i, params(i))
    done = run_to_end(engine)
    for i in range(5):
        expected = told_alone("the same long prompt" + "x" * i, params(i)).token_ids
        assert done[str(i)].outputs[0].token_ids == expected
    assert cache.hit_tokens > 0
    assert_idle(engine)


def test_a_static_batch_that_pages_do_not_suffice_for_ends_nevertheless():
    """Two stories fit at their beginning, and one at its end: 38 of 50 steps raised a MemoryError."""
    cache = WatchedCache(TWO_LAYERS, 8, 4)
    engine = fake_engine(cache)
    engine.scheduler = StaticScheduler(cache, 4)
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for name in "ab":
        engine.add_request(name, f"story {name}", asked)
    done = run_to_end(engine)
    assert "no room for the" in done["a"].error
    assert done["b"].outputs[0].token_ids == told_alone("story b", asked).token_ids
    assert_idle(engine)


def test_twenty_requests_run_in_the_memory_of_five():
    """As contiguous slots, each as long as the model sees, it would hold five."""
    cache = WatchedCache(TWO_LAYERS, 5 * CONFIG.max_positions // 8, 8)
    engine = fake_engine(cache, 20, 64)
    for i in range(20):
        engine.add_request(
            str(i), f"{i} is my number", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        )
    most = 0
    while engine.has_unfinished_requests():
        assert all(output.error is None for output in engine.step())
        most = max(most, len(engine.scheduler.running))
    assert most == 20
    assert_idle(engine)
