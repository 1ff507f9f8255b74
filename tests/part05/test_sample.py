"""`sample`, all of it: knobs and dice together, and nobody's draw depends on the company."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.decoding.params import SamplingParams
from engine.decoding.sampling import NO_TOKEN, sample
from engine.decoding.sampling_state import SamplingState, allowed_mask
from tests.part05 import reference
from tests.part05.dice import CRITICAL, N, chi_squared


def test_frequencies_after_all_knobs_are_hugging_faces_probabilities():
    params = SamplingParams(
        temperature=1.5, top_k=14, top_p=0.97, repetition_penalty=1.2, frequency_penalty=0.5
    )
    logits = reference.random_logits(1, 30, 4, scale=1.0)
    rows = [SamplingState(params, [1, 2], [3, 3, 4], seed) for seed in range(N)]
    expected = reference.probabilities(logits[0], rows[0]) * N
    observed = torch.bincount(sample(logits.expand(N, -1), rows), minlength=30)
    assert not observed[expected == 0].any()
    possible = expected > 0
    assert 8 <= possible.sum() - 1 <= 14
    assert expected[possible].min() > 5
    assert chi_squared(observed[possible].tolist(), expected[possible].tolist()) < CRITICAL[19]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_numbers_give_no_token(temperature, dtype):
    nan, inf = torch.nan, torch.inf
    numbers = [[1.0, 5.0, 2.0], [nan] * 3, [-inf] * 3, [1.0, nan, 5.0], [1.0, 2.0, inf]]
    logits = torch.tensor(numbers, dtype=dtype)
    rows = [SamplingState(SamplingParams(temperature=temperature, seed=1), [1], [], 1) for _ in logits]
    tokens = sample(logits, rows).tolist()
    assert tokens[0] in ([1] if temperature == 0 else range(3))
    assert tokens[1:] == [NO_TOKEN] * 4, "where the likeliest logit is no finite number, there is no token"


@given(st.integers(0, 2**32), st.lists(st.integers(0, 2**32), max_size=6), st.integers(0, 6))
def test_batch_mates_and_the_place_among_them_change_nothing(seed, mates, place):
    def row_of(seed):
        row = reference.random_row(random.Random(seed), 60)
        return row, reference.random_logits(1, 60, seed)

    row, logits = row_of(seed)
    alone = sample(logits, [row]).item()
    batch = [row_of(mate) for mate in mates]
    place = min(place, len(batch))
    batch.insert(place, (row, logits))
    tokens = sample(torch.cat([logits for _, logits in batch]), [row for row, _ in batch])
    assert tokens[place].item() == alone


@pytest.mark.parametrize("temperatures", [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_a_row_that_may_choose_no_token_gives_no_token(temperatures):
    """Token 1 alone is allowed, and it would complete a bad word. The other row chooses as ever."""

    class Words:
        def completing(self, output_ids, drafts=()):
            return (1,)

    params = [SamplingParams(temperature=t, top_p=0.9, min_p=0.1) for t in temperatures]
    mask = allowed_mask([1])
    rows = [
        SamplingState(params[0], [1], [], 0, mask=mask, bad_words=Words()),
        SamplingState(params[1], [1], [], 0, mask=mask),
    ]
    got = sample(torch.tensor([[1.0, 2.0, 9.0]]).repeat(2, 1), rows).tolist()
    assert got == [NO_TOKEN, 1], "a row that may choose no token gives NO_TOKEN, whatever the rows beside it"


def test_draws_are_of_the_allowed_tokens_in_their_proportions():
    mask, params = allowed_mask([0, 2]), SamplingParams()
    rows = [SamplingState(params, [1], [], seed, mask=mask) for seed in range(2000)]
    got = sample(torch.tensor([0.5, 0.25, 0.25]).log().repeat(2000, 1), rows)
    assert set(got.tolist()) == {0, 2}
    assert (got == 0).float().mean().item() == pytest.approx(2 / 3, abs=0.04)


def test_the_positions_of_records_must_be_given():
    """A `Draw` has no output whose length would say which token comes next."""
    row = SamplingState(SamplingParams(min_tokens=1), [1], [], 0, [0]).draw()
    with pytest.raises(TypeError, match="a Draw has no output"):
        sample(torch.zeros(1, 3), [row])
    assert sample(torch.zeros(1, 3), [row], [0]).item() in (1, 2)


@pytest.mark.parametrize("temperatures", [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_a_banned_logit_need_not_be_finite(temperatures):
    """The model's own numbers may overflow for a token that the row may not choose: row 0's mask has no 2."""
    params = [SamplingParams(temperature=t, top_k=2, top_p=0.9) for t in temperatures]
    rows = [
        SamplingState(params[0], [1], [], 0, mask=allowed_mask([1])),
        SamplingState(params[1], [1], [], 0),
    ]
    got = sample(torch.tensor([[1.0, 2.0, torch.inf]]).repeat(2, 1), rows).tolist()
    assert got == [1, NO_TOKEN], "the adjusted logits decide, whatever the temperature and the rows beside it"
