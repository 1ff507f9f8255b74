"""The record of one step's work."""

import dataclasses
import pickle

import pytest
import torch

from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState
from engine.execution.runner import SubmittedStep
from engine.requests.batch import NO_ADAPTER, Batch
from engine.requests.request import Request
from engine.scheduling import batching
from engine.scheduling.scheduler import Queues
from tests.part06.fakes import BlockCache


def make_batch(work, **options) -> Batch:
    """Of sequences that lie nowhere."""
    return batching.make_batch(work, BlockCache(1, 1), **options)


def rows_of(batch: Batch) -> list[list[int]]:
    """By sequence: the rows that choose."""
    rows, counts = iter(batch.rows.chosen), batch.rows.chosen_counts
    return [[next(rows) for _ in range(count)] for count in counts]


def request(tokens: int, computed: int = 0, prompt: int | None = None, **fields) -> Request:
    """A request whose token at place i has id 10 + i."""
    params = SamplingParams()
    state = SamplingState(params, [10], [], 0)
    ids = list(range(10, 10 + tokens))
    made = Request("r", "r", ids, prompt or tokens, params, output=None, sampling=state, **fields)
    made.num_computed_tokens = computed
    return made


def test_sequences_lie_end_to_end():
    first, second, third = request(4), request(9, computed=8), request(20, computed=5)
    batch = make_batch([(first, 4), (second, 1), (third, 6)])
    assert batch.ids == ("r", "r", "r")
    assert batch.token_ids == (10, 11, 12, 13, 18, 15, 16, 17, 18, 19, 20)
    assert batch.positions == (0, 1, 2, 3, 8, 5, 6, 7, 8, 9, 10)
    assert batch.query_start == (0, 4, 5, 11)
    assert batch.context_lens == (4, 9, 11)
    assert batch.num_tokens == 11
    assert [batch.num_new_tokens(s) for s in range(3)] == [4, 1, 6]


def test_logits_are_wanted_for_the_last_token_once_the_step_reaches_it():
    whole, chunk, last_chunk, growing = request(4), request(9), request(9, computed=6), request(5, computed=4)
    batch = make_batch([(whole, 4), (chunk, 5), (last_chunk, 3), (growing, 1)])
    assert rows_of(batch) == [[3], [], [11], [12]]


def test_a_single_token_wants_logits_only_if_it_is_the_last_known():
    """A prompt's chunk of one token, its last token, a draft alone, and a token of a growing output."""
    chunk, last = request(4, computed=1), request(4, computed=3)
    draft, growing = request(4, computed=4, draft_ids=[77]), request(6, computed=5, prompt=4)
    batch = make_batch([(chunk, 1), (last, 1), (draft, 1), (growing, 1)])
    assert batch.token_ids == (11, 13, 77, 15)
    assert (batch.positions, batch.context_lens) == ((1, 3, 4, 5), (2, 4, 5, 6))
    assert rows_of(batch) == [[], [1], [2], [3]], (
        "a token of the prompt whose successor is known has no row, however short the chunk"
    )


def test_drafts_follow_the_tokens_and_each_predecessor_has_its_row():
    speculating = request(5, computed=4, draft_ids=[77, 78])
    assert speculating.num_tokens_to_compute == 3
    batch = make_batch([(request(2), 2), (speculating, 3)])
    assert batch.token_ids == (10, 11, 14, 77, 78)
    assert batch.positions == (0, 1, 4, 5, 6)
    assert batch.context_lens == (2, 7)
    assert rows_of(batch) == [[1], [2, 3, 4]]


def test_a_draft_cut_off_by_the_budget_keeps_the_rows_that_are_left():
    batch = make_batch([(request(5, computed=4, draft_ids=[77, 78]), 2)])
    assert batch.token_ids == (14, 77)
    assert rows_of(batch) == [[0, 1]]


@pytest.mark.parametrize(
    ("work", "told"),
    [
        ([({"tokens": 4, "computed": 3}, 1), ({"tokens": 2, "computed": 1}, 1)], [[90], [91]]),
        ([({"tokens": 5, "computed": 4, "draft_ids": [77]}, 2), ({"tokens": 9}, 4)], [[90, 91], []]),
    ],
    ids=["all decode", "two rows and none"],
)
def test_a_result_has_a_token_for_each_row_whose_successor_is_not_known(work, told):
    """As many rows as requests, each time; only in the first case each request has one of its own."""
    batch = make_batch([(request(**fields), n) for fields, n in work])
    got = SubmittedStep(batch, torch.tensor([90, 91]), []).result().tokens
    assert got == told, f"tokens by sequence: {told}, not {got}"


def test_a_batch_cannot_be_changed():
    batch = make_batch([(request(4), 4)])
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.token_ids = ()


def test_a_batch_holds_no_request_and_can_be_sent_elsewhere():
    batch = make_batch([(request(4), 4), (request(5, computed=4, draft_ids=[77]), 2)])
    sent = pickle.loads(pickle.dumps(batch))
    assert b"engine.requests.request" not in pickle.dumps(batch), "the requests stay with the engine"
    for field in dataclasses.fields(Batch):
        was, arrived = getattr(batch, field.name), getattr(sent, field.name)
        assert str(arrived) == str(was), f"{field.name} did not arrive as it was"


def test_each_row_is_drawn_at_its_place_in_the_output():
    """Also behind drafts that are not confirmed, and in a step ahead: the record alone says where."""
    speculating = request(6, computed=5, prompt=4, draft_ids=[77, 78])
    batch = make_batch([(request(4), 4), (request(9), 5), (speculating, 3)])
    assert batch.draws.positions == (0, 2, 3, 4)
    assert len(batch.draws.rows) == 4


def test_tokens_taken_count_as_computed_and_batch_keeps_their_places():
    long, scheduler = request(9), Queues(BlockCache(1, 1))
    step = scheduler.make_step([(long, 5)])
    assert (step.requests, step.pending, step.error) == ((long,), None, None)
    assert (long.num_computed_tokens, long.num_tokens_to_compute) == (5, 4)
    assert scheduler.make_step([(long, 4)]).batch.positions == (5, 6, 7, 8)
    assert step.batch.positions == (0, 1, 2, 3, 4)


def test_adapters_are_where_those_of_the_requests_lie():
    work = [(request(1, adapter="poetry"), 1), (request(1), 1)]
    assert make_batch(work, adapter_slots={"poetry": 3}).adapters == (3, NO_ADAPTER)
