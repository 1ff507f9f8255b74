"""Attention on numbers that can be followed on paper: the article's example, and one rule at a time."""

import pytest
import torch
from torch import Tensor

from engine.attention.dense import causal_attention
from tests.part01.outcome import outcome

# The article's three tokens, of two numbers each, in one head.
Q = [[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]]
K = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
V = [[4.0, 0.0], [0.0, 4.0], [2.0, 2.0]]


def attend(q, k, v) -> Tensor:
    """One head: lists of [tokens][Dh] -> [tokens, Dh]."""
    out = outcome(causal_attention, *(torch.tensor(x, dtype=torch.float32)[:, None] for x in (q, k, v)))
    assert isinstance(out, Tensor), f"causal_attention raised {out}"
    assert out.shape == (len(q), 1, len(v[0])), "[Tq, Hq, Dh] comes back: a row for each query"
    return out[:, 0]


def close(got: Tensor, want: list, atol: float = 0.01) -> bool:
    return torch.allclose(got, torch.tensor(want), atol=atol, rtol=0)


def test_a_token_alone_gets_its_own_value():
    got = attend(Q[:1], K[:1], V[:1])
    assert close(got, V[:1]), "a token sees itself: alone, all of its weight is on its own value"


def test_a_querys_weights_sum_to_1():
    got = attend([[0.0, 0.0]] * 3, K, V)[2]
    assert close(got, [2.0, 2.0]), "a query's weights are positive and sum to 1: equal scores, equal weights"


def test_the_first_token_of_several_sees_itself_alone():
    got = attend(Q, K, V)[0]
    assert close(got, V[0]), "a token sees itself, no token sees a later one: the first gets its own value"


def test_scores_are_divided_by_the_root_of_the_heads_width():
    got = attend(Q, K, V)[1]
    assert close(got, [1.32, 2.68]), "the scores of the second token are 0 and 1, each divided by √Dh = 1.41"


def test_the_articles_example():
    got = attend(Q, K, V)
    want = [[4.00, 0.00], [1.32, 2.68], [1.71, 2.29]]
    assert close(got, want, atol=0.006), "the weighted mean of the values, as the article computes it by hand"


def test_a_large_score_does_not_overflow():
    got = attend([[200.0, 0.0]], K[:1], V[:1])
    assert close(got, V[:1]), (
        "e to the power of a large score is infinite: softmax subtracts the largest first"
    )


def test_a_hidden_score_takes_no_weight_however_large():
    got = attend([[200.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [1.0, 0.0]], V[:2])[0]
    assert close(got, V[0]), "the future is hidden before the softmax: behind it, a large score has taken all"


def test_fewer_queries_than_keys_are_the_last_tokens():
    got, whole = attend(Q[1:], K, V), attend(Q, K, V)
    assert close(got, whole[1:].tolist()), (
        "Tq queries are the sequence's last Tq tokens, and see all before them"
    )


def test_a_single_query_is_last_and_sees_every_key():
    got, whole = attend(Q[2:], K, V), attend(Q, K, V)
    assert close(got, whole[2:].tolist()), "a single query is the last token: it sees every key"


def test_the_scale_is_that_of_one_head():
    """Two heads with the article's numbers: each gives what it gives alone."""
    q, k, v = (torch.tensor(x)[:, None].expand(3, 2, 2) for x in (Q, K, V))
    got = outcome(lambda: causal_attention(q, k, v)[1].tolist())
    assert got[0] == got[1], (
        "both heads have the same numbers, and give the same: out[i, h] is query i's mean in head h"
    )
    assert got[0] == pytest.approx([1.32, 2.68], abs=0.01), (
        "scores are divided by √Dh, whatever the number of heads"
    )


@pytest.mark.parametrize("heads", [1, 3])
def test_heads_do_not_mix(heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 4, heads, 2, generator=generator)
    alone = [causal_attention(q[:, [h]], k[:, [h]], v[:, [h]]) for h in range(heads)]
    got = causal_attention(q, k, v)
    assert torch.allclose(got, torch.cat(alone, dim=1), atol=1e-5), "each head attends for itself"


def test_neighbouring_query_heads_share_a_key_head():
    """Hq = 4, Hkv = 2: each query picks one of two tokens, and gets that token's value from its key head."""
    first, second = 100.0, -100.0  # a query that fits the first token's key, or the second's
    q = torch.tensor([first, second, first, second]).view(1, 4, 1)
    k = torch.tensor([1.0, -1.0]).view(2, 1, 1).expand(2, 2, 1)
    v = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).view(2, 2, 1)  # [tokens, Hkv, Dh]
    got = outcome(lambda: causal_attention(q, k, v).flatten().tolist())
    assert got == [1.0, 2.0, 3.0, 4.0], "Hq / Hkv *neighbouring* query heads share a key head"
