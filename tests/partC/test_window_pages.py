"""Pages behind a window are given back: what stays is bounded, right, and nobody else's."""

from types import SimpleNamespace

import pytest

from engine import LLM, SamplingParams
from engine.cache.invariants import Invariants
from engine.cache.paged import PagedCache
from tests.part01 import reference
from tests.partC.models import random_ids, saved

P, WINDOW = 4, 6
MOST_BLOCKS = 3  # a window of 6 tokens and a token more lie in at most 3 blocks of 4


def sequence(name: str, token_ids: list[int], parent=None):
    return SimpleNamespace(
        id=name, token_ids=token_ids, num_computed_tokens=0, parent=parent, adapter=None, cache_salt=None,
        wants_every_row=False, error=None,
    )  # fmt: skip


def grow(cache: PagedCache, seq, tokens: int) -> int:
    """Compute `tokens` more tokens, one after another; returns the most blocks that were held."""
    most = 0
    for _ in range(tokens):
        seq.token_ids.append(len(seq.token_ids))
        assert cache.reserve(seq, len(seq.token_ids))
        most = max(most, len(cache.allocations[seq.id].held))
        cache.commit(seq, len(seq.token_ids))
        Invariants(cache).check()
    return most


def test_a_long_sequence_holds_its_window_and_no_more():
    cache = PagedCache(num_blocks=8, block_size=P, window=WINDOW)
    seq = sequence("a", [0])
    assert cache.admit(seq) == 0
    assert grow(cache, seq, 500) <= MOST_BLOCKS, "500 tokens in a cache of 32"
    cache.release(seq)
    Invariants(cache).check()
    assert cache.blocks.num_free == 8, "each block is given back once"


def test_without_a_window_in_every_layer_nothing_is_given_back():
    cache = PagedCache(num_blocks=16, block_size=P, window=None)
    seq = sequence("a", [0])
    cache.admit(seq)
    grow(cache, seq, 40)
    assert len(cache.allocations["a"].held) == 11


@pytest.mark.parametrize(("tokens", "given_back"), [(8, 0), (9, 1), (12, 1), (13, 2)])
def test_a_block_goes_when_no_later_token_sees_it(tokens, given_back):
    """The next query after 9 tokens has position 9, and sees 4 to 9: block 0 has 0 to 3."""
    cache = PagedCache(num_blocks=8, block_size=P, window=WINDOW)
    seq = sequence("a", list(range(tokens)))
    cache.admit(seq)
    cache.reserve(seq, tokens)
    cache.commit(seq, tokens)
    assert cache.allocations["a"].num_blocks_given_back == given_back


def test_what_was_given_back_is_found_until_it_is_overwritten():
    cache = PagedCache(num_blocks=16, block_size=P, window=WINDOW)
    first = sequence("a", list(range(20)))
    cache.admit(first)
    cache.reserve(first, 20)
    cache.commit(first, 20)
    second = sequence("b", list(range(20)))
    assert cache.admit(second) == 16, "the keys are there still, though nobody held them"
    Invariants(cache).check()
    cache.release(first)
    cache.release(second)
    other = sequence("c", list(range(100, 164)))
    assert cache.admit(other) == 0
    assert cache.reserve(other, 64), "all 16 blocks are overwritten"
    cache.commit(other, 64)
    cache.release(other)
    assert cache.admit(sequence("d", list(range(20)))) == 0, "what was overwritten is not found"


def test_a_failed_sequence_leaves_nothing_behind_not_even_what_it_gave_back():
    """The keys of its first blocks may be why it failed, and the same prompt must not start on them."""
    cache = PagedCache(num_blocks=16, block_size=P, window=WINDOW)
    failed, later = sequence("a", list(range(20))), sequence("b", list(range(20)))
    cache.admit(failed)
    cache.reserve(failed, 20)
    cache.commit(failed, 20)
    assert cache.allocations["a"].num_blocks_given_back == 3
    failed.error = "ArithmeticError"
    cache.release(failed)
    assert cache.admit(later) == 0, "a block that a failed sequence gave back is not found"


def test_what_a_failed_sequence_gave_back_stays_with_its_new_owner():
    """A block that others have filled meanwhile is theirs, and is found for their tokens."""
    cache = PagedCache(num_blocks=8, block_size=P, window=WINDOW)
    failed, other = sequence("a", list(range(20))), sequence("b", list(range(100, 120)))
    for seq in (failed, other):  # 5 blocks each, of which the first gives 3 back
        assert cache.admit(seq) == 0
        assert cache.reserve(seq, 20)
        cache.commit(seq, 20)
    given_back = set(cache.allocations["a"].table.blocks[:3].tolist())
    assert given_back & set(cache.allocations["b"].table.blocks.tolist()), "a block has changed hands"
    failed.error = "ArithmeticError"
    cache.release(failed)
    assert cache.admit(sequence("c", list(range(100, 120)))) == 16, "all that the other has computed"


def test_a_child_shares_no_block_that_its_parent_has_given_back():
    cache = PagedCache(num_blocks=32, block_size=P, window=WINDOW, enable_prefix_caching=False)
    parent = sequence("a", list(range(20)))
    cache.admit(parent)
    cache.reserve(parent, 20)
    cache.commit(parent, 20)
    child = sequence("b", list(range(20)), parent)
    assert cache.admit(child) == 0
    Invariants(cache).check()


def test_a_sequence_without_its_beginning_is_not_swapped_out():
    cache = PagedCache(16, P, num_swap_blocks=16, preemption_mode="swap", window=WINDOW)
    long, short = sequence("a", list(range(20))), sequence("b", list(range(50, 55)))
    for seq in (long, short):
        cache.admit(seq)
        cache.reserve(seq, len(seq.token_ids))
        cache.commit(seq, len(seq.token_ids))
        cache.preempt(seq)
    assert "b" in cache.swap
    assert "a" not in cache.swap, "its first keys are there no more: it is computed again"
    assert cache.blocks.num_free == 16


ENGINES = {
    "plain": {},
    "in chunks": {"max_num_batched_tokens": 8},
    "without the prefix cache": {"enable_prefix_caching": False},
    "swapping": {"swap_space": 0.001, "preemption_mode": "swap"},
    "one step ahead": {"async_scheduling": True},
    "drafts from the text": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_two_long_sequences_share_a_memory_that_holds_one(options, tmp_path):
    """16 blocks for two texts of 60 tokens: with a window nobody is preempted, and all tokens are right."""
    folder, theirs = saved("mistral", tmp_path, seed=1, sliding_window=WINDOW)
    block_bytes = 2 * 2 * P * 2 * 12 * 4  # keys and values, layers, tokens, heads, numbers, bytes
    llm = LLM(folder, device="cpu", max_num_seqs=2, block_size=P, kv_cache_memory_bytes=16 * block_bytes,
              **options)  # fmt: skip
    cache = llm.engine.scheduler.cache
    assert cache.num_blocks == 16
    preempted = []
    preempt = cache.preempt
    cache.preempt = lambda seq: (preempted.append(seq.id), preempt(seq))
    prompts = [random_ids(20, seed=seed) for seed in (1, 2)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    for ids, output in zip(prompts, outputs, strict=True):
        want = reference.generate(theirs, ids, max_new_tokens=40, eos_token_id=None)
        assert output.outputs[0].token_ids == want
    assert not preempted, "each holds its window alone"
    Invariants(cache).check()
    assert cache.blocks.num_free == 16


@pytest.mark.parametrize("options", [{}, {"swap_space": 0.001, "preemption_mode": "swap"}])
def test_samples_of_one_prompt_are_those_of_a_large_memory(options, tmp_path):
    """Forks of a short prompt, whose samples then grow; a small memory preempts, and the texts stay."""
    folder, _ = saved("mistral", tmp_path, seed=1, sliding_window=20)
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=40, ignore_eos=True)
    prompt = {"prompt_token_ids": random_ids(10, seed=5)}
    block_bytes = 2 * 2 * P * 2 * 12 * 4
    texts = []
    for blocks in (128, 16):
        llm = LLM(folder, device="cpu", max_num_seqs=4, block_size=P,
                  kv_cache_memory_bytes=blocks * block_bytes, **options)  # fmt: skip
        (output,) = llm.generate([prompt], params)
        texts.append([sample.token_ids for sample in output.outputs])
    assert texts[0] == texts[1]


def test_a_model_with_one_layer_that_sees_all_keeps_its_pages(tmp_path):
    settings = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    folder, _ = saved("qwen2", tmp_path, **settings)
    llm = LLM(folder, device="cpu", max_num_seqs=1, kv_cache_memory_bytes=2**20)
    assert llm.engine.scheduler.cache._window is None
