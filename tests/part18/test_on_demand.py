"""Offline, whoever asks for an adapter has it loaded; of those not in use, the ones used last stay."""

import pytest

from engine.decoding.params import ParameterError
from engine.lora.on_demand import OnDemand
from engine.lora.request import LoRARequest
from tests.part18.test_manager import RANK, Played, adapter

A, B, C, D = (LoRARequest(name, number, f"folder/{name}") for number, name in enumerate("abcd", 1))


@pytest.fixture
def played(monkeypatch):
    """With two slots; `read` says which folders were read, and `loaded` which names are there."""
    played = Played(2)
    played.read = []

    def read(folder, config, max_rank, dtype):
        assert max_rank == RANK, "a rank that no slot has room for is refused when it is read"
        assert dtype == played.slots.dtype, "and numbers that no slot can hold"
        played.read.append(folder)
        return adapter()

    monkeypatch.setattr("engine.lora.on_demand.read_adapter", read)
    played.on_demand = OnDemand(played.manager, None)
    played.loaded = lambda: set(played.manager.key_of)
    return played


def test_each_gets_its_key_and_is_read_once(played):
    assert [played.on_demand.key(wanted) for wanted in (A, B, A)] == ["a@1", "b@2", "a@1"]
    assert [played.on_demand.key(wanted) for wanted in (B, A)] == ["b@2", "a@1"]
    assert played.read == [A.lora_path, B.lora_path], "what is loaded is not read again"


def test_the_one_whose_last_use_is_longest_ago_makes_room(played):
    for wanted in (A, B, A, C):
        played.on_demand.key(wanted)
    assert played.loaded() == {"a", "c"}, "a was used after b"
    played.on_demand.key(B)
    assert played.loaded() == {"c", "b"}
    assert set(played.slots.adapters) == {"c@3", "b@4"}, "nothing stays in memory of those that went"


def test_an_adapter_that_a_request_has_stays_and_nobody_is_refused(played):
    ends = [played.begins(played.on_demand.key(wanted), "waiting") for wanted in (A, B, C)]
    assert played.loaded() == {"a", "b", "c"}, "more than there are slots: their requests wait"
    assert played.on_demand.key(A) == "a@1", "it was never away"
    played.on_demand.key(D)
    assert played.loaded() == {"a", "b", "c", "d"}
    for end in ends:
        end()
    played.on_demand.key(D)
    assert played.loaded() == {"a", "d"}, "c and b were used before a"


@pytest.mark.parametrize(
    "wanted",
    [
        LoRARequest("a", 1, "elsewhere"),
        LoRARequest("a", 7, A.lora_path),
        LoRARequest("z", 1, A.lora_path),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(played, wanted):
    played.on_demand.key(A)
    with pytest.raises(ParameterError, match="contradicts"):
        played.on_demand.key(wanted)
    assert (played.loaded(), played.read) == ({"a"}, [A.lora_path])
