"""Decoding many sequences in one go equals each one's attention alone, and sees nobody else's keys."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine.attention.dense import causal_attention
from engine.attention.slot_decode import Padded, Ragged, plan_decode, supports_ragged
from engine.models.checkpoint import ZOO

KINDS = {torch.float32: Ragged, torch.float64: Padded}  # on a CPU


def scene(heads, kv_heads, dtype, seed, left_behind=0.0):
    """A step of S sequences in slots of their own: (slots, lens, q, keys, values)."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    S, N, M, Dh = rng.randint(1, 6), 8, 40, 16
    slots, lens = rng.sample(range(N), S), [rng.randint(1, M) for _ in range(S)]
    q = torch.randn(S, heads, Dh, generator=generator, dtype=dtype)
    keys, values = torch.randn(2, N, kv_heads, M, Dh, generator=generator, dtype=dtype)
    for cache in (keys, values):
        own = torch.zeros(N, 1, M, 1, dtype=torch.bool)
        for slot, n in zip(slots, lens, strict=True):
            own[slot, :, :n] = True
        cache.masked_fill_(~own, left_behind)
    return slots, lens, q, keys, values


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_each_sequence_gets_the_attention_it_would_get_alone(heads, kv_heads, dtype, seed):
    slots, lens, q, keys, values = scene(heads, kv_heads, dtype, seed, left_behind=3.0)
    plan = plan_decode(slots, lens, heads, keys)
    assert type(plan) is KINDS[dtype]
    out = plan(q, keys, values)
    for s, (slot, n) in enumerate(zip(slots, lens, strict=True)):
        own = (cache[slot, :, :n].transpose(0, 1) for cache in (keys, values))
        assert (out[s] - causal_attention(q[s : s + 1], *own)[0]).abs().max() <= 1e-5


def test_what_others_left_behind_is_never_read_on_a_cpu():
    slots, lens, q, keys, values = scene(4, 2, torch.float32, 1, left_behind=torch.nan)
    assert supports_ragged(keys)
    assert torch.isfinite(plan_decode(slots, lens, 4, keys)(q, keys, values)).all()


def test_one_plan_serves_every_layer():
    slots, lens, q, keys, values = scene(4, 4, torch.float32, 2)
    plan = plan_decode(slots, lens, 4, keys)
    first, other = plan(q, keys, values), plan(q, values, keys)
    assert torch.equal(plan(q, keys, values), first)
    assert not torch.equal(first, other)


def test_keys_may_lie_anywhere():
    """Pages in any order, as a block table gives them (Part 12): places are an argument."""
    slots, lens, q, keys, values = scene(4, 2, torch.float32, 3)
    expected = plan_decode(slots, lens, 4, keys)(q, keys, values)
    order = torch.randperm(keys.shape[0] * keys.shape[2], generator=torch.Generator().manual_seed(0))
    moved = [cache.transpose(1, 2).flatten(0, 1)[order] for cache in (keys, values)]  # [tokens, Hkv, Dh]
    place = torch.argsort(order).numpy() * 2  # of a token's first head, in rows of Dh
    token_rows = np.concatenate(
        [place[slot * 40 : slot * 40 + n] for slot, n in zip(slots, lens, strict=True)]
    )
    plan = Ragged(token_rows, lens, num_heads=4, num_kv_heads=2, head_stride=1, keys=moved[0])
    assert (plan(q, *moved) - expected).abs().max() <= 1e-6


def test_it_warns_of_nothing_and_leaves_its_hosts_filters_alone():
    """In a process of its own: torch warns of the first sparse tensor, and of no other."""
    code = """
import warnings, torch
warnings.simplefilter("error")
before = list(warnings.filters)
from engine.attention.slot_decode import Ragged, plan_decode
plan = plan_decode([0], [3], 1, torch.zeros(1, 1, 4, 8))
assert type(plan) is Ragged
plan(torch.zeros(1, 1, 8), *torch.zeros(2, 1, 1, 4, 8))
assert warnings.filters == before
"""
    subprocess.run([sys.executable, "-c", code], cwd=ZOO.parents[1], check=True)
