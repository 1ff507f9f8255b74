"""Slots: who holds one, and that a sequence among others gets the attention it would get alone."""

import random
from dataclasses import replace

import pytest
import torch

from engine.cache.single import CachedForward, SingleCache
from engine.cache.slots import SlotCache, SlotMemory
from engine.execution.runner import EagerWay, ModelRunner
from tests.part06.fakes import CONFIG
from tests.part07.slots import Slots, sequence


@pytest.fixture
def cache():
    """The plan alone."""
    return SlotCache(num_slots=3, slot_tokens=50)


@pytest.fixture
def slots():
    return Slots(CONFIG, num_slots=3, slot_tokens=50)


def test_a_full_cache_admits_again_once_a_sequence_leaves(cache):
    a, b, c, d = map(sequence, "abcd")
    assert [cache.admit(seq) for seq in (a, b, c, d)] == [0, 0, 0, None]
    cache.release(b)
    assert cache.admit(d) == 0
    assert cache.admit(b) is None


def test_the_lowest_free_slot_is_taken_first(cache):
    """Slots in use stay neighbours, since a GPU reads all between the lowest and the highest."""
    a, b, c, d = map(sequence, "abcd")
    for seq in (a, b, c):
        cache.admit(seq)
    assert cache.locate("abc", (0, 1, 2, 3), (0, 0, 0)).tables.tolist() == [[0], [1], [2]]
    cache.release(a)
    cache.release(c)
    cache.admit(d)
    assert cache.locate("d", (0, 1), (0,)).tables.tolist() == [[0]], "0 and 2 are free: 0"


def test_places_are_slots_and_tokens_in_them(cache):
    a, b = sequence("a"), sequence("b")
    cache.admit(a), cache.admit(b)
    tables, slots = cache.locate(("b", "a"), (0, 1, 3), (7, 0, 1))
    assert (tables.tolist(), slots.tolist()) == ([[1], [0]], [57, 0, 1]), "slots of 50 tokens"


def told(slots, seq, value, layer=0) -> float:
    """One step of one token whose key and value are `value`. Its query is 0, so all it sees weighs the same:
    what comes out is the mean of the values seen.
    """
    x = torch.full((1, 1, 1), float(value))
    return round(slots.attention((seq, 1))(layer, torch.zeros(1, 1, 1), x, x).item(), 4)


def test_new_keys_and_values_lie_in_their_own_slot_at_their_positions(slots):
    a, b = sequence("a"), sequence("b")
    slots.admit(a), slots.admit(b)  # slots 0 and 1
    for value in (5, 6, 7):
        told(slots, b, value)
    for memory in (slots.memory.keys, slots.memory.values):
        assert memory[0][1, 0, :4, 0].tolist() == [5, 6, 7, 0], (
            "b's three tokens lie at positions 0, 1, 2 of slot 1"
        )
        assert not memory[0][0].any(), "slot 0 is a's: nothing of b's may lie there"


def test_keys_and_values_are_not_mixed_up(slots):
    a = sequence("a")
    slots.admit(a)
    q, k, v = torch.zeros(1, 1, 1), torch.full((1, 1, 1), 3.0), torch.full((1, 1, 1), 8.0)
    slots.attention((a, 1))(0, q, k, v)
    stored = slots.memory.keys[0][0, 0, 0, 0].item(), slots.memory.values[0][0, 0, 0, 0].item()
    assert stored == (3, 8), "keys go to the keys of a slot and values to its values"


def test_a_query_sees_its_own_slot_as_far_as_it_is_filled(slots):
    a, b = sequence("a"), sequence("b")
    slots.admit(a), slots.admit(b)
    for value in (100, 200):
        told(slots, a, value)
    means = [told(slots, b, value) for value in (3, 5, 10)]
    assert means == [3, 4, 6], (
        "a query sees the values of its own sequence, its own token's included, and no empty place behind: "
        "the means of 3; of 3 and 5; of 3, 5 and 10"
    )


def test_each_layer_has_its_own_keys_and_values():
    slots = Slots(replace(CONFIG, num_layers=2), num_slots=1, slot_tokens=8)
    seq = sequence("a")
    slots.admit(seq)
    for position in range(2):
        attend = slots.attention((seq, 1))
        means = []
        for layer, value in enumerate((1.0 + position, 11.0 + position)):
            x = torch.full((1, 1, 1), value)
            means.append(attend(layer, torch.zeros(1, 1, 1), x, x).item())
    assert means == [1.5, 11.5], "layer 0 was given 1 and 2, layer 1 was given 11 and 12: each keeps its own"


def test_usage_counts_whole_slots(cache):
    assert (cache.usage().num_sequences, cache.usage().tokens_held, cache.usage().tokens_total) == (0, 0, 150)
    cache.admit(sequence("a"))
    cache.admit(sequence("b"))
    usage = cache.usage()
    assert (usage.num_sequences, usage.tokens_held, usage.tokens_total) == (2, 100, 150)
    assert usage.share == pytest.approx(2 / 3)


@pytest.mark.parametrize("leave", ["release", "preempt"])
def test_leaving_frees_the_slot_and_leaving_twice_frees_it_once(cache, leave):
    seqs = [sequence(name) for name in "abc"]
    for seq in seqs:
        cache.admit(seq)
    getattr(cache, leave)(seqs[1])
    cache.release(seqs[1])
    cache.release(sequence("never here"))
    assert cache.usage().num_sequences == 2
    assert cache.admit(sequence("d")) == 0
    assert cache.admit(sequence("e")) is None


@pytest.mark.parametrize(("num_tokens", "room"), [(1, True), (50, True), (51, False)])
def test_a_slot_is_as_long_as_it_is(cache, num_tokens, room):
    seq = sequence("a")
    cache.admit(seq)
    assert cache.reserve(seq, num_tokens) is room
    assert cache.fits(num_tokens) is room


def test_a_slot_is_as_long_as_the_model_sees_unless_told_otherwise():
    memory = SlotMemory(CONFIG, 2)
    assert (memory.slot_tokens, memory.plan().slot_tokens) == (CONFIG.max_positions,) * 2


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_attention_of_mixed_steps_equals_each_sequences_single_cache(q_heads, kv_heads, seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    config = replace(CONFIG, num_layers=2, num_heads=q_heads, num_kv_heads=kv_heads, head_dim=8)
    slots = Slots(config, num_slots=4, slot_tokens=64)
    seqs = [sequence(name, range(60)) for name in "abcd"]
    singles = [SingleCache(config, 64) for _ in seqs]
    for seq in seqs:
        slots.admit(seq)
    while any(seq.num_computed_tokens < 60 for seq in seqs):
        open_ones = [s for s in range(4) if seqs[s].num_computed_tokens < 60]
        chosen = rng.sample(open_ones, rng.randint(1, len(open_ones)))
        new = [min(rng.choice([1, 1, 2, 7, 20]), 60 - seqs[s].num_computed_tokens) for s in chosen]
        batch = slots.take(*((seqs[s], n) for s, n in zip(chosen, new, strict=True)))
        attend = slots.memory.attention(batch)
        for layer in range(2):
            q = torch.randn(batch.num_tokens, q_heads, 8, generator=generator)
            k, v = torch.randn(2, batch.num_tokens, kv_heads, 8, generator=generator)
            out = attend(layer, q, k, v)
            for i, s in enumerate(chosen):
                part = slice(*batch.query_start[i : i + 2])
                expected = singles[s].attend(layer, q[part], k[part], v[part])
                assert (out[part] - expected).abs().max() <= 1e-5, (
                    "each sequence has the attention it has alone: all of its new tokens are stored, and seen"
                )
        for s, n in zip(chosen, new, strict=True):
            singles[s].advance(n)


def test_what_an_earlier_sequence_left_in_a_slot_is_not_seen(model, tokenizer):
    slots = Slots(model.config, num_slots=1)
    for layer in range(model.config.num_layers):
        slots.memory.keys[layer].fill_(torch.nan)
        slots.memory.values[layer].fill_(torch.nan)
    forward = EagerWay(model, slots.memory)
    for text in ("Once upon a time there was a fox", "The cat"):
        seq = sequence(text, tokenizer.encode(text))
        slots.admit(seq)
        logits = forward(slots.take((seq, len(seq.token_ids)))).values
        expected = CachedForward(model)(seq.token_ids)
        assert (logits[0] - expected).abs().max() <= 1e-4
        slots.release(seq)


@pytest.mark.parametrize("seed", range(3))
def test_request_in_a_mixed_batch_has_the_logits_of_the_same_request_alone(model, tokenizer, seed):
    """Sequences of unlike lengths, in steps of unlike sizes, joining and leaving at any time."""
    rng = random.Random(seed)
    texts = [
        "Once upon a time there was a little girl named",
        "The dog",
        "🦊",
        "It was raining. " * 5,
        "Tom and",
    ]
    slots = Slots(model.config, num_slots=3)
    forward = EagerWay(model, slots.memory)
    waiting = [sequence(str(i), tokenizer.encode(text)) for i, text in enumerate(texts)]
    alone = {seq.id: CachedForward(model) for seq in waiting}
    running, checked = [], 0
    while waiting or running:
        while waiting and slots.admit(waiting[0]) == 0:
            running.append(waiting.pop(0))
        chosen = rng.sample(running, rng.randint(1, len(running)))
        batch = slots.take(*((seq, rng.randint(1, seq.num_tokens_to_compute)) for seq in chosen))
        logits = forward(batch).values
        finished = [seq for seq, count in zip(chosen, batch.rows.chosen_counts, strict=True) if count]
        assert len(logits) == len(finished)
        for seq, row in zip(finished, logits, strict=True):
            expected = alone[seq.id](seq.token_ids)
            assert (row - expected).abs().max() <= 1e-4
            seq.token_ids.append(int(expected.argmax()))
            checked += 1
            if len(seq.token_ids) > seq.num_prompt_tokens + 12:
                running.remove(seq)
                slots.release(seq)
    assert checked == 5 * 13
    assert slots.plan.usage().num_sequences == 0


def test_a_step_without_a_finished_prompt_has_no_logits(model):
    slots = Slots(model.config, num_slots=1)
    seq = sequence("a", [5, 6, 7])
    slots.admit(seq)
    batch = slots.take((seq, 2))
    assert EagerWay(model, slots.memory)(batch).values.shape == (0, model.config.vocab_size)


def test_a_step_that_is_run_again_gives_the_same_tokens(model, tokenizer):
    """A record is all that a step is: a pass of it is no memory of having been made."""
    slots = Slots(model.config, num_slots=2)
    runner = ModelRunner([EagerWay(model, slots.memory)], slots.memory)
    seqs = [sequence(text, tokenizer.encode(text)) for text in ("Once upon a time", "The cat")]
    for seq in seqs:
        slots.admit(seq)
    for _ in range(4):
        batch = slots.take(*((seq, seq.num_tokens_to_compute) for seq in seqs))
        tokens = runner.submit(batch).result().tokens
        assert runner.submit(batch).result().tokens == tokens
        for seq, new in zip(seqs, tokens, strict=True):
            seq.token_ids += new
