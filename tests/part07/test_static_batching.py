"""Static batches: filled from the queue, run until their last request ends, then filled again.

First the scheduler alone, step by step; then a whole engine around it, with a fake model and the trained one.
"""

from functools import partial

import pytest

from engine.decoding.params import SamplingParams
from engine.requests.listeners import Listeners
from engine.scheduling.static import StaticScheduler
from tests.part06.fakes import BlockCache, FakeForward, Recorder, run_to_end, told_alone
from tests.part06.steps import chosen, make_request, play, scheduled

PROMPTS = ["Once upon a time", "The little dog", "A red ball", "Tom", "It was raining and the cat"]


def greedy(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def static(max_num_seqs: int):
    return partial(StaticScheduler, max_num_seqs=max_num_seqs)


def scheduler(max_num_seqs: int, blocks=100, block_tokens=4) -> StaticScheduler:
    return StaticScheduler(BlockCache(blocks, block_tokens), max_num_seqs)


def test_nothing_to_do_is_no_batch():
    assert scheduler(2).schedule() is None, "with nothing to do there is no batch, not an empty one"


def test_the_first_step_takes_whole_prompts_and_later_ones_a_token_each():
    s = scheduler(3)
    for name, prompt in {"a": 5, "b": 2, "c": 7}.items():
        s.add(make_request(name, prompt, output=3))
    steps = [chosen(play(s)) for _ in range(3)]
    assert steps[0].keys() == {"a", "b", "c"}, "a batch is filled until the places or the cache are full"
    assert steps == [{"a": 5, "b": 2, "c": 7}, {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}], (
        "a step takes from each running request all that it lacks"
    )


def test_a_batch_has_no_more_requests_than_places():
    s = scheduler(2)
    for name in "abc":
        s.add(make_request(name, prompt=1, output=1))
    assert chosen(play(s)) == {"a": 1, "b": 1}, "a batch has at most max_num_seqs requests"
    assert chosen(play(s)) == {"c": 1}


def test_nobody_joins_a_batch_under_way():
    s = scheduler(2)
    s.add(make_request("long", prompt=1, output=3))
    s.add(make_request("short", prompt=1, output=1))
    play(s)
    s.add(make_request("late", prompt=4, output=1))
    assert chosen(play(s)) == {"long": 1}, "nobody joins a batch that is under way, even if a place is empty"
    assert [chosen(play(s)) for _ in range(2)] == [{"long": 1}, {"late": 4}]


def test_without_room_in_mid_story_there_is_no_step():
    s = scheduler(2, blocks=3, block_tokens=4)
    for name in "ab":
        s.add(make_request(name, prompt=4, output=9))
    play(s)
    step = s.schedule()  # each needs a second block, and one is left
    assert step is None, (
        f"no room for b, yet it is in the step: {step and chosen(step.batch)}; ask `reserve` for all its "
        "tokens, computed and new, and return None when it says no"
    )


def test_drafts_need_room_too():
    s = scheduler(1)
    a = make_request("a", prompt=4, output=9)
    s.add(a)
    play(s)
    a.draft_ids = [91, 92, 93, 94]
    assert scheduled(s) == {"a": 5}
    assert s.cache.blocks == {"a": 3}, "room is reserved for drafts, too: 9 tokens, three blocks of four"


def test_a_request_with_nothing_to_compute_is_left_out():
    s = scheduler(1)
    s.add(make_request("a", prompt=4, output=9))
    s.schedule()  # its result has not come: the token that follows is not known
    assert s.schedule() is None, "a request with nothing to compute is not part of a step"


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
def test_each_request_of_a_batch_has_the_text_it_has_alone(slot_engine, alone, max_num_seqs):
    engine = slot_engine(static(max_num_seqs), num_slots=max_num_seqs)
    params = [greedy(8 + 5 * i) for i in range(5)]
    for prompt, one in zip(PROMPTS, params, strict=True):
        engine.add_request(prompt, prompt, one)
    done = run_to_end(engine)
    for prompt, one in zip(PROMPTS, params, strict=True):
        assert done[prompt].outputs == [alone(prompt, one)], f"{prompt!r} has another text than alone"


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
    cache.admit = lambda seq, admit=cache.admit: None if len(cache.blocks) == 3 else admit(seq)
    for i in range(7):
        engine.add_request(str(i), "hello", greedy(2, ignore_eos=True))
    run_to_end(engine)
    sizes = [len(ids) for kind, ids in recorder.heard if kind == "schedule"]
    assert sizes == [3, 3, 3, 3, 1, 1]


def test_without_room_in_mid_story_the_oldest_fails_with_the_reason_and_the_others_end_well(fake_engine):
    """`schedule` raised a MemoryError, in each step anew: no request ended."""
    engine = fake_engine(static(2), cache=BlockCache(num_blocks=13, block_tokens=16))
    params = greedy(60, ignore_eos=True)
    for name in "abc":
        engine.add_request(name, name * 120, params)
    done = run_to_end(engine)
    assert "no room for the" in done["a"].error
    for name in "bc":
        assert done[name].outputs[0].token_ids == told_alone(name * 120, params).token_ids


def test_seeded_samples_in_a_batch_equal_the_loop_alone(fake_engine):
    engine = fake_engine(static(6))
    expected = {}
    for seed in range(9):
        params = SamplingParams(seed=seed, temperature=0.3 + seed / 5, top_k=seed * 5, max_tokens=4 + seed)
        engine.add_request(str(seed), "hello", params)
        expected[str(seed)] = told_alone("hello", params).token_ids
    done = run_to_end(engine)
    for seed, tokens in expected.items():
        assert done[seed].outputs[0].token_ids == tokens, f"seed {seed} draws other tokens than alone"


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
