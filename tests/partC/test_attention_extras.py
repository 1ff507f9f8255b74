"""Windows, soft caps, sinks and scales: each path against the formula in float64, written anew."""

import math

import pytest
import torch

from engine.attention.dense import causal as plain_causal
from engine.attention.extras import (
    PLAIN,
    AttentionExtras,
    ExtrasAttend,
    attend_with,
    causal,
    dense_extras_attention,
)
from engine.attention.extras_paged import GatheredWithExtras
from engine.attention.paged import Pages

Hq, Hkv, Dh, P = 4, 2, 8, 4
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
EXTRAS = {
    "plain": PLAIN,
    "scale": AttentionExtras(scale=0.5),
    "softcap": AttentionExtras(softcap=1.5),
    "sinks": AttentionExtras(sinks=SINKS),
    "window of 1": AttentionExtras(window=1),
    "window smaller than a block": AttentionExtras(window=3),
    "window of a block": AttentionExtras(window=4),
    "window across blocks": AttentionExtras(window=6),
    "window longer than all": AttentionExtras(window=1000),
    "all four": AttentionExtras(scale=0.7, window=5, softcap=2.0, sinks=SINKS),
}
every_extra = pytest.mark.parametrize("name", EXTRAS)
# Sequences as (computed before, new tokens).
STEPS = {
    "a prompt": [(0, 11)],
    "one token": [(10, 1)],
    "a chunk behind others": [(7, 6)],
    "three prompts": [(0, 5), (0, 1), (0, 9)],
    "three decodes": [(10, 1), (3, 1), (0, 1)],
    "a mixed step": [(10, 1), (0, 7), (5, 3), (17, 1)],
}
every_step = pytest.mark.parametrize("step", STEPS)


def formula(q, k, v, extras: AttentionExtras) -> torch.Tensor:
    """One sequence, one head and one query at a time: q[Tq, Hq, Dh], k and v[Tk, Hkv, Dh] -> [Tq, Hq, Dh]."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    for i in range(len(q)):
        position = len(k) - len(q) + i
        first = 0 if extras.window is None else max(0, position + 1 - extras.window)
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = k[first : position + 1, group] @ q[i, head]
            scores = scores * (extras.scale or 1 / math.sqrt(q.shape[2]))
            if extras.softcap:
                scores = extras.softcap * torch.tanh(scores / extras.softcap)
            terms = scores.exp()
            total = terms.sum()
            if extras.sinks is not None:
                total = total + extras.sinks[head].double().exp()
            out[i, head] = (terms[:, None] * v[first : position + 1, group]).sum(0) / total
    return out.float()


def numbers(tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, Hq, Dh, generator=generator)
    k, v = (torch.randn(tokens, Hkv, Dh, generator=generator) for _ in range(2))
    return q, k, v


@every_extra
def test_the_formula(name):
    q, k, v = numbers(11)
    for new in (11, 4, 1):
        got = dense_extras_attention(q[-new:], k, v, EXTRAS[name])
        torch.testing.assert_close(got, formula(q[-new:], k, v, EXTRAS[name]))
    torch.testing.assert_close(causal(0, q, k, v, EXTRAS[name]), formula(q, k, v, EXTRAS[name]))


def in_pages(step: list[tuple[int, int]]):
    """The step's queries, keys and values in pages anywhere, where they lie, and what each sequence has."""
    blocks = torch.randperm(128, generator=torch.Generator().manual_seed(1)).tolist()
    keys, values = (torch.full((128, P, Hkv, Dh), torch.nan) for _ in range(2))
    queries, tables, sequences, query_start = [], [], [], [0]
    for s, (old, new) in enumerate(step):
        q, k, v = numbers(old + new, seed=s)
        table = [blocks.pop() for _ in range(-(-(old + new) // P))]
        for i in range(old + new):
            keys[table[i // P], i % P], values[table[i // P], i % P] = k[i], v[i]
        tables.append(torch.tensor(table).numpy())
        queries.append(q[old:])
        sequences.append((q[old:], k, v))
        query_start.append(query_start[-1] + new)
    pages = Pages.of(tables, [old + new for old, new in step], P)
    return torch.cat(queries), keys, values, pages, tuple(query_start), sequences


def in_triton(*given):
    """The same in our kernel, in the interpreter on a CPU."""
    pytest.importorskip("triton", reason="the kernel needs the package triton")
    from engine.kernels.extras_attention import PagedExtras

    return PagedExtras(*given)


@pytest.mark.parametrize("make", [GatheredWithExtras, in_triton])
@every_step
@every_extra
def test_pages_give_the_formula(name, step, make):
    q, keys, values, pages, query_start, sequences = in_pages(STEPS[step])
    plan = make(pages, query_start, keys)
    want = torch.cat([formula(*sequence, EXTRAS[name]) for sequence in sequences])
    for _ in range(2):  # two layers
        torch.testing.assert_close(plan(q, keys, values, EXTRAS[name]), want)


LONG = [(0, 150), (140, 1), (100, 70)]  # tokens: several tiles of the kernel, several blocks of the window


@pytest.mark.parametrize("make", [GatheredWithExtras, in_triton])
@pytest.mark.parametrize("window", [None, 1, 40, 64, 100])
def test_long_sequences(window, make):
    extras = AttentionExtras(window=window, sinks=SINKS, softcap=3.0)
    q, keys, values, pages, query_start, sequences = in_pages(LONG)
    want = torch.cat([formula(*sequence, extras) for sequence in sequences])
    torch.testing.assert_close(make(pages, query_start, keys)(q, keys, values, extras), want)


@pytest.mark.parametrize("make", [GatheredWithExtras, in_triton])
def test_pages_behind_the_window_are_not_read(make):
    extras = AttentionExtras(window=6)
    q, keys, values, pages, query_start, sequences = in_pages(STEPS["a mixed step"])
    for table, length, new in zip(pages.tables, pages.lens, (1, 7, 3, 1), strict=True):
        for block in table[: max(0, length - new - 6 + 1) // P]:
            keys[block], values[block] = torch.nan, torch.nan  # given back, and somebody else's now
    want = torch.cat([formula(*sequence, extras) for sequence in sequences])
    torch.testing.assert_close(make(pages, query_start, keys)(q, keys, values, extras), want)


def test_layers_of_a_step_may_want_different_things():
    q, keys, values, pages, query_start, sequences = in_pages(STEPS["a mixed step"])
    plan = GatheredWithExtras(pages, query_start, keys)
    for name in [*EXTRAS, *reversed(EXTRAS)]:
        want = torch.cat([formula(*sequence, EXTRAS[name]) for sequence in sequences])
        torch.testing.assert_close(plan(q, keys, values, EXTRAS[name]), want, msg=name)


def test_an_attention_that_has_no_extras_refuses_them_by_name():
    q, k, v = numbers(5)
    torch.testing.assert_close(attend_with(plain_causal, 0, q, k, v, PLAIN), formula(q, k, v, PLAIN))
    wanted = AttentionExtras(window=3, softcap=1.0)
    with pytest.raises(ValueError, match="layer 1 wants window, softcap, and the attention that was handed"):
        attend_with(plain_causal, 1, q, k, v, wanted)
    assert isinstance(causal, ExtrasAttend)
    torch.testing.assert_close(attend_with(causal, 0, q, k, v, wanted), formula(q, k, v, wanted))


@pytest.mark.parametrize(
    ("field", "value"), [("window", 0), ("window", 2.0), ("window", True), ("softcap", 0.0), ("scale", -1.0)]
)
def test_a_number_that_means_nothing_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value!r}: .* is accepted"):
        AttentionExtras(**{field: value})
