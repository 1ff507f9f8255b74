"""Slots: who holds one, and that a sequence among others gets the attention it would get alone."""

import random
from dataclasses import replace

import pytest
import torch

from engine.attention.dense import dense_attention
from engine.attention.interface import Spans
from engine.cache.single import CachedForward, SingleCache
from engine.cache.slots import SlotCache, SlotMemory
from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState
from engine.execution.runner import EagerWay, ModelRunner
from engine.requests.batch import Batch
from engine.requests.request import Request
from engine.scheduling.scheduler import Queues
from tests.part06.fakes import CONFIG


def sequence(name: str, token_ids=(1, 2, 3)) -> Request:
    params = SamplingParams()
    return Request(
        name, name, list(token_ids), len(token_ids), params, None, SamplingState(params, token_ids, [], 0)
    )


class Slots:
    """Memory and its plan."""

    def __init__(self, config, num_slots, slot_tokens=None, **options) -> None:
        self.memory = SlotMemory(config, num_slots, slot_tokens, **options)
        self.plan = self.memory.plan()
        self.admit, self.release = self.plan.admit, self.plan.release

    def take(self, *work) -> Batch:
        """A step of these (request, new tokens)."""
        return Queues(self.plan).make_step(work).batch

    def attention(self, *work):
        """Its `attend`."""
        return self.memory.attention(self.take(*work))


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
        finished = [seq for seq, count in zip(chosen, batch.rows.counts, strict=True) if count]
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
