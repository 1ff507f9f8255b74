"""Which row of logits speaks of which token. Token i of a request has id 10 + i."""

import pytest

from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState
from engine.requests.batch import UNSCORED
from engine.requests.request import Request
from engine.scheduling.batching import LogitsRows, make_batch
from engine.scheduling.scored_rows import scored_rows
from tests.part06.fakes import BlockCache

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
    assert scored_rows(request(prompt=5), range(0, 2)).prompt_ids == [11, 12], OFF_BY_ONE


def test_of_a_whole_prompt_the_last_row_speaks_of_what_comes_next():
    assert scored_rows(request(prompt=4), range(0, 4)) == LogitsRows([11, 12, 13], 1), (
        f"{OFF_BY_ONE}; nothing speaks of the first token, and the last row's token is to be chosen"
    )


@pytest.mark.parametrize(
    ("positions", "rows"),
    [
        (range(0, 3), LogitsRows([11, 12, 13], 0)),
        (range(3, 6), LogitsRows([14, 15, 16], 0)),
        (range(6, 8), LogitsRows([17], 1)),
    ],
    ids=["first", "middle", "last"],
)
def test_a_chunk_of_a_prompt_speaks_beyond_its_own_end(positions, rows):
    assert scored_rows(request(prompt=8), positions) == rows, (
        f"{OFF_BY_ONE}, also where the next chunk begins; only the prompt's last row has a token to be chosen"
    )


def test_a_prompt_of_one_token_has_nothing_to_score():
    assert scored_rows(request(prompt=1), range(0, 1)) == LogitsRows([], 1)


def test_a_growing_output_is_no_prompt():
    assert scored_rows(request(prompt=3, output=4), range(6, 7)) == LogitsRows([], 1), (
        "a row behind the prompt speaks of no prompt token"
    )


def test_a_preempted_request_is_not_told_its_own_words_again():
    assert scored_rows(request(prompt=3, output=4), range(0, 7)) == LogitsRows([11, 12], 1), (
        "rows between the prompt's last and the last known token speak of output that is there: one token is "
        "to be chosen, from the last row"
    )


def test_a_preempted_request_whose_chunk_ends_in_its_output_chooses_nothing():
    assert scored_rows(request(prompt=3, output=4), range(0, 5)) == LogitsRows([11, 12], 0), (
        "a token is chosen only after the last one that is known"
    )


def test_of_who_does_not_ask_every_row_is_one_to_choose_from():
    assert scored_rows(request(prompt=3, asks=False), range(2, 3)) == LogitsRows([], 1)
    assert scored_rows(request(prompt=3, output=1, asks=False), range(3, 6)) == LogitsRows([], 3), (
        "rows after drafts choose, too: who does not want every row gets none that does not"
    )


def test_who_does_not_want_every_row_has_none_scored():
    assert scored_rows(request(prompt=9, asks=False), range(0, 4)) == LogitsRows([], 0), (
        "who does not want every row (request.wants_every_row) has none scored"
    )


def test_after_drafts_there_are_tokens_to_choose():
    drafting = request(prompt=3, output=2, draft_ids=[91, 92])
    assert scored_rows(drafting, range(4, 7)) == LogitsRows([], 3), "a token is chosen after each draft, too"


def test_no_rows_speak_of_nothing():
    assert scored_rows(request(prompt=9), range(0)) == LogitsRows([], 0)


def test_of_n_samples_the_first_scores_the_prompt():
    first = request(prompt=4)
    second = request(prompt=4, parent=first)
    assert scored_rows(second, range(3, 4)) == LogitsRows([], 1)
    assert (first.wants_every_row, second.wants_every_row) == (True, False)
    assert scored_rows(second, range(4)) == LogitsRows([], 1), "of n samples the first alone wants every row"
    assert rows_of((first, 4), (second, 4)).prompt_logprobs == (0, UNSCORED)


def rows_of(*work):
    """The rows of a step of these (request, new tokens)."""
    return make_batch(work, BlockCache(1, 1), select_rows=scored_rows).rows


def test_a_step_says_which_rows_choose_and_which_are_scored():
    """Five requests: quiet decode, prompt scored, both scored, a chunk inside its prompt, output scored."""
    rows = rows_of(
        (request(prompt=3, output=1, computed=3, asks=False), 1),
        (request(prompt=4), 4),
        (request(prompt=6, computed=3, logprobs=2), 3),
        (request(prompt=9, asks=False, logprobs=2), 4),
        (request(prompt=2, output=1, computed=2, asks=False, logprobs=0), 1),
    )
    # Whose rows they are: 0 | 1 2 3 4 | 5 6 7 | 8 9 10 11 | 12.
    assert (rows.chosen, rows.chosen_counts) == ((0, 4, 7, 12), (1, 1, 1, 0, 1))
    assert (rows.prompt_rows, rows.prompt_counts) == ((1, 2, 3, 5, 6), (0, 3, 2, 0, 0)), (
        "who asks for log probabilities of the output alone has no prompt scored: request.wants_every_row"
    )
    assert rows.prompt_ids == (11, 12, 13, 14, 15)
    assert rows.logprobs == (UNSCORED, UNSCORED, 2, 2, 0)
    assert rows.prompt_logprobs == (UNSCORED, 0, 0, UNSCORED, UNSCORED)


def test_where_nobody_asks_the_step_says_nothing_of_scores():
    rows = rows_of((request(prompt=4, asks=False), 4))
    assert (rows.logprobs, rows.prompt_logprobs, rows.prompt_rows, rows.prompt_ids) == ((), (), (), ())


def test_a_chunk_of_one_token_has_its_row():
    rows = rows_of((request(prompt=4, computed=1), 1), (request(prompt=2, computed=1, asks=False), 1))
    assert (rows.chosen, rows.prompt_rows, rows.prompt_ids) == ((1,), (0,), (12,))


def test_after_a_preemption_only_the_prompts_rows_are_asked_for_again():
    """The first chunk is the prompt, six tokens; the second is what was said since."""
    assert rows_of((request(prompt=6, output=3), 6)).prompt_rows == (0, 1, 2, 3, 4)
    rows = rows_of((request(prompt=6, output=3, computed=6), 3))
    assert (rows.chosen, rows.prompt_rows) == ((2,), ())
