"""Names, keys and slots, while requests come and go."""

from types import SimpleNamespace

import pytest

from engine.lora.manager import AdapterError, AdapterManager


class Slots:
    """Slots without tensors."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras, self.slot_of, self.put_in = max_loras, {}, []

    @property
    def free(self):
        return sorted(set(range(self.max_loras)) - set(self.slot_of.values()))

    def put(self, key, adapter):
        if adapter == "spoilt":
            raise MemoryError
        assert self.free, "an adapter is laid into a free slot"
        self.put_in.append(adapter)
        self.slot_of[key] = self.free[0]

    def drop(self, key):
        del self.slot_of[key]


class Played:
    """A manager, and a scheduler whose requests are what the test says."""

    def __init__(self, max_loras: int) -> None:
        self.scheduler = SimpleNamespace(running=[], waiting=[])
        self.manager = AdapterManager(Slots(max_loras), self.scheduler)
        self.slots = self.manager.slots

    def begins(self, key: str, queue: str = "running"):
        request = SimpleNamespace(adapter=key)
        getattr(self.scheduler, queue).append(request)
        return lambda: getattr(self.scheduler, queue).remove(request)


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


def test_a_name_leads_to_a_key_that_new_requests_may_have(played):
    key = played.manager.load("poetry", "v1")
    assert played.manager.key_of == {"poetry": key}
    assert key in played.manager
    assert key in played.slots.slot_of, "and it lies in a slot"
    assert "poetry" not in played.manager, "the engine knows keys, not names"


def test_no_key_is_ever_used_again(played):
    keys = set()
    for _ in range(4):
        keys.add(played.manager.load("poetry", "v1"))
        played.manager.unload("poetry")
    assert len(keys) == 4, "else a reloaded adapter would find the old one's keys and values"


def test_a_name_that_is_taken_is_refused(played):
    key = played.manager.load("poetry", "v1")
    rule = "a name that is taken is refused"
    refused(rule, "'poetry' is loaded already", "already_loaded", played.manager.load, "poetry", "v2")
    assert played.manager.key_of == {"poetry": key}, "a refused load changes nothing"
    assert list(played.slots.slot_of) == [key]


def test_an_adapter_that_is_unloaded_is_given_to_nobody_who_comes(played):
    key = played.manager.load("poetry", "v1")
    played.manager.unload("poetry")
    assert key not in played.manager
    rule = "what is not loaded cannot be unloaded"
    refused(rule, "'poetry' is not loaded", "not_loaded", played.manager.unload, "poetry")


@pytest.mark.parametrize("queue", ["running", "waiting"])
def test_a_request_keeps_its_adapter_until_it_has_ended(queue):
    """Waiting ones, too: they were promised it, or were preempted."""
    played = Played(1)
    key = played.manager.load("poetry", "v1")
    ends = played.begins(key, queue)
    played.manager.unload("poetry")
    assert key in played.slots.slot_of, "a request in flight keeps its adapter"
    rule, words = "a slot waits for who has its adapter", "1 of them until requests that have them end"
    refused(rule, words, "no_free_slot", played.manager.load, "business", "v1")
    assert key in played.slots.slot_of, "a refused load takes nothing from anybody"
    ends()
    played.manager.load("business", "v1")
    assert list(played.slots.slot_of) == [played.manager.key_of["business"]], "the slot is used again"


def test_named_adapters_are_never_dropped_for_a_new_one(played):
    played.manager.load("a", "v1")
    played.manager.load("b", "v1")
    rule, words = "an idle adapter with a name stays", "all 2 slots for adapters are taken (max_loras)"
    refused(rule, words, "no_free_slot", played.manager.load, "c", "v1")
    assert sorted(played.manager.key_of) == ["a", "b"]
    assert len(played.slots.slot_of) == 2, "an idle adapter with a name stays"


def test_what_nobody_needs_is_dropped_and_what_somebody_needs_is_not(played):
    kept = played.manager.load("a", "v1")
    gone = played.manager.load("b", "v1")
    played.begins(kept)
    played.manager.unload("a")
    played.manager.unload("b")
    new = played.manager.load("c", "v1")
    assert set(played.slots.slot_of) == {kept, new}, f"{gone} had no request any more"


def test_a_name_gets_another_adapter_in_place_and_requests_keep_theirs(played):
    old = played.manager.load("poetry", "v1")
    played.begins(old)
    new = played.manager.load("poetry", "v2", load_inplace=True)
    assert new != old
    assert played.manager.key_of == {"poetry": new}
    assert old in played.slots.slot_of, "a request in flight keeps its adapter"
    assert old not in played.manager, "new requests get the new one"
    assert played.slots.put_in == ["v1", "v2"]


def test_in_place_needs_no_second_slot_when_nobody_uses_the_old_one():
    played = Played(1)
    old = played.manager.load("poetry", "v1")
    new = played.manager.load("poetry", "v2", load_inplace=True)
    assert list(played.slots.slot_of) == [new], f"{old} makes room for its successor"


def test_in_place_takes_no_other_names_adapter():
    played = Played(1)
    key = played.manager.load("poetry", "v1")
    rule, words = "in place, only the name's own adapter makes room", "slots for adapters are taken"
    refused(rule, words, "no_free_slot", played.manager.load, "business", "v1", load_inplace=True)
    assert played.manager.key_of == {"poetry": key}


def test_in_place_is_refused_while_the_old_one_holds_the_only_slot():
    played = Played(1)
    old = played.manager.load("poetry", "v1")
    played.begins(old)
    rule, words = "a slot waits for who has its adapter", "slots for adapters are taken"
    refused(rule, words, "no_free_slot", played.manager.load, "poetry", "v2", load_inplace=True)
    assert played.manager.key_of == {"poetry": old}, "a refused load changes nothing"
    assert old in played.manager


def test_in_place_for_a_new_name_is_a_load(played):
    assert played.manager.load("poetry", "v1", load_inplace=True) in played.manager


def test_a_load_that_fails_half_way_leaves_no_name_that_leads_nowhere():
    """In place, the old adapter has made room already."""
    played = Played(1)
    played.manager.load("poetry", "v1")
    with pytest.raises(MemoryError):
        played.manager.load("poetry", "spoilt", load_inplace=True)
    assert all(key in played.slots.slot_of for key in played.manager.key_of.values()), (
        "a name leads to a slot"
    )
    played.manager.load("poetry", "v2")
