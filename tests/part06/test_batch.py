"""The record of one step's work."""

import dataclasses

import pytest
import torch

from engine.batch import make_batch
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SamplingState
from engine.executor import Pending
from engine.scheduling.request import Request
from engine.scheduling.scheduler import take


def request(tokens: int, computed: int = 0, prompt: int | None = None, **fields) -> Request:
    """A request whose token at place i has id 10 + i."""
    params = SamplingParams(prompt_logprobs=fields.pop("prompt_logprobs", None))
    state = SamplingState(params, [10], [], 0)
    ids = list(range(10, 10 + tokens))
    made = Request("r", "r", ids, prompt or tokens, params, output=None, sampling=state, **fields)
    made.num_computed_tokens = computed
    return made


def test_sequences_lie_end_to_end():
    first, second, third = request(4), request(9, computed=8), request(20, computed=5)
    batch = make_batch([(first, 4), (second, 1), (third, 6)])
    assert batch.requests == (first, second, third)
    assert batch.token_ids == (10, 11, 12, 13, 18, 15, 16, 17, 18, 19, 20)
    assert batch.positions == (0, 1, 2, 3, 8, 5, 6, 7, 8, 9, 10)
    assert batch.query_start == (0, 4, 5, 11)
    assert batch.context_lens == (4, 9, 11)
    assert batch.num_tokens == 11
    assert [batch.num_new_tokens(s) for s in range(3)] == [4, 1, 6]


def test_logits_are_wanted_for_the_last_token_once_the_step_reaches_it():
    whole, chunk, last_chunk, growing = request(4), request(9), request(9, computed=6), request(5, computed=4)
    batch = make_batch([(whole, 4), (chunk, 5), (last_chunk, 3), (growing, 1)])
    assert [list(rows) for rows in batch.logit_rows] == [[3], [], [11], [12]]


def test_a_single_token_wants_logits_only_if_it_is_the_last_known():
    """A prompt's chunk of one token, its last token, a draft alone, and a token of a growing output."""
    chunk, last = request(4, computed=1), request(4, computed=3)
    draft, growing = request(4, computed=4, draft_ids=[77]), request(6, computed=5, prompt=4)
    batch = make_batch([(chunk, 1), (last, 1), (draft, 1), (growing, 1)])
    assert batch.token_ids == (11, 13, 77, 15)
    assert (batch.positions, batch.context_lens) == ((1, 3, 4, 5), (2, 4, 5, 6))
    assert [list(rows) for rows in batch.logit_rows] == [[], [1], [2], [3]], (
        "a token of the prompt whose successor is known has no row, however short the chunk"
    )


def test_a_single_token_of_a_prompt_has_its_row_where_every_row_is_wanted():
    batch = make_batch([(request(4, computed=1, prompt_logprobs=1), 1), (request(2, computed=1), 1)])
    assert [list(rows) for rows in batch.logit_rows] == [[0], [1]]


def test_drafts_follow_the_tokens_and_each_predecessor_has_its_row():
    speculating = request(5, computed=4, draft_ids=[77, 78])
    assert speculating.num_tokens_to_compute == 3
    batch = make_batch([(request(2), 2), (speculating, 3)])
    assert batch.token_ids == (10, 11, 14, 77, 78)
    assert batch.positions == (0, 1, 4, 5, 6)
    assert batch.context_lens == (2, 7)
    assert [list(rows) for rows in batch.logit_rows] == [[1], [2, 3, 4]]


def test_a_draft_cut_off_by_the_budget_keeps_the_rows_that_are_left():
    batch = make_batch([(request(5, computed=4, draft_ids=[77, 78]), 2)])
    assert batch.token_ids == (14, 77)
    assert [list(rows) for rows in batch.logit_rows] == [[0, 1]]


def test_prompt_logprobs_want_every_row_of_the_prompt():
    whole = request(4, prompt_logprobs=1)
    second_chunk = request(9, computed=3, prompt_logprobs=1)
    output = request(9, computed=8, prompt=6, prompt_logprobs=1)
    assert [r.wants_every_row for r in (whole, output, request(4))] == [True, True, False]
    batch = make_batch([(whole, 4), (second_chunk, 4), (output, 1)])
    assert [list(rows) for rows in batch.logit_rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


@pytest.mark.parametrize(
    ("work", "told"),
    [
        ([({"tokens": 4, "computed": 3}, 1), ({"tokens": 2, "computed": 1}, 1)], [[90], [91]]),
        (
            [({"tokens": 4, "computed": 1, "prompt_logprobs": 1}, 1), ({"tokens": 2, "computed": 1}, 1)],
            [[], [91]],
        ),
        ([({"tokens": 5, "computed": 4, "draft_ids": [77]}, 2), ({"tokens": 9}, 4)], [[90, 91], []]),
    ],
    ids=["all decode", "a row inside a prompt", "two rows and none"],
)
def test_a_result_has_a_token_for_each_row_whose_successor_is_not_known(work, told):
    """As many rows as requests, each time; only in the first case each request has one of its own."""
    batch = make_batch([(request(**fields), n) for fields, n in work])
    got = Pending(batch, torch.tensor([90, 91])).result().tokens
    assert got == told, f"tokens by sequence: {told}, not {got}"


def test_a_batch_cannot_be_changed():
    batch = make_batch([(request(4), 4)])
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.token_ids = ()


def test_tokens_taken_count_as_computed_and_batch_keeps_their_places():
    one = request(9)
    take([(one, 5)])
    assert (one.num_computed_tokens, one.num_tokens_to_compute) == (5, 4)
    assert take([(one, 4)]).positions == (5, 6, 7, 8)


def test_adapters_are_those_of_the_requests():
    assert make_batch([(request(1, adapter="poetry"), 1), (request(1), 1)]).adapters == ("poetry", None)
