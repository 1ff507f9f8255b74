"""Which adapter has which slot, and who goes first while one waits for it. No model: keys and numbers."""

from types import SimpleNamespace

import pytest

from engine.lora.slots import AdapterSlots
from engine.requests.request import State
from engine.scheduling.continuous import STEPS_PER_PRIORITY, ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.static import StaticScheduler
from tests.part06.fakes import BlockCache
from tests.part06.steps import make_request, play
from tests.part18.test_manager import RANK, adapter


def slots_with(max_loras: int, keys: str = "abcd") -> AdapterSlots:
    """These adapters are in the host's memory; none has a slot."""
    slots = AdapterSlots(max_loras, RANK, max_tokens=8)
    slots.copied = []
    slots.write = lambda slot, weights: slots.copied.append((slot, weights))
    for key in keys:
        slots.add(key, adapter())
    return slots


def running(*keys: str | None) -> list:
    return [SimpleNamespace(adapter=key) for key in keys]


def test_free_slots_are_given_away_first_the_lowest_of_them():
    slots = slots_with(2)
    assert slots.assign("a", []) is True, "the answer is True or False: slot 0 would be taken for a no"
    assert slots.assign("b", []) is True
    assert slots.slot_of == {"a": 0, "b": 1}, "a free slot goes first, the lowest of them"
    slots.remove("a")
    assert slots.assign("c", [])
    assert slots.slot_of == {"b": 1, "c": 0}, "a's slot is free again, and the lowest free one goes first"


def test_an_adapter_that_has_a_slot_keeps_it():
    slots = slots_with(2)
    slots.assign("a", [])
    slots.assign("b", [])
    assert slots.assign("a", running("a", "b", None)) is True, "also when all slots are in use"
    assert slots.slot_of == {"a": 0, "b": 1}


def test_the_slot_of_a_running_request_is_never_taken():
    slots = slots_with(2)
    slots.assign("a", [])
    slots.assign("b", [])
    assert slots.assign("c", running("a", None, "b", "a")) is False, "each has a running request"
    assert list(slots.slot_of.items()) == [("a", 0), ("b", 1)], "and nothing has changed, nor their order"
    assert slots.assign("c", running("a", None)) is True, "a is in use, but nobody runs with b: it makes room"
    assert slots.slot_of == {"a": 0, "c": 1}, "b had no request"


def test_of_several_that_nobody_runs_with_the_one_assigned_longest_ago_makes_room():
    slots = slots_with(3)
    for key in "abca":
        slots.assign(key, [])
    slots.assign("d", [])
    assert slots.slot_of == {"c": 2, "a": 0, "d": 1}, "b: a was assigned again since"
    assert list(slots.slot_of) == ["c", "a", "d"], "in the order in which they were assigned last"


def batch(*slots: int) -> SimpleNamespace:
    return SimpleNamespace(adapters=slots, query_start=range(len(slots) + 1))


def test_weights_are_copied_once_before_the_first_step_with_them():
    slots = slots_with(2)
    slots.assign("a", [])
    slots.assign("b", [])
    assert slots.copied == [], "nothing is computed with them yet"
    slots.prepare(batch(0, -1))
    assert slots.copied, "who gets a slot is to be copied there (`_occupy`) before its first step"
    assert slots.copied == [(0, slots.adapters["a"])], "b is in no row of this step"
    slots.prepare(batch(1, 0, 1))
    assert slots.copied[1:] == [(1, slots.adapters["b"])]
    slots.prepare(batch(0, 1))
    assert len(slots.copied) == 2, "they are there"


def test_a_copy_that_fails_is_tried_again_by_the_next_step_that_needs_it():
    """The step fails, and others of its kind may not: memory was short, say."""
    slots = slots_with(1)
    slots.assign("a", [])
    write, slots.write = slots.write, None
    with pytest.raises(TypeError):
        slots.prepare(batch(0))
    slots.prepare(batch(-1))
    slots.write = write
    slots.prepare(batch(0))
    assert slots.copied == [(0, slots.adapters["a"])]


def test_an_adapter_that_has_lost_its_slot_before_any_step_is_not_copied():
    slots = slots_with(1)
    slots.assign("a", [])
    slots.assign("b", [])
    slots.prepare(batch(0))
    assert slots.copied == [(0, slots.adapters["b"])]
    slots.assign("a", [])
    slots.remove("a")
    slots.prepare(batch(0))
    assert len(slots.copied) == 1


# In a scheduler's queue


def asked(name: str, key: str | None, prompt: int = 1, output: int = 1, **options):
    request = make_request(name, prompt, output, **options)
    request.adapter = key
    return request


def continuous(max_loras: int, max_num_seqs: int = 8, blocks: int = 100) -> ContinuousScheduler:
    return ContinuousScheduler(BlockCache(blocks, 4), max_num_seqs, 64, adapter_slots=slots_with(max_loras))


def in_each_step(scheduler, steps: int) -> list[list[str]]:
    batches = [play(scheduler) for _ in range(steps)]
    return [[] if batch is None else sorted(batch.ids) for batch in batches]


def test_a_request_without_a_slot_waits_and_those_behind_it_go_first():
    scheduler = continuous(max_loras=1)
    for name, key in [("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b"), ("base", None), ("c1", "c")]:
        scheduler.add(asked(name, key, output=2))
    assert in_each_step(scheduler, 6) == [
        ["a1", "a2", "base"], ["a1", "a2", "base"], ["b1", "b2"], ["b1", "b2"], ["c1"], ["c1"],
    ]  # fmt: skip


def test_as_many_adapters_run_as_there_are_slots_and_each_row_has_its_own():
    scheduler = continuous(max_loras=2)
    for name, key in [("a", "a"), ("b", "b"), ("base", None), ("c", "c"), ("d", "d")]:
        scheduler.add(asked(name, key, output=1 + (name == "a")))
    first = play(scheduler)
    assert dict(zip(first.ids, first.adapters, strict=True)) == {"a": 0, "b": 1, "base": -1}
    second = play(scheduler)
    assert dict(zip(second.ids, second.adapters, strict=True)) == {"a": 0, "c": 1}, "b has ended"
    third = play(scheduler)
    assert dict(zip(third.ids, third.adapters, strict=True)) == {"d": 0}


def test_requests_of_one_adapter_run_in_the_order_in_which_they_came():
    scheduler = continuous(max_loras=1, max_num_seqs=1)
    for name, key in [("b1", "b"), ("a1", "a"), ("b2", "b"), ("a2", "a"), ("b3", "b")]:
        scheduler.add(asked(name, key))
    assert in_each_step(scheduler, 5) == [["b1"], ["a1"], ["b2"], ["a2"], ["b3"]]


def test_a_request_that_waits_for_a_slot_does_not_wait_for_ever():
    """Two requests of the slot's adapter come in every step, so that it never falls idle by itself."""
    scheduler, passed = continuous(max_loras=1, max_num_seqs=4), []
    scheduler.add(asked("first", "a", output=3))
    play(scheduler)
    waits = asked("waits", "b")
    scheduler.add(waits)
    for step in range(2 * STEPS_PER_PRIORITY):
        for number in range(2):
            scheduler.add(asked(f"{step}.{number}", "a", output=2))
        passed.append(play(scheduler))
        if waits.state is State.FINISHED:
            break
    assert waits.state is State.FINISHED, "it starves"
    late = [name for batch in passed for name in batch.ids if name != "waits" and name != "first"]
    assert max(int(name.split(".")[0]) for name in late) < STEPS_PER_PRIORITY + 2, (
        "those who came a level later do not pass it"
    )
    assert len(passed) > STEPS_PER_PRIORITY / 2, "those who came soon after it do"


def test_who_has_no_adapter_is_held_up_by_nobody_who_waits_for_a_slot():
    scheduler = continuous(max_loras=1)
    scheduler.add(asked("long", "a", output=STEPS_PER_PRIORITY + 20))
    play(scheduler)
    scheduler.add(asked("waits", "b"))
    for _ in range(STEPS_PER_PRIORITY + 5):
        play(scheduler)
    scheduler.add(asked("base", None))
    scheduler.add(asked("same", "a"))
    assert sorted(play(scheduler).ids) == ["base", "long"], "`same` would keep the slot from `waits`"


def test_a_better_priority_gets_the_slot_first():
    scheduler = continuous(max_loras=1)
    scheduler.add(asked("a1", "a", output=3))
    play(scheduler)
    scheduler.add(asked("b1", "b"))
    scheduler.add(asked("c1", "c", priority=-1))
    scheduler.add(asked("a2", "a", output=1))
    assert in_each_step(scheduler, 5) == [["a1"], ["a1"], ["c1"], ["b1"], ["a2"]], (
        "a2 is a level worse than c1, so it keeps no slot from it"
    )


def test_one_that_is_aborted_while_it_waits_leaves_nothing_behind():
    scheduler = continuous(max_loras=1)
    scheduler.add(asked("a1", "a", output=3))
    play(scheduler)
    waits = asked("b1", "b")
    scheduler.add(waits)
    play(scheduler)
    assert scheduler.waiting == [waits]
    scheduler.finish(waits)
    assert scheduler.waiting == []
    assert scheduler._adapter_slots.slot_of == {"a": 0}
    scheduler.add(asked("c1", "c"))
    assert in_each_step(scheduler, 2) == [["a1"], ["c1"]]


def test_a_preempted_request_that_has_lost_its_slot_gets_one_again():
    """Memory for less than both: the younger is preempted, and a better one takes its slot meanwhile."""
    scheduler = continuous(max_loras=1, blocks=5)
    preempted = asked("a", "a", prompt=6, output=8)
    scheduler.add(asked("base", None, prompt=6, output=8))
    scheduler.add(preempted)
    while not preempted.num_preemptions:
        play(scheduler)
    scheduler.add(asked("b", "b", output=1, priority=-1))
    assert "b" in play(scheduler).ids
    assert scheduler._adapter_slots.slot_of == {"b": 0}
    while scheduler.waiting or scheduler.running:
        play(scheduler)
    assert preempted.state is State.FINISHED
    assert scheduler._adapter_slots.slot_of == {"a": 0}


@pytest.mark.parametrize("kind", [FIFOScheduler, StaticScheduler])
def test_plainer_schedulers_give_slots_too(kind):
    options = {} if kind is FIFOScheduler else {"max_num_seqs": 3}
    scheduler = kind(BlockCache(100, 4), adapter_slots=slots_with(1), **options)
    for name, key in [("a1", "a"), ("b1", "b"), ("a2", "a")]:
        scheduler.add(asked(name, key))
    want = [["a1"], ["b1"], ["a2"]] if kind is FIFOScheduler else [["a1", "a2"], ["b1"]]
    assert in_each_step(scheduler, len(want)) == want
