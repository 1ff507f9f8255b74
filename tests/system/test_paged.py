"""`LLM` on pages: the same tokens as on slots, and every option has its effect or is refused."""

import pytest
import torch

from engine import LLM, SamplingParams
from engine.cache.paged import PagedCache
from engine.cache.slots import SlotCache
from engine.wiring import compose_cache
from engine.wiring.engine_args import EngineArgs
from tests.part06.fakes import assert_idle, told_alone
from tests.part12.pages import TWO_LAYERS, WatchedCache
from tests.part13.aheads import ahead, run_to_end

LILY = "Once upon a time, there was a little girl named Lily. She had a"
PROMPTS = [LILY, "The cat", "Once upon a time, there"]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TOKEN_BYTES = 2 * 6 * 256 * 4  # keys and values, layers, width, fp32


def cache_of(llm: LLM) -> PagedCache | SlotCache:
    return llm.engine.scheduler.cache


@pytest.fixture(scope="module")
def by_slots():
    llm = LLM("storyteller", kv_cache="slots", max_num_seqs=3)
    assert isinstance(cache_of(llm), SlotCache)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 5},
        {"enable_prefix_caching": False},
        {"kv_cache_memory_bytes": 64 * TOKEN_BYTES, "max_model_len": 64},
        {
            "kv_cache_memory_bytes": 64 * TOKEN_BYTES,
            "max_model_len": 64,
            "swap_space": 0.01,
            "preemption_mode": "swap",
        },
    ],
    ids=["", "blocks of 5", "no prefix cache", "little memory", "swapping"],
)
def test_pages_give_the_tokens_that_slots_give(by_slots, options):
    llm = LLM("storyteller", max_num_seqs=3, **options)
    assert isinstance(cache_of(llm), PagedCache)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == by_slots
    if "preemption_mode" in options:
        assert cache_of(llm).num_swapped > 0
    assert cache_of(llm).usage().tokens_held == 0


def test_a_prompt_seen_before_is_not_computed_again():
    llm = LLM("storyteller", max_num_seqs=2)
    first, second = (llm.generate(LILY + LILY, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(second.prompt_token_ids) - 1) // 16 * 16 == 16
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"max_num_seqs": 2, "max_model_len": 100}, 224),
        ({"kv_cache_memory_bytes": 1024 * TOKEN_BYTES}, 1024),
        ({"kv_cache_memory_bytes": 1024 * TOKEN_BYTES, "block_size": 7, "max_model_len": 9}, 1022),
        ({"kv_cache_memory_bytes": 14 * TOKEN_BYTES, "block_size": 7, "max_model_len": 9}, 14),
        (
            {
                "kv_cache": "slots",
                "kv_cache_memory_bytes": 1024 * TOKEN_BYTES,
                "max_num_seqs": 2,
                "max_model_len": 100,
            },
            200,
        ),
    ],
)
def test_memory_is_what_all_need_at_most_or_the_budget_given(options, tokens):
    assert cache_of(LLM("storyteller", **options)).usage().tokens_total == tokens


def test_swap_space_is_in_gib():
    memory = LLM("storyteller", swap_space=0.01, max_num_seqs=1).engine.executor.memory
    assert memory.swapped.shape[2] == int(0.01 * 2**30) // (16 * TOKEN_BYTES) == 54, "blocks"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache": "heap"}, "kv_cache='heap': accepted are paged, slots"),
        ({"preemption_mode": "drop"}, "preemption_mode='drop': accepted are recompute, swap, None"),
        ({"preemption_mode": "swap"}, "preemption_mode='swap' needs a swap_space"),
        ({"swap_space": -1}, "swap_space=-1: a number of GiB"),
        ({"swap_space": "1"}, "swap_space='1': a number is accepted"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization=True: a number is accepted"),
        ({"swap_space": float("inf")}, "swap_space=inf: a number of GiB"),
        ({"block_size": 0}, "block_size=0: at least 1"),
        ({"kv_cache": "slots", "block_size": 16}, "block_size=16 needs kv_cache='paged'"),
        ({"kv_cache": "slots", "enable_prefix_caching": True}, "enable_prefix_caching=True needs"),
        ({"kv_cache": "slots", "swap_space": 1}, "swap_space=1 needs"),
        ({"preemption_mode": "recompute", "swap_space": 1}, "swap_space=1 has no use with preemption_mode"),
        (
            {"kv_cache_memory_bytes": 10**6, "gpu_memory_utilization": 0.5},
            "gpu_memory_utilization=0.5 has no use with kv_cache_memory_bytes=1000000",
        ),
        ({"kv_cache": "slots", "preemption_mode": "recompute"}, "preemption_mode='recompute' needs"),
    ],
)
def test_an_option_that_could_have_no_effect_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        EngineArgs(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_memory_bytes": 100_000}, "max_model_len=1024 needs .* of 16 tokens; .* max_model_len=0"),
        ({"kv_cache_memory_bytes": 100_000, "kv_cache": "slots"}, "there are 100,000, enough for .*=8"),
        (
            {"kv_cache_memory_bytes": 13 * TOKEN_BYTES, "block_size": 7, "max_model_len": 9},
            "max_model_len=9 needs .* bytes of cache in blocks of 7 tokens; .* enough for max_model_len=7",
        ),
        ({"kv_cache_memory_bytes": 10**15}, "kv_cache_memory_bytes=1000000000000000: cpu has .* bytes"),
        ({"block_size": 10**9, "kv_cache_memory_bytes": 10**8}, "blocks of 1000000000 tokens"),
        ({"swap_space": 1e6}, "swap_space=1000000.0: cpu has .* bytes of memory"),
        ({"swap_space": 0.0001}, "swap_space=0.0001: a block takes 196,608 bytes"),
    ],
)
def test_memory_that_is_too_little_or_not_there_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LLM("storyteller", **options)


def test_memory_that_others_have_is_told_in_a_line(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(compose_cache, "PageMemory", full)
    with pytest.raises(ValueError, match="no memory for 12,582,912 bytes of keys and values: CUDA out"):
        LLM("storyteller", max_num_seqs=1)


def params(seed: int) -> SamplingParams:
    """Greedy and seeded, ending by length, by the end of sequence, and by stop strings."""
    return SamplingParams(
        temperature=0 if seed % 2 else 0.9, seed=seed, max_tokens=5 + seed % 17, min_tokens=seed % 4,
        stop=("a",) if seed % 5 == 0 else (),
    )  # fmt: skip


@pytest.mark.parametrize("num_blocks", [26, 60])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_one_step_ahead_over_pages_gives_everybodys_own_tokens(num_blocks, mode):
    """A step is launched while the last one's tokens are unknown: they are neither shared nor swapped."""
    cache = WatchedCache(TWO_LAYERS, num_blocks, 8, num_swap_blocks=30, preemption_mode=mode)
    engine = ahead(cache, seats=8, budget=48)
    prompts = {str(i): "the same beginning " * (i % 3) + "abcdefg"[i % 7] * 3 * i for i in range(1, 20)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params(int(name)))
    done = run_to_end(engine)
    cache.invariants.check()
    for name, prompt in prompts.items():
        assert done[name].outputs[0].token_ids == told_alone(prompt, params(int(name))).token_ids
    assert cache.hit_tokens > 0
    assert cache.num_swapped > 0 or mode == "recompute" or num_blocks == 60
    assert_idle(engine)
