"""`_merge` alone, on parts that were worked out by hand."""

from math import log

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.kernels.paged_attention import _merge
from tests.part13.test_paged_attention import DEVICE

NAN = float("nan")
# Four tokens: e^score 2, 4 | 8, 2, and values 10, 30 | 20, 8. Each part is relative to its own maximum.
FIRST = (log(4), 1.5, 35.0)  # maximum, total = 1/2 + 1, weighted = 1/2 · 10 + 30
SECOND = (log(8), 1.25, 22.0)  # total = 1 + 1/4, weighted = 20 + 1/4 · 8
NOTHING = (NAN, NAN, NAN)


def merged(heads, lens, tokens=2, Dh=1):
    """heads[S][Hq]: the parts (maximum, total, weighted) of each; a value is the same number Dh times.
    -> out[S, Hq, Dh], and whether anything was written behind it.
    """
    given = torch.tensor(heads, device=DEVICE, dtype=torch.float32)  # [S, Hq, SPLITS, 3]
    S, Hq, splits, _ = given.shape
    maxima, totals, weighted = (x.contiguous() for x in given.unbind(-1))
    parts = weighted[..., None].expand(-1, -1, -1, Dh).contiguous()
    out = torch.full((S * Hq * Dh + 32,), -1.0, device=DEVICE)
    _merge[(Hq, S)](
        parts, maxima, totals, torch.tensor(lens, device=DEVICE, dtype=torch.int32), out,
        TOKENS=tokens, HQ=Hq, DH=Dh, DH_PADDED=16 if Dh <= 16 else 32, SPLITS=splits,
    )  # fmt: skip
    return out[: S * Hq * Dh].view(S, Hq, Dh), bool((out[S * Hq * Dh :] != -1).any())


def assert_mean(heads, lens, want, rule, **options):
    got, _ = merged(heads, lens, **options)
    got = got[..., 0].tolist()
    pairs = [pair for mine, theirs in zip(got, want, strict=True) for pair in zip(mine, theirs, strict=True)]
    assert all(abs(a - b) < 1e-4 for a, b in pairs), f"{rule}: {want}, got {got}"


def test_two_parts_with_one_maximum():
    first, second = (0.0, 1.5, 30.0), (0.0, 0.5, 4.0)
    assert_mean([[[first, second]]], [4], [[17.0]], "parts with one maximum: (30 + 4) / (1.5 + 0.5)")


def test_two_parts_by_hand():
    assert_mean(
        [[[FIRST, SECOND]]], [4], [[19.75]],
        "the first part is relative to ln 4, the largest maximum is ln 8: its total and its weighted sum are "
        "halved, and (17.5 + 22) / (0.75 + 1.25) is",
    )  # fmt: skip


def test_the_larger_maximum_may_come_first():
    assert_mean([[[SECOND, FIRST]]], [4], [[19.75]], "the order of the parts changes nothing")


def test_maxima_too_large_for_exp():
    first, second = (1000.0, 1.5, 30.0), (1000.0, 0.5, 4.0)
    assert_mean([[[first, second]]], [4], [[17.0]], "only differences of maxima are raised: e^1000 is inf")


def test_a_part_without_tokens_was_never_written():
    parts = [FIRST, SECOND, NOTHING, NOTHING]
    assert_mean([[parts]], [2], [[19.75]], "2 tokens in shares of 1: parts 2 and 3 hold anything", tokens=1)


def test_a_part_without_tokens_is_no_maximum():
    parts = [(-1000.0, 1.5, 30.0), (-1000.0, 0.5, 4.0), NOTHING, NOTHING]
    rule = "a part without tokens reads as a maximum of -inf, not 0: the others would shrink to nothing"
    assert_mean([[parts]], [2], [[17.0]], rule, tokens=1)


def test_shares_are_whole_tiles():
    parts = [(0.0, 2.0, 34.0), NOTHING]
    assert_mean([[parts]], [4], [[17.0]], "4 tokens in tiles of 64: one share has them all", tokens=64)


@pytest.mark.parametrize("Dh", [3, 16, 24])
def test_a_mean_is_as_wide_as_a_head(Dh):
    got, behind = merged([[[FIRST, SECOND]]], [4], Dh=Dh)
    assert torch.allclose(got, torch.full_like(got, 19.75)), "every one of DH columns has its mean"
    assert not behind, "no more than DH numbers are written"


def test_every_head_of_every_sequence_has_its_own_parts():
    def one(mean):
        return [(0.0, 1.0, mean), (0.0, 1.0, mean)]

    heads = [[one(1.0), one(2.0)], [one(3.0), one(4.0)], [one(5.0), one(6.0)]]
    assert_mean(heads, [4, 4, 4], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "parts[S, HQ, SPLITS]")


def test_sequences_of_unlike_lengths():
    heads = [[[FIRST, SECOND]], [[(0.0, 2.0, 34.0), NOTHING]]]
    assert_mean(heads, [4, 2], [[19.75], [17.0]], "each sequence's own length says which parts it has")
    assert_mean(heads[::-1], [2, 4], [[17.0], [19.75]], "each sequence's own length says which parts it has")
