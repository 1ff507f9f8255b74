"""Scores of rows of logits: from four tokens by hand to random rows beside PyTorch's own."""

import math

import pytest
import torch

from engine.decoding.logprobs import Scores, score, score_in_chunks
from tests.part01.outcome import outcome

# Logits whose softmax is known: e to the power of ln(p) is p, and the four are 1 together.
BY_HAND = torch.tensor([[0.1, 0.5, 0.25, 0.15]]).log()  # [1, 4]
RANDOM = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 5  # [R, V]


def of(token_id: int, n: int = 0, logits=BY_HAND) -> Scores:
    return score(logits, torch.tensor([token_id]), n)


def near(values, expected) -> bool:
    return torch.allclose(torch.as_tensor(values).double(), torch.as_tensor(expected).double(), atol=1e-5)


@pytest.mark.parametrize(("token_id", "p"), [(0, 0.1), (1, 0.5), (2, 0.25), (3, 0.15)])
def test_a_log_probability_is_the_natural_logarithm_of_the_probability(token_id, p):
    assert near(of(token_id).logprobs, [math.log(p)]), (
        f"the token has probability {p}, so its log probability is ln {p} = {math.log(p):.4f}, "
        f"not {float(of(token_id).logprobs):.4f}"
    )


def test_logits_are_no_log_probabilities_until_all_tokens_share_one():
    shifted = of(1, logits=BY_HAND + 7)
    assert near(shifted.logprobs, [math.log(0.5)]), "7 more on every logit changes no probability"


@pytest.mark.parametrize(("token_id", "rank"), [(1, 1), (2, 2), (3, 3), (0, 4)])
def test_a_rank_counts_from_1_for_the_likeliest(token_id, rank):
    assert of(token_id).ranks.tolist() == [rank], "a rank is 1 more than the number of likelier tokens"


def test_equally_likely_tokens_share_a_rank():
    logits = torch.tensor([[2.0, 1.0, 2.0, 1.0]])
    ranks = [int(of(token_id, logits=logits).ranks) for token_id in range(4)]
    assert ranks == [1, 3, 1, 3], "a rank is 1 more than the number of likelier tokens: equals share one"


def test_the_likeliest_tokens_come_in_order_with_their_log_probabilities():
    scores = of(0, n=3)
    assert scores.top_ids.tolist() == [[1, 2, 3]], "the n likeliest tokens, the likeliest first"
    assert of(1, n=2).top_ids.tolist() == [[1, 2]], (
        "the row's own token is in the list if it is among the likeliest"
    )
    assert near(scores.top_logprobs, [[math.log(p) for p in (0.5, 0.25, 0.15)]]), (
        "the likeliest tokens have log probabilities too: of the whole softmax, not of the n alone"
    )


def test_none_of_the_likeliest_may_be_asked_for():
    scores = of(2, n=0)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (1, 0), "n = 0: [R, 0], none of the likeliest"
    assert near(scores.logprobs, [math.log(0.25)]), "the row's own token is scored whatever n is"


def test_a_vocabulary_smaller_than_n_gives_all_it_has():
    scores = outcome(of, 0, 20)
    assert isinstance(scores, Scores), f"n = 20 of V = 4 tokens: all 4 come back; score raised {scores}"
    assert scores.top_ids.tolist() == [[1, 2, 3, 0]], (
        "n = 20 of V = 4 tokens: all 4 come back, the row's own among them"
    )


def test_each_row_has_a_token_of_its_own():
    logits = BY_HAND.repeat(4, 1)
    scores = score(logits, torch.tensor([3, 0, 1, 2]), 1)
    assert near(scores.logprobs, [math.log(p) for p in (0.15, 0.1, 0.5, 0.25)]), (
        "row r is scored for token_ids[r]"
    )
    assert [tuple(part.shape) for part in scores] == [(4,), (4,), (4, 1), (4, 1)], (
        "logprobs[R], ranks[R], top_ids[R, n], top_logprobs[R, n]"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_scored_in_fp32(dtype):
    logits = (RANDOM / 3).to(dtype)
    ids = torch.arange(6)
    scores = score(logits, ids, 4)
    exact = logits.double().log_softmax(-1)
    assert scores.logprobs.dtype == scores.top_logprobs.dtype == torch.float32, "log probabilities are fp32"
    assert near(scores.logprobs.double(), exact[ids, ids]), (
        f"{dtype} logits become fp32 before the softmax, not after: its sum over V tokens loses digits"
    )


def test_the_logits_are_left_as_they_are():
    logits = BY_HAND + 7
    before = logits.clone()
    of(1, n=2, logits=logits)
    assert torch.equal(logits, before), "`logits` is the caller's: nothing is subtracted in its place"


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[500.0, 499.0, -500.0]])
    assert near(of(1, logits=logits).logprobs, [-1.3132617]), (
        "e to the power of 500 is more than fp32 holds: log_softmax subtracts the largest logit first"
    )
    assert near(of(2, logits=logits).logprobs, [-1000.3132617]), (
        "a probability of e to the power of -1,000 is 0 in fp32, and the logarithm of 0 is -inf: the "
        "logarithm is taken by a subtraction (log_softmax), never of a probability"
    )


def test_random_rows_equal_log_softmax():
    ids = torch.tensor([5, 299, 0, 17, 80, 123])
    scores, exact = score(RANDOM, ids, 20), RANDOM.double().log_softmax(-1)
    assert near(scores.logprobs.double(), exact[range(6), ids]), "row r is scored for token_ids[r]"
    assert scores.ranks.tolist() == [
        1 + sum(other > row[id] for other in row) for row, id in zip(RANDOM, ids, strict=True)
    ], "a rank is 1 more than the number of likelier tokens"
    same = torch.equal(scores.top_ids, exact.topk(20).indices)
    assert same, "the n likeliest tokens of each row, the likeliest first"
    near_top = near(scores.top_logprobs.double(), exact.topk(20).values)
    assert near_top, "the likeliest have log probabilities, no logits: of the whole softmax"


@pytest.mark.parametrize("rows_at_once", [1, 2, 4, 6, 50])
def test_in_chunks_the_scores_are_the_same_and_no_more_logits_are_there_at_once(monkeypatch, rows_at_once):
    monkeypatch.setattr("engine.decoding.logprobs.CHUNK_LOGITS", rows_at_once * 300 + 299)
    asked = []

    def logits_of(rows):
        asked.append(rows)
        return RANDOM[rows]

    ids = torch.arange(6)
    for chunked, whole in zip(score_in_chunks(logits_of, ids, 3, 300), score(RANDOM, ids, 3), strict=True):
        assert torch.equal(chunked, whole)
    assert max(rows.stop - rows.start for rows in asked) == rows_at_once
    assert len(asked) == -(-6 // rows_at_once)


def test_a_row_longer_than_the_bound_is_a_chunk(monkeypatch):
    monkeypatch.setattr("engine.decoding.logprobs.CHUNK_LOGITS", 10)
    scores = score_in_chunks(RANDOM.__getitem__, torch.arange(6), 1, 300)
    assert torch.equal(scores.logprobs, score(RANDOM, torch.arange(6), 1).logprobs)
