"""`_attend`, from small to large, on pages of 4 tokens whose scores and values were chosen by hand.

A token here is a pair: e^score, and the number of which its value is made.
"""

from math import log

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.kernels.paged_attention import _attend, paged_attention
from tests.part13.test_paged_attention import DEVICE

P, BLOCKS = 4, 40
NEUTRAL = (1.0, 0.0)


def attended(sequences, tables, heads=1, group=1, splits=1, Dh=16):
    """sequences[S][n][heads]: tokens -> [S][heads · group]: the mean of each query head's values.

    What belongs to nobody is NaN. A query is √Dh in its first column and a key its score there: q·k / √Dh.
    """
    memory = torch.full((2, BLOCKS, P, heads, Dh), float("nan"))
    for tokens, table in zip(sequences, tables, strict=True):
        for i, by_head in enumerate(tokens):
            for head, (weight, value) in enumerate(by_head):
                memory[0, table[i // P], i % P, head] = torch.tensor([log(weight)] + [0.0] * (Dh - 1))
                memory[1, table[i // P], i % P, head] = value
    width = max(map(len, tables)) + 64 // P  # a tile may reach behind the last block: block 0 is nobody's
    padded = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32)
    lens = torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int32)
    q = torch.zeros(len(sequences), heads * group, Dh)
    q[..., 0] = Dh**0.5
    keys, values = memory.to(DEVICE)
    out = paged_attention(q.to(DEVICE), keys, values, padded.to(DEVICE), lens.to(DEVICE), splits)
    assert torch.allclose(out, out[..., :1].expand_as(out), equal_nan=True), "all columns of a value alike"
    return [[round(x, 3) for x in row] for row in out[..., 0].tolist()]


def alone(tokens):
    """One key head."""
    return [[token] for token in tokens]


def assert_mean(got, want, rule):
    assert got == want, f"{rule}: {want}, got {got}"


GUARD = 40 * 32  # numbers behind what a kernel may write


def written(splits, num_tokens, Dh):
    """`_attend` alone, for one head of one sequence: out, parts, maxima and totals, which were full of 7 and
    have GUARD numbers more than are needed.
    """
    memory = torch.zeros(2, BLOCKS, P, 1, Dh, device=DEVICE)
    sizes = Dh, splits * Dh, splits, splits
    out, parts, maxima, totals = (torch.full((size + GUARD,), 7.0, device=DEVICE) for size in sizes)
    tables = torch.arange(BLOCKS, device=DEVICE, dtype=torch.int32)[None]
    lens = torch.tensor([num_tokens], device=DEVICE, dtype=torch.int32)
    q = torch.zeros(Dh + GUARD, device=DEVICE)
    _attend[(1, 1, splits)](
        q, *memory, tables, lens, out, parts, maxima, totals, BLOCKS, 1.0,
        HQ=1, HKV=1, DH=Dh, DH_PADDED=32, P=P, TOKENS=64, PADDED=16, SPLITS=splits,
    )  # fmt: skip
    return out, parts, maxima, totals


def test_nothing_is_written_beside_a_heads_own_numbers():
    out, *others = written(1, 3, Dh=24)
    assert (out[:24] == 0).all(), "with SPLITS = 1 the mean goes to out: here all values are 0"
    assert (out[24:] == 7).all(), "of PADDED rows HQ / HKV are stored, and of DH_PADDED numbers DH"
    for numbers in others:
        assert (numbers == 7).all(), "with SPLITS = 1 nothing goes to parts, maxima and totals"


def test_rows_that_pad_have_no_results():
    """Before all others: what is written behind the end of these two may end pytest itself."""
    _, _, maxima, totals = written(2, 3, Dh=24)
    assert (maxima[2:] == 7).all(), "a maximum for each of HQ / HKV rows whose part has tokens, and no other"
    assert (totals[2:] == 7).all(), "a total for each of HQ / HKV rows whose part has tokens, and no other"


def test_one_token():
    got = attended([alone([(5.0, 7.0)])], [[2]])
    assert_mean(got, [[7.0]], "one token, in block 2: nothing behind it is read or has weight, the mean is")


def test_a_score_far_below_zero():
    got = attended([alone([(1e-30, 7.0)])], [[2]])
    assert_mean(
        got, [[7.0]], "one token with a score of -69: what is not there scores -inf, not 0; the mean is"
    )


def test_scores_that_are_all_far_below_zero():
    got = attended([alone([(1e-60, 7.0)])], [[2]])
    assert_mean(
        got, [[7.0]], "a score of -138: the maximum begins at -inf, since it may be below 0; the mean is"
    )


def test_two_tokens_by_hand():
    got = attended([alone([(1.0, 8.0), (3.0, 4.0)])], [[2]])
    assert_mean(got, [[5.0]], "scores are q·k · scale, weights e^score: (1 · 8 + 3 · 4) / 4 is")


def test_tokens_in_several_blocks():
    values = [1.0, 2.0, 4.0, 8.0, 16.0, 38.0]
    got = attended([alone([(1.0, value) for value in values])], [[5, 3]])
    assert_mean(got, [[11.5]], "token i lies in block table[i // P], at place i % P; the mean of six is")


def test_every_sequence_has_its_own_table_and_length():
    sequences = [alone([(1.0, 3.0)] * 5), alone([(1.0, 9.0)] * 2), alone([(1.0, 6.0)] * 9)]
    got = attended(sequences, [[7, 1], [4], [2, 9, 0]])
    assert_mean(got, [[3.0], [9.0], [6.0]], "sequence s reads row s of tables[S, width], lens[s] tokens")


def test_every_head_has_its_own_keys():
    tokens = [[(1.0, 8.0), (1.0, 30.0)], [(3.0, 4.0), (1.0, 10.0)]]
    got = attended([tokens], [[3]], heads=2)
    assert_mean(got, [[5.0, 20.0]], "keys[B, P, HKV, DH]: a head's row of a token; the heads' means are")


def test_query_heads_share_a_key_head():
    tokens = [[(1.0, 8.0), (1.0, 30.0)], [(3.0, 4.0), (1.0, 10.0)]]
    got = attended([tokens, tokens], [[3], [1]], heads=2, group=2)
    want = [[5.0, 5.0, 20.0, 20.0]] * 2
    assert_mean(got, want, "HQ / HKV neighbouring query heads share a key head; the four heads' means are")


def test_a_second_tile_with_a_new_maximum():
    tokens = alone([(1.0, 10.0)] * 64 + [(64.0, 20.0)])
    got = attended([tokens], [range(17)])
    rule = "a new maximum: what was summed so far, total and values, shrinks; (64 · 10 + 64 · 20) / 128 is"
    assert_mean(got, [[15.0]], rule)


def test_a_second_tile_that_brings_no_new_maximum():
    tokens = alone([(64.0, 20.0)] + [NEUTRAL] * 63 + [(1.0, 60.0)])
    got = attended([tokens], [range(17)])
    rule = "the maximum is of all tiles so far, not the last one's; (64 · 20 + 60) / 128 is"
    assert_mean(got, [[10.469]], rule)


def test_a_third_tile():
    tokens = alone([(1.0, 10.0)] * 64 + [(64.0, 20.0)] + [NEUTRAL] * 63 + [(61.0, 30.0)])
    got = attended([tokens], [range(33)])
    want = [[round((640 + 1280 + 1830) / (64 + 64 + 63 + 61), 3)]]
    assert_mean(got, want, "the new maximum is kept for the tile after it; the mean is")


@pytest.mark.parametrize("Dh", [24, 48])
def test_heads_whose_width_is_no_power_of_two(Dh):
    tokens = [[(1.0, 8.0), (1.0, 30.0)], [(3.0, 4.0), (1.0, 10.0)]]
    got = attended([tokens], [[3]], heads=2, Dh=Dh)
    assert_mean(got, [[5.0, 20.0]], "a row is DH numbers long, DH_PADDED are taken, those behind DH are 0")


def test_parts_of_a_sequence():
    tokens = alone([(1.0, 10.0)] * 64 + [(64.0, 20.0)])
    got = attended([tokens], [range(17)], splits=2)
    rule = "two parts, of 64 tokens and of 1: each stores its own sum, maximum and total; together they give"
    assert_mean(got, [[15.0]], rule)


def test_parts_that_have_nothing_to_do():
    sequences = [alone([(1.0, 10.0)] * 64 + [(64.0, 20.0)]), alone([(1.0, 3.0)])]
    got = attended(sequences, [list(range(17)), [20]], splits=4)
    assert_mean(
        got, [[15.0], [3.0]], "part p begins at p · share, and one that begins behind the end is none"
    )


def test_parts_of_several_heads():
    tokens = [[(1.0, 10.0), (1.0, 1.0)]] * 64 + [[(64.0, 20.0), (64.0, 3.0)]]
    got = attended([tokens, tokens], [range(17), range(17)], heads=2, group=2, splits=2)
    want = [[15.0, 15.0, 2.0, 2.0]] * 2
    assert_mean(got, want, "parts[S, HQ, SPLITS, DH], maxima and totals[S, HQ, SPLITS]; the means are")


def test_a_part_writes_three_results_and_one_without_tokens_none():
    out, parts, maxima, totals = written(2, 3, Dh=24)
    assert (out == 7).all(), "with SPLITS > 1 `_merge` writes out, later"
    got = parts[:24].tolist(), maxima[0].item(), totals[0].item()
    assert got == ([0.0] * 24, 0.0, 3.0), (
        "a part of three tokens with scores and values of 0: its three results"
    )
    assert (parts[24:] == 7).all(), "the second part has no tokens and writes nothing; nor do rows that pad"
    assert maxima[1] == totals[1] == 7, "the second part has no tokens and writes nothing"


@pytest.mark.parametrize("num_tokens", [64, 128], ids=["one part", "two parts"])
def test_a_part_that_begins_at_the_end_has_no_tokens(num_tokens):
    _, parts, maxima, totals = written(4, num_tokens, Dh=24)
    full = num_tokens // 64
    assert totals[:full].tolist() == [64.0] * full, "the tokens fill whole parts"
    rule = "token `length` is behind the end: a part whose first token it is has none, and writes nothing"
    assert (maxima[full:] == 7).all(), rule
    assert (totals[full:] == 7).all(), rule
    assert (parts[full * 24 :] == 7).all(), rule
