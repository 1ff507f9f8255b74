"""Slots: which calls of the kernel a step makes, and what is left in a slot that another takes."""

from dataclasses import replace

import pytest
import torch

from engine.attention.dense import dense_attention
from engine.attention.interface import Spans
from tests.part06.fakes import CONFIG
from tests.part07.slots import Slots, sequence


@pytest.fixture
def watched():
    """(slots, calls): four slots whose kernel notes (queries, keys, spans) of each call."""
    calls = []

    def kernel(q, k, v, spans):
        calls.append((len(q), len(k), spans))
        return dense_attention(q, k, v, spans)

    return Slots(replace(CONFIG, num_layers=3), 4, 16, kernel=kernel), calls


def run_layers(slots, *work):
    batch = slots.take(*work)
    attend = slots.memory.attention(batch)
    for layer in range(3):
        attend(layer, *[torch.ones(batch.num_tokens, 1, 1)] * 3)


def test_prompts_from_their_start_share_one_call_of_the_kernel_per_layer(watched):
    slots, calls = watched
    seqs = [sequence("a"), sequence("b", [1, 2, 3, 4, 5]), sequence("c", [1, 2])]
    for seq in seqs:
        slots.admit(seq)
    run_layers(slots, (seqs[0], 3), (seqs[1], 5), (seqs[2], 2))
    assert calls == [(10, 10, Spans((0, 3, 8, 10), (0, 3, 8, 10)))] * 3
    assert len({id(spans) for *_, spans in calls}) == 1, "spans are made once per step, not once per layer"


def test_prompts_with_another_sequence_between_them_are_calls_of_their_own(watched):
    slots, calls = watched
    a, b, c = sequence("a"), sequence("b", range(5)), sequence("c", [1, 2])
    for seq in (a, b, c):
        slots.admit(seq)
    slots.take((b, 4))
    run_layers(slots, (a, 3), (b, 1), (c, 2))
    assert [call[:2] for call in calls] == [(3, 3), (2, 2), (1, 5)] * 3


def test_a_chunk_behind_the_start_is_a_call_on_the_keys_of_its_slot(watched):
    slots, calls = watched
    a, b = sequence("a", range(9)), sequence("b", range(4))
    slots.admit(a)
    slots.admit(b)
    slots.take((a, 5))
    run_layers(slots, (a, 4), (b, 4))
    expected = [(4, 4, Spans((0, 4), (0, 4))), (4, 9, Spans((0, 4), (0, 9)))] * 3
    assert calls == expected, "four queries, the last of nine tokens: the spans are of num_new and of end"


def test_the_kernel_reads_the_slot_where_it_lies():
    given = []

    def kernel(q, k, v, spans):
        given.extend((k, v))
        return dense_attention(q, k, v, spans)

    slots = Slots(replace(CONFIG, num_kv_heads=2, num_heads=2, head_dim=4), 2, 16, kernel=kernel)
    a = sequence("a", range(9))
    slots.admit(a)
    slots.take((a, 8))
    slots.attention((a, 1))(0, *[torch.ones(1, 2, 4)] * 3)
    memory = slots.memory.keys[0], slots.memory.values[0]
    same = [
        seen.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        for seen, whole in zip(given, memory, strict=True)
    ]
    assert same == [True, True], "the kernel gets views of the slot: nothing is copied, however long it is"


def test_one_sequence_alone_is_decoded_by_the_kernel(watched):
    slots, calls = watched
    a = sequence("a", range(9))
    slots.admit(a)
    slots.take((a, 8))
    run_layers(slots, (a, 1))
    assert calls == [(1, 9, Spans((0, 1), (0, 9)))] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("leave", ["release", "preempt"])
@pytest.mark.parametrize("drafts", [0, 3], ids=["", "drafts rejected"])
def test_a_nan_left_in_a_slot_reaches_nobody(dtype, leave, drafts):
    """In bf16 on a CPU, as on a GPU, slots are read past their ends and masked: NaN · 0 is NaN."""
    slots = Slots(replace(CONFIG, num_layers=2), num_slots=3, slot_tokens=16, dtype=dtype)

    def step(*work, value=1.0):
        batch = slots.take(*work)
        attend = slots.memory.attention(batch)
        x = torch.full((batch.num_tokens, 1, 1), value, dtype=dtype)
        return torch.stack([attend(layer, x, x, x) for layer in range(2)])

    low, high = sequence("low", range(13)), sequence("high", range(13))
    broken = sequence("broken", range(8))
    for seq in (low, broken, high):
        slots.admit(seq)
    broken.draft_ids = [1] * drafts
    step((broken, 8 + drafts), value=torch.nan)
    broken.draft_ids, broken.num_computed_tokens = [], 8
    broken.token_ids.append(1)
    step((broken, 1), value=torch.nan)
    getattr(slots.plan, leave)(broken)
    step((low, 12), (high, 12))
    assert torch.isfinite(step((low, 1), (high, 1))).all(), "the empty slot between two was read"
    fresh = sequence("fresh", range(2))
    slots.admit(fresh)
    step((fresh, 1))
    low.token_ids.append(1)
    assert torch.isfinite(step((low, 1), (fresh, 1))).all(), "the next in the slot sees what was left"


def test_a_slot_is_cleaned_when_another_begins_there():
    slots = Slots(replace(CONFIG, num_layers=2), num_slots=2, slot_tokens=16, dtype=torch.bfloat16)
    before, after = sequence("a", range(8)), sequence("b", range(2))
    slots.admit(before)
    slots.attention((before, 8))(1, *[torch.ones(8, 1, 1, dtype=torch.bfloat16)] * 3)
    slots.release(before)
    slots.admit(after)
    slots.attention((after, 2))
    assert not any(layer.any() for layer in (*slots.memory.keys, *slots.memory.values))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_step_on_a_gpu_waits_for_nothing():
    config = replace(CONFIG, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
    slots = Slots(config, num_slots=4, slot_tokens=32, device="cuda")
    a, b, c, d = (sequence(name, range(n)) for name, n in zip("abcd", (20, 9, 9, 5), strict=True))
    for seq in (a, b, c):
        slots.admit(seq)
    works = [[(a, 5)], [(a, 6), (b, 8), (c, 8)], [(a, 8), (b, 1), (c, 1)], [(a, 1)]]
    x = {n: torch.randn(n, 4, 8, device="cuda") for n in (1, 5, 10, 22)}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for work in works:
            batch = slots.take(*work)
            attend = slots.memory.attention(batch)
            for layer in range(2):
                q = x[batch.num_tokens]
                attend(layer, q, q[:, :2], q[:, 2:])
        slots.release(b)
        slots.admit(d)
        slots.attention((d, 5))  # clears what b left
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_sequence_alone_is_not_planned_too(watched, monkeypatch):
    slots, _ = watched
    a = sequence("a", range(9))
    slots.admit(a)
    slots.take((a, 8))
    monkeypatch.setattr("engine.cache.slots.plan_decode", lambda *_: pytest.fail("a plan takes longer"))
    run_layers(slots, (a, 1))
