"""What names stand for, while requests come and go."""

from types import SimpleNamespace

import pytest

from engine.decoding.params import NotFoundError
from engine.lora.manager import AdapterError, AdapterManager
from engine.lora.slots import AdapterSlots

RANK = 8


class Played:
    """A manager over slots without a model, and a scheduler whose requests are what the test says."""

    def __init__(self, max_loras: int) -> None:
        self.scheduler = SimpleNamespace(running=[], waiting=[])
        self.slots = AdapterSlots(max_loras, RANK, max_tokens=8)
        self.manager = AdapterManager(self.slots, self.scheduler)

    def begins(self, key: str, queue: str = "running"):
        request = SimpleNamespace(adapter=key)
        getattr(self.scheduler, queue).append(request)
        return lambda: getattr(self.scheduler, queue).remove(request)


def adapter(rank: int = 1) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, scale=1.0, layers={}, folder="")


def refused(rule: str, words: str, code: str, call, *arguments, **options) -> None:
    """AdapterError with these words and this code; else `rule` is broken."""
    found = None
    try:
        call(*arguments, **options)
    except AdapterError as error:
        found = error
    assert found, rule
    assert words in str(found)
    assert found.code == code


@pytest.fixture
def played():
    return Played(2)


def test_a_name_stands_for_a_key_and_the_key_for_the_adapter(played):
    poetry = adapter()
    key = played.manager.load("poetry", poetry)
    assert played.manager.key_of == {"poetry": key}
    assert played.manager.key("poetry") == key != "poetry", "the engine knows keys, not names"
    assert played.slots.adapters[key] is poetry
    with pytest.raises(NotFoundError, match="adapter 'business' is not loaded"):
        played.manager.key("business")
    with pytest.raises(NotFoundError, match="is not loaded"):
        played.manager.key(key)


def test_no_key_is_ever_used_again(played):
    keys = set()
    for _ in range(4):
        keys.add(played.manager.load("poetry", adapter()))
        played.manager.unload("poetry")
    assert len(keys) == 4, "else a reloaded adapter would find the old one's keys and values"


def test_a_name_that_is_taken_is_refused(played):
    key = played.manager.load("poetry", adapter())
    rule = "a name that is taken is refused"
    refused(rule, "'poetry' is loaded already", "already_loaded", played.manager.load, "poetry", adapter())
    assert played.manager.key_of == {"poetry": key}, "a refused load changes nothing"
    assert list(played.slots.adapters) == [key]


def test_a_rank_that_no_slot_has_room_for_is_refused_when_it_is_loaded(played):
    """Else its requests would wait for ever."""
    with pytest.raises(ValueError, match=r"^rank=9: at most max_lora_rank=8 is accepted"):
        played.manager.load("poetry", adapter(RANK + 1))
    assert played.manager.key_of == {}, "a refused load changes nothing"


def test_what_is_unloaded_is_given_to_nobody_who_comes(played):
    played.manager.load("poetry", adapter())
    played.manager.unload("poetry")
    with pytest.raises(NotFoundError, match="'poetry' is not loaded"):
        played.manager.key("poetry")
    rule = "what is not loaded cannot be unloaded"
    refused(rule, "'poetry' is not loaded", "not_loaded", played.manager.unload, "poetry")
    assert played.slots.adapters == {}, "nobody needs it any more"


def test_more_adapters_may_be_loaded_than_there_are_slots(played):
    keys = [played.manager.load(name, adapter()) for name in "abcd"]
    assert [played.manager.key(name) for name in "abcd"] == keys
    assert list(played.slots.adapters) == keys
    assert played.slots.slot_of == {}, "a slot is for requests that run"


@pytest.mark.parametrize("queue", ["running", "waiting"])
@pytest.mark.parametrize("change", ["unload", "in place"])
def test_an_adapter_stays_as_long_as_a_request_has_it(played, queue, change):
    """Waiting ones, too: they were promised it, or were preempted."""
    old, poetry = played.manager.load("poetry", first := adapter()), None
    ends = played.begins(old, queue)
    assert played.slots.assign(old, [])
    if change == "unload":
        played.manager.unload("poetry")
    else:
        poetry = played.manager.load("poetry", adapter(), load_inplace=True)
        assert played.manager.key("poetry") == poetry != old, "who comes gets the new one"
    other = played.manager.load("business", adapter())
    assert played.slots.adapters[old] is first, "a request that has begun keeps its adapter"
    assert old in played.slots.slot_of, "and the slot that it is in"
    ends()
    played.manager.key("business")
    assert set(played.slots.adapters) == {other} | ({poetry} if poetry else set()), "then it goes"
    assert old not in played.slots.slot_of, "and its slot is free"


def test_in_place_for_a_new_name_is_a_load(played):
    key = played.manager.load("poetry", adapter(), load_inplace=True)
    assert played.manager.key("poetry") == key


def test_a_name_that_gets_another_adapter_always_stands_for_one(played):
    """Other threads read it: a moment without it is a request that is refused."""

    class Watched(dict):
        def pop(self, *_):
            raise AssertionError("the name was away")

        __delitem__ = pop

    played.manager.load("poetry", adapter())
    played.manager.key_of = Watched(played.manager.key_of)
    played.manager.load("poetry", adapter(), load_inplace=True)
    assert played.manager.key("poetry") == "poetry@2"
