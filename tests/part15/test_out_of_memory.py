"""Memory runs out: the next step is smaller, and nobody fails who can run."""

import random
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.core.ahead import AheadEngine
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SUPPORTS
from engine.execution.runner import ModelRunner
from engine.requests.batch import Batch
from engine.requests.listeners import Listeners
from engine.requests.request import State
from engine.scheduling.elastic import GROWTH_STEPS, ElasticScheduler, is_out_of_memory
from engine.scheduling.scored_rows import scored_rows
from tests.part06.fakes import (
    CONFIG,
    TOKENIZER,
    BlockCache,
    FakeForward,
    Recorder,
    assert_idle,
    run_to_end,
    told_alone,
)
from tests.part06.steps import make_request, play, scheduled
from tests.part12.pages import TWO_LAYERS, WatchedCache
from tests.part13.aheads import fake_runner

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ask_for_too_much() -> None:
    """A real one, of the CPU: 2**60 bytes."""
    torch.empty(1 << 60, dtype=torch.uint8)


def the_cpus_own() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        ask_for_too_much()
    return caught.value


def make(seats: int = 4, budget: int = 64) -> ElasticScheduler:
    return ElasticScheduler(BlockCache(100, 16), seats, budget)


def fail(scheduler: ElasticScheduler, error: Exception = NO_MEMORY):
    """A step that fails: (the step, who fails with it)."""
    step = scheduler.schedule()
    scheduler.rollback(step)
    return step, scheduler.recover(step, error)


def running(scheduler: ElasticScheduler, *priorities: int) -> list:
    """Requests that have read their prompts, and so have a token each in the next step."""
    requests = [make_request(f"r{i}", 3, 50, priority) for i, priority in enumerate(priorities)]
    for request in requests:
        scheduler.add(request)
    play(scheduler)
    return requests


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (NO_MEMORY, True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_which_errors_are_about_memory(error, is_one):
    assert is_out_of_memory(error) == is_one


def test_the_cpus_own_error_is_one():
    assert is_out_of_memory(the_cpus_own())


def test_any_other_error_fails_the_step_as_ever():
    scheduler = make()
    running(scheduler, 0, 0)
    step, failed = fail(scheduler, RuntimeError("shapes cannot be multiplied"))
    assert failed == list(step.requests), "an error that is not about memory fails everyone in the step"
    assert scheduler.max_num_batched_tokens == 64, "and makes no step smaller"
    assert scheduler.num_out_of_memory == 0


def test_a_step_with_a_prompt_in_it_is_halved_and_nobody_leaves():
    scheduler = make()
    scheduler.add(make_request("a", 40, 5))
    _, failed = fail(scheduler)
    assert failed == [], "a prompt can be read in smaller chunks: nobody fails"
    assert scheduler.num_out_of_memory == 1, "each step that ran out of memory is counted"
    assert scheduled(scheduler) == {"a": 20}, "a step of 40 tokens ran out: the next has 20"


def test_it_is_halved_again_from_what_it_was():
    scheduler = make()
    scheduler.add(make_request("a", 40, 5))
    for tokens in (40, 20, 10, 5, 2):
        step, failed = fail(scheduler)
        assert (step.batch.num_tokens, failed) == (tokens, []), (
            "each step has half as many tokens as the last"
        )
    assert scheduled(scheduler) == {"a": 1}


def test_each_running_request_keeps_its_token():
    scheduler = make()
    running(scheduler, 0, 0, 0)
    scheduler.add(make_request("new", 4, 5))
    step, failed = fail(scheduler)
    assert (step.batch.num_tokens, failed) == (7, [])
    assert scheduled(scheduler) == {"r0": 1, "r1": 1, "r2": 1, "new": 1}, (
        "half of 7 is 3, but four are running: a step has one token for each of them"
    )


def test_when_each_has_one_token_the_worst_rank_leaves():
    scheduler = make()
    requests = running(scheduler, 1, 0, 0)
    first = requests[0]
    _, failed = fail(scheduler)
    assert failed == [], "the others can go on, so nobody fails"
    states = [request.state for request in requests]
    assert states == [State.WAITING, State.RUNNING, State.RUNNING], (
        "of a priority of 1, 0 and 0 the first is the worst, and is preempted, alone: the fewest"
    )
    assert (first.num_computed_tokens, first.num_preemptions) == (0, 1), "preempted as ever: computed again"
    assert scheduler.max_num_seqs == 2, "as many seats as there are running requests left"
    assert scheduled(scheduler) == {"r1": 1, "r2": 1}


def test_a_better_newcomer_does_not_leave_though_it_is_the_last_that_was_admitted():
    scheduler = make()
    requests = running(scheduler, 0, 0)
    requests.append(make_request("new", 1, 50, -1))
    scheduler.add(requests[-1])
    fail(scheduler)
    states = [request.state for request in requests]
    assert states == [State.RUNNING, State.WAITING, State.RUNNING], (
        "the worst rank leaves, not the last in the list of those who run"
    )


def test_of_one_priority_the_newest_leaves():
    scheduler = make()
    requests = running(scheduler, 0, 0, 0)
    fail(scheduler)
    assert [r.state for r in requests].index(State.WAITING) == 2, "of one priority, the newest has to wait"


def test_a_seat_that_is_given_up_is_not_taken_by_a_newcomer():
    scheduler = make()
    running(scheduler, 0, 0)
    fail(scheduler)
    scheduler.add(make_request("new", 1, 5))
    assert scheduled(scheduler) == {"r0": 1}, "else the next step would be as large again"


def test_who_has_no_smaller_step_fails():
    scheduler = make()
    running(scheduler, 0)
    step, failed = fail(scheduler)
    assert failed == list(step.requests), "alone, with one token: there is no smaller step, so it fails"


def test_a_single_token_beside_others_still_leaves_room_to_bend():
    """Another runs, with nothing to compute in this step: its last token is still on its way."""
    scheduler = make()
    first, second = running(scheduler, 0, 0)
    first.num_computed_tokens = len(first.token_ids)
    step, failed = fail(scheduler)
    assert step.requests == (second,)
    assert failed == [], "it did not run alone: the other's memory is given up first"
    assert second.state is State.WAITING


def test_after_calm_steps_a_step_may_be_twice_as_large():
    scheduler = make(seats=4, budget=8)
    running(scheduler, 0, 0)
    fail(scheduler)
    sizes = []
    for _ in range(3 * GROWTH_STEPS + 1):
        sizes.append((scheduler.max_num_seqs, scheduler.max_num_batched_tokens))
        scheduler.update(scheduler.schedule() or make_empty())
        for request in scheduler.running:
            request.token_ids.append(7)
    changes = [i for i in range(1, len(sizes)) if sizes[i] != sizes[i - 1]]
    assert changes == [GROWTH_STEPS, 2 * GROWTH_STEPS, 3 * GROWTH_STEPS], "so many succeed, then it grows"
    assert [sizes[i] for i in (0, *changes)] == [(1, 1), (2, 2), (4, 4), (4, 8)], (
        "twice as many seats and tokens each time, up to what they were"
    )


def make_empty():
    raise AssertionError("a step was due")


class Guarded:
    """A way that does something before each pass: what it raises fails the step."""

    def __init__(self, way, guard: Callable[[Batch], None]) -> None:
        self.way, self.guard, self.fits = way, guard, way.fits

    def __call__(self, batch: Batch):
        self.guard(batch)
        return self.way(batch)


def room_for(most: int) -> Callable[[Batch], None]:
    """Memory runs out when a step has more than `most` tokens."""

    def guard(batch: Batch) -> None:
        if batch.num_tokens > most:
            ask_for_too_much()

    return guard


def engine_with(guard: Callable[[Batch], None], seats: int = 5, budget: int = 24, listeners=()) -> LLMEngine:
    """The fake model, with `guard` before each pass."""
    cache = BlockCache(100, 8)
    scheduler = ElasticScheduler(cache, seats, budget)
    runner = ModelRunner([Guarded(FakeForward(cache), guard)])
    return LLMEngine(TOKENIZER, CONFIG, scheduler, runner, Listeners(listeners), recover=scheduler.recover)


def ask_all(engine: LLMEngine, prompts: dict[str, str], params: SamplingParams = GREEDY) -> None:
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)


PROMPTS = {str(i): "abcdefg"[i] * (5 + 4 * i) for i in range(7)}


@pytest.mark.parametrize("most", [1, 2, 3, 10])
def test_with_memory_for_so_many_tokens_everybody_gets_their_own_text(most):
    recorder = Recorder()
    engine = engine_with(room_for(most), listeners=[recorder])
    ask_all(engine, PROMPTS)
    done = run_to_end(engine)
    assert {name for name, output in done.items() if output.error} == set(), "who can run alone does not fail"
    for name, prompt in PROMPTS.items():
        assert done[name].outputs[0].token_ids == told_alone(prompt, GREEDY).token_ids, (
            f"{name}: other tokens"
        )
    failed = sum(record.error is not None for record in recorder.records)
    assert failed == engine.scheduler.num_out_of_memory > 0, (
        "each step that ran out is on record, and counted"
    )
    assert_idle(engine)


def test_only_who_cannot_run_alone_fails():
    def guard(batch):
        if any(length > 40 for length in batch.context_lens):
            ask_for_too_much()

    engine = engine_with(guard)
    prompts = PROMPTS | {"long": "x" * 35}
    ask_all(engine, prompts)
    done = run_to_end(engine)
    assert [name for name, output in done.items() if output.error] == ["long"]
    assert "allocate" in done["long"].error, "its reader learns why"
    for name, prompt in PROMPTS.items():
        assert done[name].outputs[0].token_ids == told_alone(prompt, GREEDY).token_ids
    assert_idle(engine)


def test_what_the_failed_step_held_is_free_before_the_next_one():
    """The error is still there, on its way to whoever asks: its frames must not hold the step's tensors."""
    held = []

    class Activations:
        pass

    def wasteful(batch):
        activations = Activations()
        held.append(weakref.ref(activations))
        if batch.num_tokens > 3:
            ask_for_too_much()

    engine = engine_with(wasteful)
    recover, after = engine.recover, []

    def recover_and_look(step, error):
        failed = recover(step, error)
        after.append(held[-1]() is None)
        return failed

    engine.recover = recover_and_look
    ask_all(engine, {"a": "hello"})
    run_to_end(engine)
    assert after == [True], "the frames of the failed step still hold its memory"


@pytest.mark.parametrize("seed", range(3))
def test_pages_and_a_step_in_flight_are_right_whenever_memory_runs_out(seed, monkeypatch):
    """Over pages with garbage left by each failed step, with a step in flight, in memory that changes."""
    monkeypatch.setattr("engine.scheduling.elastic.GROWTH_STEPS", 2)  # so it is soon too large again
    rng = random.Random(seed)
    cache = WatchedCache(TWO_LAYERS, 60, 4)
    runner, steps = fake_runner(cache, 5), []
    fake = runner.ways[0]

    def short(batch):
        steps.append(batch.num_tokens)
        most = 1 + (len(steps) // 3 * 5 + seed) % 24
        if batch.num_tokens > most:
            fake.fake.fail_next = NO_MEMORY

    runner.ways[0] = Guarded(fake, short)
    scheduler = ElasticScheduler(cache, 5, 24, select_rows=scored_rows)
    engine = AheadEngine(TOKENIZER, CONFIG, scheduler, runner, supports=SUPPORTS, recover=scheduler.recover)
    prompts = {str(i): "the same beginning "[: 4 * rng.randint(0, 4)] + "abc"[i % 3] * 9 for i in range(16)}
    waiting, done = list(prompts), {}
    while waiting or engine.has_unfinished_requests():
        for name in waiting[: rng.choice([0, 1, 3])]:
            engine.add_request(name, prompts[name], replace(GREEDY, max_tokens=4 + int(name)))
            waiting.remove(name)
        done |= {output.request_id: output for output in engine.step() if output.finished}
        assert len(steps) < 5000, "the engine comes to no end"
    for name, prompt in prompts.items():
        output = done[name].outputs[0]
        assert done[name].error is None, "a step of one token has always had room"
        assert output.token_ids == told_alone(prompt, replace(GREEDY, max_tokens=4 + int(name))).token_ids
    assert scheduler.num_out_of_memory >= 5, "memory hardly ever ran out"
    assert_idle(engine)


def test_of_many_one_leaves_at_a_time():
    scheduler = make()
    requests = running(scheduler, 0, 0, 0, 0)
    fail(scheduler)
    waiting = sum(request.state is State.WAITING for request in requests)
    assert waiting == 1, f"one goes, and then the step is tried again: the fewest have to go, not {waiting}"
