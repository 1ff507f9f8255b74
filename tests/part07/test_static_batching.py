"""Static batches: filled from the queue, run until their last request ends, then filled again."""

from functools import partial

import pytest

from engine.decoding.params import SamplingParams
from engine.listeners import Listeners
from engine.scheduling.static import StaticScheduler
from tests.part06.fakes import BlockCache, FakeForward, Recorder, run_to_end, told_alone

PROMPTS = ["Once upon a time", "The little dog", "A red ball", "Tom", "It was raining and the cat"]


def greedy(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def static(max_num_seqs: int):
    return partial(StaticScheduler, max_num_seqs=max_num_seqs)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
def test_each_request_of_a_batch_has_the_text_it_has_alone(real_engine, alone, max_num_seqs):
    engine = real_engine(static(max_num_seqs), num_slots=max_num_seqs)
    params = [greedy(8 + 5 * i) for i in range(5)]
    for prompt, one in zip(PROMPTS, params, strict=True):
        engine.add_request(prompt, prompt, one)
    done = run_to_end(engine)
    for prompt, one in zip(PROMPTS, params, strict=True):
        assert done[prompt].outputs == [alone(prompt, one)]


def test_a_batch_is_filled_run_to_its_end_and_filled_again(fake_engine):
    recorder = Recorder()
    engine = fake_engine(static(2), listeners=Listeners([recorder]))
    for name, tokens in {"a": 1, "b": 4, "c": 2, "d": 2, "e": 1}.items():
        engine.add_request(name, name, greedy(tokens, ignore_eos=True))
    run_to_end(engine)
    steps = ["".join(id[0] for id in ids) for kind, ids in recorder.heard if kind == "schedule"]
    assert steps == ["ab", "b", "b", "b", "cd", "cd", "e"]


def test_a_newcomer_waits_for_the_next_batch_even_when_a_place_is_free(fake_engine):
    recorder = Recorder()
    engine = fake_engine(static(4), listeners=Listeners([recorder]))
    engine.add_request("a", "a", greedy(4, ignore_eos=True))
    engine.step()
    engine.add_request("b", "b", greedy(1, ignore_eos=True))
    run_to_end(engine)
    assert [ids for kind, ids in recorder.heard if kind == "schedule"] == [("a/0",)] * 4 + [("b/0",)]


def test_all_prompts_go_through_in_the_first_step_without_padding(fake_engine):
    recorder = Recorder()
    engine = fake_engine(static(5), listeners=Listeners([recorder]))
    for prompt in PROMPTS:
        engine.add_request(prompt, prompt, greedy(3, ignore_eos=True))
    run_to_end(engine)
    computed = [record.tokens_computed for record in recorder.records]
    assert computed == [tuple(map(len, PROMPTS)), (1,) * 5, (1,) * 5]


def test_a_small_cache_makes_the_batch_smaller(fake_engine):
    recorder = Recorder()
    cache = BlockCache(num_blocks=13, block_tokens=16)
    engine = fake_engine(static(8), cache=cache, listeners=Listeners([recorder]), max_model_len=200)
    cache.begin = lambda seq, begin=cache.begin: None if len(cache.blocks) == 3 else begin(seq)
    for i in range(7):
        engine.add_request(str(i), "hello", greedy(2, ignore_eos=True))
    run_to_end(engine)
    sizes = [len(ids) for kind, ids in recorder.heard if kind == "schedule"]
    assert sizes == [3, 3, 3, 3, 1, 1]


def test_no_room_for_a_running_request_is_said_by_name(fake_engine):
    engine = fake_engine(static(2), cache=BlockCache(num_blocks=13, block_tokens=16))
    for name in "ab":
        engine.add_request(name, "x" * 120, greedy(60, ignore_eos=True))
    with pytest.raises(MemoryError, match="b/0"):
        run_to_end(engine)
    for name in "ab":
        engine.abort_request(name)


def test_seeded_samples_in_a_batch_equal_the_loop_alone(fake_engine):
    engine = fake_engine(static(6))
    expected = {}
    for seed in range(9):
        params = SamplingParams(seed=seed, temperature=0.3 + seed / 5, top_k=seed * 5, max_tokens=4 + seed)
        engine.add_request(str(seed), "hello", params)
        expected[str(seed)] = told_alone("hello", params).token_ids
    assert {name: output.outputs[0].token_ids for name, output in run_to_end(engine).items()} == expected


def test_aborting_one_of_a_batch_leaves_the_others_as_they_are(fake_engine):
    engine = fake_engine(static(3))
    for name in "abcd":
        engine.add_request(name, name, greedy(6, ignore_eos=True))
    engine.step()
    engine.abort_request("b")
    done = run_to_end(engine)
    for name in "acd":
        assert done[name].outputs[0].token_ids == told_alone(name, greedy(6, ignore_eos=True)).token_ids


def test_a_failed_step_fails_its_batch_and_the_next_batch_runs(fake_engine):
    cache = BlockCache(64, 16)
    forward = FakeForward(cache)
    forward.fail_at[2] = RuntimeError("the cable came loose")
    engine = fake_engine(static(2), cache=cache, forward=forward)
    for name in "abc":
        engine.add_request(name, name, greedy(4, ignore_eos=True))
    done = run_to_end(engine)
    assert [done[name].error is None for name in "abc"] == [False, False, True]


def test_nothing_to_do_is_no_batch(fake_engine):
    assert fake_engine(static(2)).step() == []
