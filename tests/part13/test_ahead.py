"""One step ahead: the tokens of one step at a time, whatever happens while a step is in flight."""

from dataclasses import replace

import pytest
import torch

from engine.decoding.sampling import NO_TOKEN
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import ModelRunner
from engine.requests.batch import PLACEHOLDER, Batch
from engine.scheduling.scheduler import Queues
from tests.part06.fakes import (
    BlockCache,
    assert_idle,
    told_alone,
)
from tests.part12.pages import sequence
from tests.part13.aheads import (
    CPU,
    GREEDY,
    ahead,
    assert_told,
    forward_of,
    log_of,
    mixed,
    run_to_end,
    steps_of,
)

# 1. The tokens chosen last.


def record(*work) -> Batch:
    """Of these (sequence, new tokens), wherever they lie."""
    return Queues(BlockCache(8, 8)).make_step(work).batch


def test_a_placeholder_stands_for_the_row_that_its_request_had_in_the_last_step():
    a, b, c = (sequence(name, [1, 2, 3]) for name in "abc")
    last = LastTokens(4, CPU)
    batch = record((a, 3), (b, 2), (c, 3))  # b's prompt is not complete: it has no row
    last.remember(batch, torch.tensor([50, 52]))
    assert last.chosen.tolist()[:2] == [50, 52]
    c.token_ids.append(PLACEHOLDER)
    a.token_ids.append(PLACEHOLDER)
    assert last.sources(record((c, 1), (b, 1), (a, 1))) == [1, -1, 0], "by request, not by place"
    new = sequence("d", [7, 8])
    b.token_ids.append(33)
    c.token_ids[-1:] = [52, PLACEHOLDER]
    assert last.sources(record((new, 2), (c, 1), (b, 1))) == [-1, -1, 1, -1]


def test_of_a_step_with_drafts_nothing_is_remembered():
    """It lands before the next is launched: which of its tokens stand is not known on the device."""
    a, b = sequence("a", [1, 2]), sequence("b", [1, 2])
    last = LastTokens(4, CPU)
    last.remember(record((a, 2), (b, 2)), torch.tensor([50, 51]))
    a.token_ids.append(50)
    a.draft_ids = [7, 8]
    last.remember(record((a, 3)), torch.tensor([7, 9, 10]))
    b.token_ids.append(PLACEHOLDER)
    with pytest.raises(KeyError):
        last.sources(record((b, 1)))


def test_a_forward_pass_gets_the_token_itself_and_token_0_where_there_was_none():
    last = LastTokens(4, CPU)
    a, b, c = (sequence(name, [1, 2]) for name in "abc")
    last.remember(record((a, 2), (b, 2), (c, 1)), torch.tensor([50, NO_TOKEN]))
    for request in (a, b):
        request.token_ids.append(PLACEHOLDER)
    inputs = last.upload(record((b, 1), (c, 1), (a, 1)), CPU)
    assert inputs.token_ids.tolist() == [0, 2, 50]
    assert inputs.positions.tolist() == [2, 1, 2]
    assert inputs.chosen.tolist() == [0, 1, 2]


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
    for adjusted in (
        {"repetition_penalty": 1.5},
        {"min_tokens": 2},
        {"logit_bias": {65: 3.0}},
        {"bad_words": ["ab"]},
        {"allowed_token_ids": [65, 66]},
    ):
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
    cache.admit = lambda seq: None
    engine.add_request("a", "hello", GREEDY)
    done = run_to_end(engine)
    assert "no room" in done["a"].error
    assert_idle(engine)


class CountingRunner(ModelRunner):
    """Counts how often each step's result is asked for."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.asked: list[int] = []

    def submit(self, batch):
        pending, number = super().submit(batch), len(self.asked)
        self.asked.append(0)
        result = pending.result

        def counted():
            self.asked[number] += 1
            return result()

        pending.result = counted
        return pending


def test_a_steps_result_is_asked_for_once():
    engine = ahead(BlockCache(60, 8), runner_class=CountingRunner)
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


class Lost:
    """A step that went wrong on the device: it is found out when it lands."""

    def result(self):
        raise RuntimeError("lost")


class LosingRunner(ModelRunner):
    lose: frozenset[int] = frozenset()
    submitted = 0

    def submit(self, batch):
        pending = super().submit(batch)
        self.submitted += 1
        if self.submitted in self.lose:
            self.last_tokens.chosen.fill_(65)  # what is left there is worth nothing
            return Lost()
        return pending


FAILING = frozenset({1, 4, 5, 9, 14})


@pytest.mark.parametrize("when", ["launched", "landed"])
def test_a_step_that_fails_with_another_in_flight_costs_no_token(when):
    engine = ahead(BlockCache(60, 8), runner_class=LosingRunner, recover=lambda step, error: [])
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
    engine = ahead(BlockCache(60, 8), seats=2, runner_class=LosingRunner)
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
