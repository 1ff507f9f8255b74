"""A request that joins, shares steps, is cut into chunks or preempted has the tokens it has alone."""

import random
from functools import partial

import pytest

from engine.cache.slots import SlotCache, SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SUPPORTS
from engine.execution.runner import EagerWay, ModelRunner
from engine.requests.listeners import Listeners
from engine.scheduling.continuous import ContinuousScheduler
from tests.part06.fakes import BlockCache, FakeForward, Recorder, assert_idle, run_to_end, told_alone

PROMPTS = [
    "Once upon a time, in a small house near the forest, there lived a",
    "The",
    "Tom and Lily went to the park. They saw a big",
    "🦊",
    "It rained. " * 12,
    "A red ball",
]
LENGTHS = [5, 30, 12, 20, 8, 1]


def continuous(max_num_seqs: int, budget: int):
    return partial(ContinuousScheduler, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def mixed_params(seed: int) -> SamplingParams:
    """Every other request greedy, the others sampled, each in its own way."""
    rng = random.Random(seed)
    temperature = 0 if seed % 2 else rng.uniform(0.2, 1.5)
    return SamplingParams(
        temperature=temperature, seed=seed, top_k=rng.choice([0, 7]), top_p=rng.choice([1.0, 0.8]),
        frequency_penalty=rng.choice([0, 0.5]), min_tokens=rng.choice([0, 3]),
        max_tokens=rng.randint(3, 40),
    )  # fmt: skip


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 1), (2, 5), (3, 16), (6, 256), (6, 6)])
def test_greedy_requests_of_mixed_lengths_have_the_text_they_have_alone(
    slot_engine, alone, max_num_seqs, budget
):
    engine = slot_engine(continuous(max_num_seqs, budget), num_slots=max_num_seqs)
    expected = {}
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        params = SamplingParams(temperature=0, max_tokens=length)
        engine.add_request(prompt, prompt, params)
        expected[prompt] = alone(prompt, params)
    done = run_to_end(engine)
    for prompt in PROMPTS:
        assert done[prompt].outputs[0].text == expected[prompt].text, "a request says what it says alone"
        assert done[prompt].outputs == [expected[prompt]]


def test_requests_that_join_in_flight_disturb_nobody_and_are_not_disturbed(slot_engine, alone):
    engine = slot_engine(continuous(4, 20), num_slots=4)
    params = [SamplingParams(temperature=0, max_tokens=length) for length in LENGTHS]
    done, waiting = {}, list(zip(PROMPTS, params, strict=True))
    while waiting or engine.has_unfinished_requests():
        if waiting:
            engine.add_request(waiting[0][0], *waiting.pop(0))
        for _ in range(3):
            done |= {output.request_id: output for output in engine.step() if output.finished}
    for prompt, one in zip(PROMPTS, params, strict=True):
        assert done[prompt].outputs == [alone(prompt, one)]


@pytest.mark.parametrize("budget", [*range(1, 18), 63, 64, 65, 1000])
def test_every_chunk_size_gives_the_same_tokens(fake_engine, budget):
    seats = min(3, budget)
    engine = fake_engine(continuous(seats, budget))
    prompts = ["x" * 64, "hello", "y" * 33, "z", "w" * 17]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, mixed_params(i))
    done = run_to_end(engine)
    for i, prompt in enumerate(prompts):
        assert done[str(i)].outputs[0].token_ids == told_alone(prompt, mixed_params(i)).token_ids, (
            "a prompt read in chunks gives the tokens it gives in one piece"
        )


@pytest.mark.parametrize("num_blocks", [26, 30, 40, 80])
@pytest.mark.parametrize("seed", range(2))
def test_preempted_requests_have_the_tokens_they_would_have_had(fake_engine, num_blocks, seed):
    """Memory for one to three requests, eight seats: greedy and sampled alike, with joins and aborts."""
    rng, recorder = random.Random(seed), Recorder()
    listeners = Listeners([recorder])
    cache = BlockCache(num_blocks, block_tokens=8)
    engine = fake_engine(continuous(8, 48), cache, listeners=listeners)
    prompts = {str(i): "abcdefgh"[i % 8] * rng.randint(1, 90) for i in range(24)}
    waiting, done, aborted = list(prompts), {}, set()
    while waiting or engine.has_unfinished_requests():
        for name in waiting[: rng.choice([0, 0, 1, 5])]:
            engine.add_request(name, prompts[name], mixed_params(int(name)))
            waiting.remove(name)
        if (
            rng.random() < 0.02
            and (name := rng.choice(list(prompts))) not in done
            and engine.abort_request(name)
        ):
            aborted.add(name)
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert set(done) | aborted == set(prompts)
    for name, output in done.items():
        assert output.outputs[0].token_ids == told_alone(prompts[name], mixed_params(int(name))).token_ids, (
            "a preempted request says what it would have said"
        )
    preemptions = sum(kind == "preempt" for kind, _ in recorder.heard)
    assert preemptions > 0 or num_blocks == 80


def test_preemption_with_the_true_model_too(model, tokenizer, alone):
    """Slots that hold 150 tokens together: three growing requests do not fit."""

    class Tight(SlotCache):
        def __init__(self, *size):
            super().__init__(*size)
            self.held = {}

        def reserve(self, seq, num_tokens):
            others = sum(tokens for id, tokens in self.held.items() if id != seq.id)
            if others + num_tokens > 150:
                return False
            self.held[seq.id] = num_tokens
            return True

        def release(self, seq):
            self.held.pop(seq.id, None)
            super().release(seq)

        preempt = release

    memory, recorder = SlotMemory(model.config, 3), Recorder()
    scheduler = ContinuousScheduler(Tight(3, memory.slot_tokens), 3, 64)
    engine = LLMEngine(
        tokenizer,
        model.config,
        scheduler,
        ModelRunner([EagerWay(model, memory)], memory),
        Listeners([recorder]),
        max_model_len=150,
    )
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for prompt in PROMPTS[:4]:
        engine.add_request(prompt, prompt, params)
    done = run_to_end(engine)
    assert [kind for kind, _ in recorder.heard].count("preempt") > 0
    for prompt in PROMPTS[:4]:
        assert done[prompt].outputs == [alone(prompt, params)]
    assert_idle(engine)


@pytest.mark.parametrize("fail", [1, 2, 3, 5, 9])
def test_a_failed_step_fails_those_in_it_and_the_others_are_not_disturbed(fake_engine, fail):
    cache = BlockCache(64, 8)
    forward = FakeForward(cache)
    forward.fail_at[fail] = RuntimeError("the cable came loose")
    recorder = Recorder()
    engine = fake_engine(continuous(2, 10), cache, forward, listeners=Listeners([recorder]))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for i in range(6):
        engine.add_request(str(i), "abc" * 4, params)
    done = run_to_end(engine)
    in_step = [ids for kind, ids in recorder.heard if kind == "schedule"][fail - 1]
    for name, output in done.items():
        assert (output.error is not None) == (f"{name}/0" in in_step)
        if output.error is None:
            assert output.outputs[0].token_ids == told_alone("abc" * 4, params).token_ids


@pytest.mark.parametrize("seed", range(3))
def test_failed_steps_that_recover_spares_cost_nobody_a_token(fake_engine, seed):
    cache = BlockCache(28, 8)
    forward = FakeForward(cache)
    rng = random.Random(seed)
    forward.fail_at = {step: RuntimeError("again") for step in range(1, 400) if rng.random() < 0.3}
    engine = fake_engine(continuous(5, 20), cache, forward, recover=lambda step, error: [])
    for i in range(12):
        engine.add_request(str(i), "prompt " * (i % 5 + 1), mixed_params(i))
    done = run_to_end(engine)
    for i in range(12):
        expected = told_alone("prompt " * (i % 5 + 1), mixed_params(i))
        assert done[str(i)].outputs[0].token_ids == expected.token_ids


def test_n_samples_side_by_side_equal_each_alone(fake_engine):
    engine = fake_engine(continuous(4, 32))
    params = SamplingParams(n=6, seed=3, max_tokens=15)
    engine.add_request("a", "hello", params)
    engine.add_request("b", "there", SamplingParams(temperature=0, max_tokens=9))
    done = run_to_end(engine)
    assert [sample.token_ids for sample in done["a"].outputs] == [
        told_alone("hello", params, i).token_ids for i in range(6)
    ]
    assert done["b"].outputs[0].text == told_alone("there", SamplingParams(temperature=0, max_tokens=9)).text


def test_a_request_stops_the_step_its_stop_string_appears_and_its_seat_is_taken_in_the_next(fake_engine):
    recorder = Recorder()
    engine = fake_engine(continuous(1, 50), listeners=Listeners([recorder]))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    text = told_alone("hello", params).text
    stopping = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=text[3:5])
    engine.add_request("a", "hello", stopping)
    engine.add_request("b", "there", params)
    done = run_to_end(engine)
    expected = told_alone("hello", stopping)
    assert done["a"].outputs[0].text == expected.text
    order = [ids[0] for kind, ids in recorder.heard if kind == "schedule"]
    assert order == ["a/0"] * len(expected.token_ids) + ["b/0"] * 30


def test_priority_is_an_option_of_the_request(fake_engine):
    engine = fake_engine(continuous(1, 50), supports=SUPPORTS | {"priority"})
    params = SamplingParams(temperature=0, max_tokens=2)
    for name, priority in {"a": 0, "b": 5, "c": 1, "d": -1, "e": 1}.items():
        engine.add_request(name, name, params, priority=priority)
    assert list(run_to_end(engine)) == ["d", "a", "c", "e", "b"]
