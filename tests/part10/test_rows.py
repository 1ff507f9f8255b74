"""Which row of logits speaks of which token. Token i of a request has id 10 + i."""

import pytest

from engine.batch import make_batch
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SamplingState
from engine.scheduling.request import Request
from engine.scoring import Spoken, plan_of, spoken_of

OFF_BY_ONE = "a row speaks of the token after its own: the row at position p of token p + 1"


def request(prompt: int, output: int = 0, computed: int = 0, asks: bool = True, **fields) -> Request:
    ids = list(range(10, 10 + prompt + output))
    params = SamplingParams(prompt_logprobs=0 if asks else None, logprobs=fields.pop("logprobs", None))
    made = Request(
        "r", "r", ids, prompt, params, output=None, sampling=SamplingState(params, [10], [], 0), **fields
    )
    made.num_computed_tokens = computed
    return made


def test_a_row_speaks_of_the_token_after_its_own():
    assert spoken_of(request(prompt=5), range(0, 2)).prompt_ids == [11, 12], OFF_BY_ONE


def test_of_a_whole_prompt_the_last_row_speaks_of_what_comes_next():
    assert spoken_of(request(prompt=4), range(0, 4)) == Spoken([11, 12, 13], 1), (
        f"{OFF_BY_ONE}; nothing speaks of the first token, and the last row's token is to be chosen"
    )


@pytest.mark.parametrize(
    ("positions", "spoken"),
    [
        (range(0, 3), Spoken([11, 12, 13], 0)),
        (range(3, 6), Spoken([14, 15, 16], 0)),
        (range(6, 8), Spoken([17], 1)),
    ],
    ids=["first", "middle", "last"],
)
def test_a_chunk_of_a_prompt_speaks_beyond_its_own_end(positions, spoken):
    assert spoken_of(request(prompt=8), positions) == spoken, (
        f"{OFF_BY_ONE}, also where the next chunk begins; only the prompt's last row has a token to be chosen"
    )


def test_a_prompt_of_one_token_has_nothing_to_score():
    assert spoken_of(request(prompt=1), range(0, 1)) == Spoken([], 1)


def test_a_growing_output_is_no_prompt():
    assert spoken_of(request(prompt=3, output=4), range(6, 7)) == Spoken([], 1), (
        "a row behind the prompt speaks of no prompt token"
    )


def test_a_preempted_request_is_not_told_its_own_words_again():
    assert spoken_of(request(prompt=3, output=4), range(0, 7)) == Spoken([11, 12], 1), (
        "rows between the prompt's last and the last known token speak of output that is there: one token is "
        "to be chosen, from the last row"
    )


def test_a_preempted_request_whose_chunk_ends_in_its_output_chooses_nothing():
    assert spoken_of(request(prompt=3, output=4), range(0, 5)) == Spoken([11, 12], 0), (
        "a token is chosen only after the last one that is known"
    )


def test_of_who_does_not_ask_every_row_is_one_to_choose_from():
    assert spoken_of(request(prompt=3, asks=False), range(2, 3)) == Spoken([], 1)
    assert spoken_of(request(prompt=3, output=1, asks=False), range(3, 6)) == Spoken([], 3), (
        "rows after drafts choose, too: who does not want every row gets none that does not"
    )


def test_after_drafts_there_are_tokens_to_choose():
    drafting = request(prompt=3, output=2, draft_ids=[91, 92])
    assert spoken_of(drafting, range(4, 7)) == Spoken([], 3), "a token is chosen after each draft, too"


def test_no_rows_speak_of_nothing():
    assert spoken_of(request(prompt=9), range(0)) == Spoken([], 0)


def test_of_n_samples_the_first_scores_the_prompt():
    first = request(prompt=4)
    second = request(prompt=4, parent=first)
    assert spoken_of(second, range(3, 4)) == Spoken([], 1)
    assert (first.wants_every_row, second.wants_every_row) == (True, False)


def test_the_rows_of_a_step_are_counted_among_those_it_wants():
    """Five requests in one step: quiet decode, prompt scored, both scored, a chunk that wants nothing, n."""
    work = [
        (request(prompt=3, output=1, computed=3, asks=False), 1),
        (request(prompt=4), 4),
        (request(prompt=6, computed=3, logprobs=2), 3),
        (request(prompt=9, asks=False, logprobs=2), 4),
        (request(prompt=2, output=1, computed=2, asks=False, logprobs=0), 1),
    ]
    plan = plan_of(make_batch(work))
    # Wanted are rows 0 | 1 2 3 4 | 5 6 7 | none | 8.
    assert plan.next_rows == [0, 4, 7, 8]
    assert plan.prompt_rows == [1, 2, 3, 5, 6]
    assert plan.prompt_ids == [11, 12, 13, 14, 15]
    assert plan.scored == [2, 3], "places in next_rows, of those who ask for logprobs"
    assert [own.num_next for own in plan.spoken] == [1, 1, 1, 0, 1]
