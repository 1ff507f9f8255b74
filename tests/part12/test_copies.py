"""Copies of blocks are planned on the host and made by the next step: what stands there when it computes."""

import pytest
import torch

from engine.cache.memory import PageMemory
from engine.execution.runner import ModelRunner
from engine.requests.batch import Copy
from engine.scheduling.scheduler import Queues
from tests.part12.pages import (
    TWO_LAYERS,
    P,
    PageReader,
    admitted,
    make_copies,
    paged,
    sequence,
    step,
    table,
    tokens_in_pages,
)


def swapping(num_blocks=8, **options):
    return paged(num_blocks, num_swap_blocks=8, preemption_mode="swap", **options)


def back(cache, seq):
    seq.num_computed_tokens = cache.admit(seq)


def test_a_plan_touches_no_memory():
    cache = swapping()
    a = admitted(cache, sequence("a", "1234567890"))
    before = cache.memory.memory.clone()
    cache.admit(sequence("a/1", "1234567890", parent=a))
    cache.preempt(a)
    back(cache, a)
    assert torch.equal(cache.memory.memory, before)
    assert [copy.kind for copy in cache.take_copies()] == ["fork", "out", "in"]
    assert cache.take_copies() == (), "they are handed out once"


def test_out_and_in_and_into_anothers_blocks_within_one_step():
    """All planned before one step: b goes out, a comes in where it was and goes again, b comes back."""
    cache = swapping(num_blocks=3, enable_prefix_caching=False)
    a = admitted(cache, sequence("a", "1234567890"))
    cache.preempt(a)
    b = admitted(cache, sequence("b", "abcdefghij"))
    cache.preempt(b)
    a.token_ids.append(7), b.token_ids.append(8)
    back(cache, a)
    cache.preempt(a)
    back(cache, b)
    assert [copy.kind for copy in cache._copies] == ["out", "in", "out", "in"]
    make_copies(cache)
    assert tokens_in_pages(cache, b) == [*map(ord, "abcdefghij")]
    step(cache, (b, 1))
    cache.release(b)
    back(cache, a)
    step(cache, (a, 1))
    assert tokens_in_pages(cache, a) == [*map(ord, "1234567890"), 7]


def test_the_order_of_copies_matters():
    """b's blocks go out before a comes into them; the other way round b would come back with a's tokens."""
    cache = swapping(num_blocks=3, enable_prefix_caching=False)
    a = admitted(cache, sequence("a", "1234567890"))
    cache.preempt(a)
    b = admitted(cache, sequence("b", "abcdefghij"))
    cache.preempt(b)
    back(cache, a)
    copies = cache.take_copies()
    (out,) = [copy for copy in copies if copy.kind == "out"]
    (into,) = [copy for copy in copies if copy.kind == "in"]
    assert set(out.source) == set(into.target), "the same blocks"
    assert out.number < into.number


def runner_over(cache) -> tuple[ModelRunner, Queues]:
    return ModelRunner([PageReader(cache)], cache.memory, before=[cache.check]), Queues(cache)


@pytest.mark.parametrize("fails", ["before its copies", "behind them"])
def test_a_step_that_failed_is_done_again_and_each_copy_is_made_once(fails, monkeypatch):
    """The parent writes behind the copy meanwhile: a second one would bring its words to the child."""
    cache = paged(10)
    a = admitted(cache, sequence("a", "1234567890"))
    child = sequence("a/1", "1234567890", parent=a)
    back(cache, child)
    runner, queues = runner_over(cache)
    made = []
    move = cache.memory.move
    monkeypatch.setattr(cache.memory, "move", lambda copy: (made.append(copy.number), move(copy)))
    cache.reserve(child, 10)
    failed = queues.make_step([(child, 1)])
    if fails == "behind them":
        (way,) = runner.ways
        way.fail_next = RuntimeError("no")
        with pytest.raises(RuntimeError, match="no"):
            runner.submit(failed.batch)
    queues.rollback(failed)
    cache.memory.memory[:, :, table(cache, a)[2], 2:] = torch.nan  # what the child's copy must not have
    again = queues.make_step([(child, 1)])
    assert again.batch.copies == failed.batch.copies, "copies come again with the next step"
    runner.submit(again.batch)
    assert made == [0], "each copy is made once"
    assert tokens_in_pages(cache, child) == child.token_ids


def test_copies_of_a_failed_step_come_before_those_planned_since():
    cache = swapping()
    a = admitted(cache, sequence("a", "1234567890"))
    cache.preempt(a)
    copies = cache.take_copies()
    back(cache, a)
    cache.replan(copies)
    assert [copy.kind for copy in cache.take_copies()] == ["out", "in"]


def test_a_record_may_be_played_again():
    """It says all that a device must know: the same pages, the same tokens, whatever the plan does since."""
    cache = swapping()
    runner, queues = runner_over(cache)
    a, b = sequence("a", "1234567890"), sequence("b", "abc")
    for seq in (a, b):
        back(cache, seq)
        cache.reserve(seq, len(seq.token_ids))
    taken = queues.make_step([(a, 10), (b, 3)])
    first = runner.submit(taken.batch).result()
    runner.before.clear()  # the plan is no longer what it was
    assert runner.submit(taken.batch).result().tokens == first.tokens
    assert tokens_in_pages(cache, a) == a.token_ids


@pytest.mark.parametrize("leaves", ["release", "preempt"])
def test_a_copy_whose_sequence_has_gone_does_no_harm(leaves):
    """Planned, and before the step its sequence leaves; its blocks are another's in that very step."""
    cache = swapping(enable_prefix_caching=False)
    a = admitted(cache, sequence("a", "1234567890"))
    child = sequence("a/1", "1234567890", parent=a)
    back(cache, child)  # plans a fork
    gone = set(table(cache, child)[2:])
    getattr(cache, leaves)(child)
    other = sequence("other", range(50, 66))
    back(cache, other)
    step(cache, (other, 16))
    assert gone <= set(table(cache, other)), "the copy went to a block that is another's now"
    assert tokens_in_pages(cache, other) == other.token_ids, "new tokens are written behind all copies"
    assert tokens_in_pages(cache, a) == a.token_ids
    if leaves == "preempt":
        cache.release(other)
        back(cache, child)
        make_copies(cache)
        assert tokens_in_pages(cache, child) == child.token_ids[:9]


def test_a_runner_without_a_memory_refuses_a_step_with_copies():
    cache = paged(10)
    a = admitted(cache, sequence("a", "1234567890"))
    child = sequence("a/1", "1234567890", parent=a)
    back(cache, child)
    cache.reserve(child, 10)
    with pytest.raises(ValueError, match="1 copies of blocks, and this runner has no memory"):
        ModelRunner([PageReader(cache)]).submit(Queues(cache).make_step([(child, 1)]).batch)


def test_a_new_plan_of_the_same_memory_has_its_copies_made():
    memory = PageMemory(TWO_LAYERS, 8, P, num_swap_blocks=8)
    for _ in range(2):
        cache = memory.plan(preemption_mode="swap")
        seq = sequence("a", "1234")
        cache.admit(seq), cache.reserve(seq, 4), cache.commit(seq, 4)
        memory.memory[:, :, table(cache, seq)] = 7
        cache.preempt(seq)
        memory.apply(cache.take_copies())
        assert (memory.swapped[:, :, 0] == 7).all()
        memory.swapped.zero_()


def test_moves_between_the_devices_memory_and_the_hosts():
    memory = swapping().memory
    memory.memory[:, :, 3] = 7
    memory.move(Copy(0, "out", (3,), (5,)))
    memory.move(Copy(1, "in", (5,), (0,)))
    memory.move(Copy(2, "fork", (0, 3), (1, 2)))
    for block in (0, 1, 2, 3):
        assert (memory.memory[:, :, block] == 7).all()
    assert (memory.memory[:, :, 4:] == 0).all()
    assert (memory.swapped[:, :, 5] == 7).all()
