"""Offline, whoever asks for an adapter has it loaded; the one not used for longest makes room."""

import pytest

from engine.decoding.params import ParameterError
from engine.lora.on_demand import OnDemand
from engine.lora.request import LoRARequest
from tests.part18.test_manager import Played

A, B, C, D = (LoRARequest(name, number, f"folder/{name}") for number, name in enumerate("abcd", 1))


@pytest.fixture
def played(monkeypatch):
    """With two slots; `read` says which folders were read, and `loaded` which names are there."""
    played = Played(2)
    played.slots.max_lora_rank, played.read = 8, []

    def read(folder, config, max_rank):
        assert max_rank == 8, "a rank that no slot has room for is refused when it is read"
        played.read.append(folder)
        return folder

    monkeypatch.setattr("engine.lora.on_demand.read_adapter", read)
    played.on_demand = OnDemand(played.manager, None)
    played.loaded = lambda: set(played.manager.key_of)
    return played


def test_each_gets_its_key_and_is_read_once(played):
    keys = played.on_demand.keys([A, None, B, A])
    assert keys == ["a@1", None, "b@2", "a@1"]
    assert played.on_demand.keys([B, A]) == ["b@2", "a@1"]
    assert played.read == [A.lora_path, B.lora_path], "what is loaded is not read again"
    assert played.slots.put_in == [A.lora_path, B.lora_path]


def test_the_one_whose_last_use_is_longest_ago_makes_room(played):
    played.on_demand.keys([A, B])
    played.on_demand.keys([A])
    played.on_demand.keys([C])
    assert played.loaded() == {"a", "c"}, "a was used after b"
    played.on_demand.keys([B])
    assert played.loaded() == {"c", "b"}


def test_who_is_asked_for_in_the_same_call_stays(played):
    played.on_demand.keys([A, B])
    played.on_demand.keys([C, A])
    assert played.loaded() == {"a", "c"}, "a's last use is longest ago, but it is wanted now"
    assert played.read.count(A.lora_path) == 1, "so it was never away"


def test_who_has_a_request_stays(played):
    (key, _) = played.on_demand.keys([A, B])
    ends = played.begins(key)
    played.on_demand.keys([C])
    assert played.loaded() == {"a", "c"}, "a's last use is longest ago, but a request has it"
    with pytest.raises(ParameterError, match="all 2 slots"):
        played.on_demand.keys([B, D])
    assert "a" in played.loaded()
    ends()
    played.on_demand.keys([B, D])
    assert played.loaded() == {"b", "d"}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ([LoRARequest("a", 1, "elsewhere")], "contradicts"),
        ([LoRARequest("a", 7, A.lora_path)], "contradicts"),
        ([LoRARequest("z", 1, A.lora_path)], "contradicts"),
        ([B, LoRARequest("b", 2, "elsewhere")], "contradicts"),
        ([A, B, C], "names 3 adapters: max_loras=2"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(played, wanted, words):
    played.on_demand.keys([A])
    with pytest.raises(ParameterError, match=words):
        played.on_demand.keys(wanted)
    assert (played.loaded(), played.read) == ({"a"}, [A.lora_path])
