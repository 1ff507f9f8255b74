"""First in, first out: requests complete in order, with the text each would have alone."""

import gc

import pytest
import torch

from engine.decoding.params import ParameterError, SamplingParams
from engine.execution.runner import Logits, ModelRunner, choose
from engine.machine.collector import NEW_OBJECTS, rare_collections
from engine.requests.listeners import Listeners
from engine.requests.request import State
from engine.scheduling.fifo import FIFOScheduler
from tests.part06.fakes import CONFIG, BlockCache, FakeForward, Recorder, run_to_end, told_alone
from tests.part06.steps import Everybody

PROMPTS = ["Once upon a time", "The little dog", "A red ball"]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


# --- one step, looked at closely ---

FOUR = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_a_step_appends_the_token_that_was_chosen(fake_engine):
    engine = fake_engine()
    engine.add_request("a", "hello", FOUR)
    outputs = engine.step()
    assert len(outputs) == 1, "each request of a step has an output, finished or not"
    assert list(outputs[0].outputs[0].token_ids) == told_alone("hello", FOUR).token_ids[:1], (
        "after one step the output is the one token that the sampler chose"
    )
    engine.abort_request("a")


def test_the_scheduler_hears_of_a_step_when_its_tokens_are_appended(fake_engine, monkeypatch):
    engine, committed = fake_engine(), []
    monkeypatch.setattr(
        engine.scheduler.cache, "commit", lambda seq, num_tokens: committed.append(num_tokens)
    )
    engine.add_request("a", "hello", FOUR)
    for _ in range(3):
        engine.step()
    assert committed == [5, 6, 7], (
        "append first, then scheduler.update: it counts on the new tokens being known"
    )
    engine.abort_request("a")


def test_an_engines_seed_makes_the_seeds_of_those_who_have_none(fake_engine):
    def seeds(engine, *of):
        made = [engine.make_requests("a", "hello", SamplingParams(temperature=0, seed=seed)) for seed in of]
        return [request.sampling.seed for (request,) in made]

    first, again, other, chance = (fake_engine(seed=seed) for seed in (1, 1, 2, None))
    expected = seeds(first, None, None)
    assert len(set(expected)) == 2, "each request has a seed of its own"
    assert seeds(again, None, 5, None) == [expected[0], 5, expected[1]], "a request's own seed stays"
    assert not set(expected) & {*seeds(other, None, None), *seeds(chance, None, None)}


def test_who_ends_in_a_step_leaves_in_it(fake_engine):
    engine = fake_engine()
    engine.add_request("a", "hello", FOUR)
    finished = [output.finished for _ in range(4) for output in engine.step()]
    assert finished == [False, False, False, True], "it ends with the step that brings its fourth token"
    held = engine.scheduler.cache.usage().num_sequences
    assert (engine.scheduler.running, held) == ([], 0), (
        "a request that ends leaves the scheduler in the same step, so its memory is free before the next"
    )


def test_a_failed_step_is_taken_back_and_does_not_raise(fake_engine):
    engine = fake_engine()
    engine.executor.ways[0].fail_at = {2: RuntimeError("the second step is cursed")}
    engine.add_request("a", "hello", FOUR)
    engine.step()
    try:
        (output,) = engine.step()
    except RuntimeError as error:
        pytest.fail(f"a failed step ends its requests, and step() goes on, but it raised: {error}")
    assert (output.outputs[0].finish_reason, output.error) == (
        "error",
        "RuntimeError: the second step is cursed",
    )


def test_who_left_while_the_step_was_under_way_gets_nothing_more(fake_engine):
    engine = fake_engine()
    engine.add_request("a", "hello", FOUR)
    step = engine.launch()
    engine.abort_request("a")
    try:
        outputs = engine.land(step)
    except KeyError:
        outputs = ["an output that is not there"]
    assert outputs == [], "a request that finished while the step was under way is left alone when it lands"


# --- whole requests ---


def test_three_requests_complete_in_order_with_the_text_of_each_alone(real_engine, alone):
    engine = real_engine()
    for prompt in PROMPTS:
        engine.add_request(prompt, prompt, GREEDY)
    done = run_to_end(engine)
    assert list(done) == PROMPTS
    for prompt, output in done.items():
        assert output.outputs == [alone(prompt, GREEDY)]
        assert (output.prompt, output.request_id, output.error) == (prompt, prompt, None)


def test_one_request_runs_at_a_time_in_order_of_arrival(fake_engine):
    recorder = Recorder()
    engine = fake_engine(listeners=Listeners([recorder]))
    for name in "abc":
        engine.add_request(name, f"prompt {name}", GREEDY)
    run_to_end(engine)
    ids = [names for event, names in recorder.heard if event == "schedule"]
    assert all(len(names) == 1 for names in ids)
    assert ids == sorted(ids)


def test_outputs_grow_token_by_token_and_carry_everything_so_far(fake_engine):
    engine = fake_engine()
    engine.add_request("a", "hello", GREEDY)
    seen = []
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        seen.append(output)
    expected = told_alone("hello", GREEDY)
    for count, output in enumerate(seen, start=1):
        assert output.outputs[0].token_ids == expected.token_ids[:count]
        assert output.finished == (count == len(seen))
    assert seen[-1].outputs[0].text == expected.text
    assert seen[-1].prompt_token_ids == list(b"hello")
    assert len(seen[-1].stats.token_times) == len(seen)


def test_an_idle_engine_steps_without_a_result(fake_engine):
    engine = fake_engine()
    assert engine.step() == []
    assert not engine.has_unfinished_requests()


def test_ids_instead_of_text_are_a_prompt_too(fake_engine):
    engine = fake_engine()
    engine.add_request("a", list(b"hello"), GREEDY)
    (output,) = run_to_end(engine).values()
    assert output.prompt is None
    assert output.outputs[0].token_ids == told_alone("hello", GREEDY).token_ids


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_aborting_the_running_request_frees_its_memory_at_once_and_the_next_one_runs(fake_engine, steps):
    engine = fake_engine()
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    engine.add_request("a", "one", params)
    engine.add_request("b", "two", params)
    for _ in range(steps):
        engine.step()
    output = engine.abort_request("a")
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == told_alone("one", params).token_ids[:steps]
    assert engine.scheduler.cache.usage().num_sequences == 0
    assert engine.abort_request("a") is None
    done = run_to_end(engine)
    assert list(done) == ["b"]
    assert done["b"].outputs[0].token_ids == told_alone("two", params).token_ids


def test_aborting_a_waiting_request_leaves_the_others_in_order(fake_engine):
    engine = fake_engine()
    for name in "abcd":
        engine.add_request(name, f"prompt {name}", GREEDY)
    engine.step()
    output = engine.abort_request("c")
    assert (output.finished, output.outputs[0].finish_reason, output.outputs[0].token_ids) == (
        True,
        "abort",
        [],
    )
    assert list(run_to_end(engine)) == ["a", "b", "d"]


def test_aborting_a_stranger_does_nothing(fake_engine):
    assert fake_engine().abort_request("nobody") is None


def test_a_request_that_was_aborted_may_come_again_under_its_name(fake_engine):
    engine = fake_engine()
    engine.add_request("a", "one", GREEDY)
    engine.abort_request("a")
    engine.add_request("a", "two", GREEDY)
    assert run_to_end(engine)["a"].outputs[0].token_ids == told_alone("two", GREEDY).token_ids


def test_a_name_in_use_is_refused_and_its_owner_is_not_disturbed(fake_engine):
    engine = fake_engine()
    engine.add_request("a", "one", GREEDY)
    engine.step()
    with pytest.raises(ParameterError, match="'a' is in use") as caught:
        engine.add_request("a", "two", GREEDY)
    assert caught.value.field == "request_id"
    assert run_to_end(engine)["a"].outputs[0].token_ids == told_alone("one", GREEDY).token_ids


def test_n_samples_become_children_of_the_first_with_seeds_that_follow(fake_engine):
    engine = fake_engine()
    params = SamplingParams(n=3, seed=7, max_tokens=10)
    samples = engine.make_requests("a", "hello", params)
    assert [sample.id for sample in samples] == ["a/0", "a/1", "a/2"]
    assert {sample.request_id for sample in samples} == {"a"}
    assert [sample.parent for sample in samples] == [None, samples[0], samples[0]]
    assert [sample.sampling.seed for sample in samples] == [7, 8, 9]
    assert len({id(sample.token_ids) for sample in samples}) == 3
    assert {sample.state for sample in samples} == {State.WAITING}


def test_n_samples_are_reported_as_one_request(fake_engine):
    engine = fake_engine()
    params = SamplingParams(n=3, seed=7, max_tokens=10)
    engine.add_request("a", "hello", params)
    (output,) = run_to_end(engine).values()
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    expected = [told_alone("hello", params, index) for index in range(3)]
    assert [sample.token_ids for sample in output.outputs] == [one.token_ids for one in expected]
    assert [sample.text for sample in output.outputs] == [one.text for one in expected]


def test_a_request_is_finished_when_all_of_its_samples_are_whichever_ends_last(fake_engine):
    cache = BlockCache(64, 16)

    def second_one_ends_early(logits, batch):
        tokens = choose(logits, batch).clone()
        for s, name in enumerate(batch.ids):
            if name == "a/1":
                tokens[s] = CONFIG.eos_token_ids[0]
        return tokens

    runner = ModelRunner([FakeForward(cache)], select=second_one_ends_early)
    engine = fake_engine(Everybody, cache, executor=runner)
    params = SamplingParams(n=2, seed=7, max_tokens=5, min_tokens=5)
    engine.add_request("a", "hello", params)
    outputs = [output for _ in range(5) for output in engine.step()]
    assert [output.finished for output in outputs] == [False] * 4 + [True]
    assert [len(sample.token_ids) for sample in outputs[-1].outputs] == [5, 1]


def test_aborting_n_samples_keeps_what_is_finished_and_each_is_said_to_end_once(fake_engine):
    recorder = Recorder()
    engine = fake_engine(listeners=Listeners([recorder]))
    params = SamplingParams(n=3, seed=7, max_tokens=4, ignore_eos=True)
    engine.add_request("a", "hello", params)
    for _ in range(6):
        engine.step()
    output = engine.abort_request("a")
    assert [sample.finish_reason for sample in output.outputs] == ["length", "abort", "abort"]
    assert [len(sample.token_ids) for sample in output.outputs] == [4, 2, 0]
    assert [what for event, what in recorder.heard if event == "finish"] == ["a/0", "a/1", "a/2"]


def test_aborting_keeps_the_reason_of_a_request_that_has_just_ended(fake_engine):
    """Its last token had come, then the step failed outside the forward pass, before it could leave."""

    class Tripping(FIFOScheduler):
        def update(self, step, drafts=None):
            raise KeyError("who was that")

    engine = fake_engine(Tripping)
    engine.add_request("a", "hello", SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    try:
        engine.step()
    except KeyError:
        pass
    else:
        pytest.fail(
            "only the result and the capabilities can fail a step: what is raised later, by "
            "scheduler.update, goes up to the caller"
        )
    assert engine.abort_request("a").outputs[0].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0, 1])
def test_stop_tokens_like_the_end_of_sequence_are_not_chosen_before_min_tokens(fake_engine, temperature):
    cache = BlockCache(64, 16)

    class EagerToStop(FakeForward):
        def __call__(self, batch) -> Logits:
            logits = super().__call__(batch)
            logits.values[:, [66, 67, 256]] = 40 + torch.tensor([2.0, 1.0, 3.0])  # "B", "C", end of sequence
            return logits

    engine = fake_engine(cache=cache, forward=EagerToStop(cache))
    params = SamplingParams(
        temperature=temperature, seed=1, min_tokens=4, max_tokens=9, stop_token_ids=(66, 67)
    )
    engine.add_request("a", "hello", params)
    (output,) = run_to_end(engine).values()
    assert len(output.outputs[0].token_ids) == 5, "four tokens of another kind, then one that ends the output"
    assert not {66, 67, 256} & {*output.outputs[0].token_ids[:4]}


def test_a_snapshot_of_a_running_output_stays_as_it_was_and_the_last_one_is_a_list(fake_engine):
    engine = fake_engine()
    engine.add_request("a", "hello", GREEDY)
    snapshots = []
    while engine.has_unfinished_requests():
        snapshots += engine.step()
    expected = told_alone("hello", GREEDY).token_ids
    for count, output in enumerate(snapshots, start=1):
        (sample,) = output.outputs
        assert sample.token_ids == expected[:count], "a snapshot went on growing"
        assert len(sample.token_ids) == count
        assert [sample.token_ids[-1], *sample.token_ids[:2]] == [expected[count - 1], *expected[:count][:2]]
        assert repr(sample.token_ids) == repr(expected[:count])
        with pytest.raises(IndexError):
            sample.token_ids[count]
    assert isinstance(snapshots[-1].outputs[0].token_ids, list)


def test_seeded_samples_equal_the_loop_alone(fake_engine):
    engine = fake_engine()
    expected = {}
    for seed in range(6):
        params = SamplingParams(
            seed=seed,
            temperature=0.8,
            top_p=0.9,
            top_k=20,
            frequency_penalty=0.3,
            min_tokens=5,
            max_tokens=30,
        )
        engine.add_request(str(seed), "hello", params)
        expected[str(seed)] = told_alone("hello", params).token_ids
    assert {name: output.outputs[0].token_ids for name, output in run_to_end(engine).items()} == expected


def test_output_and_prompt_fit_in_max_model_len(fake_engine):
    engine = fake_engine(max_model_len=30)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    engine.add_request("a", "x" * 20, params)
    with pytest.raises(ParameterError, match="30 tokens"):
        engine.add_request("b", "x" * 30, params)
    (output,) = run_to_end(engine).values()
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (10, "length")


def test_a_queue_of_hundreds_with_aborts_in_between_ends_with_nothing_left(fake_engine):
    engine = fake_engine(cache=BlockCache(13, 16))
    for i in range(300):
        engine.add_request(str(i), f"prompt {i}", SamplingParams(temperature=0, max_tokens=1 + i % 5))
        if i % 3 == 0:
            engine.step()
        if i % 7 == 0:
            engine.abort_request(str(i // 2))
    done = run_to_end(engine)
    assert list(done) == sorted(done, key=int)
    assert len(done) > 100


def test_python_looks_for_cycles_less_often_unless_it_was_told_not_to_look():
    before = gc.get_threshold()
    try:
        for given, want in ((700, NEW_OBJECTS), (0, 0), (10**6, 10**6)):
            gc.set_threshold(given)
            with rare_collections():
                assert gc.get_threshold()[0] == want, "700 new objects are fewer than one step's records"
            assert gc.get_threshold()[0] == given, "what was found is put back"
    finally:
        gc.set_threshold(*before)
