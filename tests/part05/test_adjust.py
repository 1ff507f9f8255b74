"""Bias and penalties, on three or four logits that you can work out by hand.

`adjust` touches a logit in this order: bias, then the repetition penalty, then what frequency and presence
subtract. Bans come last. Only the tokens that a row's knobs name change, in that row alone.
"""

from dataclasses import replace

import pytest
import torch

from engine.decoding.params import SamplingParams
from engine.decoding.penalties import LogitChanges
from engine.decoding.sampling import adjust
from engine.decoding.sampling_state import SamplingState, allowed_mask


class Words:
    """A stand-in for `BadWords`: one word of two tokens."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def completing(self, output_ids, drafts=()):
        return (self.last,) if [*output_ids, *drafts][-1:] == [self.first] else ()


def adjusted(logits, prompt=(), output=(), stop_ids=(), bad_words=None, **knobs) -> list[float]:
    """One row of logits after its bias and penalties."""
    params = SamplingParams(**knobs)
    mask = allowed_mask(params.allowed_token_ids)
    row = SamplingState(params, list(prompt), list(output), 0, stop_ids, bad_words=bad_words, mask=mask)
    return [round(x, 4) for x in adjust(torch.tensor([logits]), [row])[0].tolist()]


def test_a_row_that_asks_for_nothing_keeps_its_logits():
    assert adjusted([3.0, -1.0, 0.5], [0], [1, 1]) == [3, -1, 0.5], "no knob is set, so nothing may change"


def test_a_bias_is_added_to_its_token():
    got = adjusted([3.0, -1.0, 0.5], logit_bias={1: 5, 2: -100})
    assert got == [3, 4, -99.5], "logit_bias is added to the logits of the tokens it names"


def test_repetition_divides_a_positive_logit_and_multiplies_a_negative_one():
    assert adjusted([3.0, 4.0], output=[0], repetition_penalty=2) == [1.5, 4], (
        "repetition_penalty divides the positive logit of a token that was said"
    )
    assert adjusted([3.0, -4.0], output=[1], repetition_penalty=2) == [3, -8], (
        "repetition_penalty multiplies a negative logit: dividing -4 by 2 would make the token likelier"
    )


def test_repetition_counts_prompt_and_output_and_a_token_only_once():
    got = adjusted([3.0, 6.0, 4.0], prompt=[0], output=[1, 1, 1], repetition_penalty=2)
    assert got == [1.5, 3, 4], (
        "repetition_penalty applies to tokens of prompt and output, once each, however often they stand there"
    )


def test_frequency_is_subtracted_for_each_time_in_the_output():
    got = adjusted([3.0, 4.0, 2.0], prompt=[2], output=[0, 1, 1, 1], frequency_penalty=0.5)
    assert got == [2.5, 2.5, 2], (
        "frequency_penalty is subtracted for each time the token stands in the output, not in the prompt"
    )


def test_presence_is_subtracted_once_for_any_number_of_times_in_the_output():
    got = adjusted([3.0, 4.0, 2.0], prompt=[2], output=[0, 1, 1, 1], presence_penalty=0.5)
    assert got == [2.5, 3.5, 2], (
        "presence_penalty is subtracted once if the token stands in the output; the prompt is no output"
    )


def test_a_negative_penalty_rewards():
    got = adjusted([3.0, 4.0], output=[1, 1], frequency_penalty=-0.5, presence_penalty=-0.25)
    assert got == [3, 5.25], "frequency · count + presence are subtracted; negative ones raise the logit"


@pytest.mark.parametrize(
    ("logit", "bias", "expected"),
    [(4.0, 2.0, 3.0), (-1.0, 5.0, 2.0), (1.0, -5.0, -8.0)],
    ids=["4+2", "lifted above 0", "pushed below 0"],
)
def test_bias_comes_before_the_repetition_penalty(logit, bias, expected):
    got = adjusted([logit, 0.0], output=[0], logit_bias={0: bias}, repetition_penalty=2)
    assert got == [expected, 0], (
        f"bias comes before the repetition penalty: ({logit:g} + {bias:g}), then divided or multiplied by 2 "
        "according to the sign it has by then"
    )


def test_the_repetition_penalty_comes_before_what_is_subtracted():
    got = adjusted([4.0, 0.0], output=[0], repetition_penalty=2, frequency_penalty=1)
    assert got == [1, 0], (
        "the repetition penalty comes before frequency and presence are subtracted: 4/2 - 1, not (4 - 1)/2"
    )


def test_stop_tokens_are_banned_until_min_tokens_whatever_their_bias():
    ban = -float("inf")
    for length, expected in ((0, ban), (2, ban), (3, 6.0), (4, 6.0)):
        got = adjusted([1.0, 2.0], [1], [1] * length, stop_ids=[0], min_tokens=3, logit_bias={0: 5})
        assert got == [expected, 2], (
            "a stop token's logit is -inf while the output is shorter than min_tokens, and free after that: "
            f"min_tokens=3, {length} tokens of output"
        )


def test_tokens_that_are_not_allowed_are_banned_whatever_their_bias():
    ban = -float("inf")
    for allowed, expected in (([1], [ban, 2, ban]), ([2, 0], [6, ban, 3]), ([0, 1, 2], [6, 2, 3])):
        got = adjusted([1.0, 2.0, 3.0], logit_bias={0: 5}, allowed_token_ids=allowed)
        assert got == expected, f"only the tokens of the row's mask keep their logits: {allowed}"
    far = [float(x) for x in range(100)]
    got = adjusted(far, allowed_token_ids=[31, 32, 99])
    assert [x for x in got if x != ban] == [31, 32, 99], (
        "only the tokens of the row's mask keep their logits, with a bias and without: bit v % 32 of number "
        "v // 32 is token v's"
    )


def test_only_rows_with_a_mask_are_masked():
    wishes = [{}, {"allowed_token_ids": [0]}, {"presence_penalty": 1}, {"allowed_token_ids": [2]}]
    params = [SamplingParams(**wish) for wish in wishes]
    rows = [SamplingState(p, [], [], 0, mask=allowed_mask(p.allowed_token_ids)) for p in params]
    ban = -float("inf")
    got = adjust(torch.tensor([[1.0, 2, 3]]).repeat(4, 1), rows).tolist()
    assert got == [[1, 2, 3], [1, ban, ban], [1, 2, 3], [ban, ban, 3]], "a row's mask bans in that row alone"


def test_the_token_that_completes_a_bad_word_is_banned():
    ban = -float("inf")
    for output, expected in (([], 6), ([1], 6), ([1, 2], ban), ([2, 1], 6)):
        got = adjusted([1.0, 2.0, 3.0], output=output, bad_words=Words(2, 0), logit_bias={0: 5})
        assert got == [expected, 2, 3], f"the row's bad_ids are banned, whatever their bias: after {output}"
    row = SamplingState(SamplingParams(), [], [1], 0, bad_words=Words(2, 0))
    behind = adjust(torch.tensor([[1.0, 2.0, 3.0]]), [row.with_drafts([2])])
    assert behind.tolist() == [[ban, 2, 3]], "drafts count as if they followed the output"


def test_the_position_says_which_token_is_chosen():
    row = SamplingState(SamplingParams(min_tokens=2), [1], [1], 0, [0])
    got = [adjust(torch.tensor([[1.0, 2.0]]), [row], [position])[0, 0].item() for position in (0, 1, 2)]
    assert got == [-float("inf"), -float("inf"), 1], (
        "min_tokens=2 bans at positions 0 and 1, as they are handed in, however long the output is by now"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_adjusted_in_fp32(dtype):
    row = SamplingState(SamplingParams(frequency_penalty=0.001), [1], [0], 0)
    got = adjust(torch.tensor([[100.0, 2.0]], dtype=dtype), [row])
    assert got.dtype == torch.float32, "a row with a penalty is worked on in fp32, as beside a sampled row"
    assert got[0, 0].item() == pytest.approx(99.999), "100 - 0.001 is 100 in half precision"


def test_each_row_has_its_own_knobs():
    wishes = [{"logit_bias": {0: 1}}, {}, {"logit_bias": {0: -1, 2: 7}}, {"presence_penalty": 2}]
    rows = [SamplingState(SamplingParams(**wish), [0], [1], 0) for wish in wishes]
    got = adjust(torch.tensor([[1.0, 2, 3]]).repeat(4, 1), rows).tolist()
    assert got == [[2, 2, 3], [1, 2, 3], [0, 2, 10], [1, 0, 3]], (
        "a row's knobs change that row alone: logit_bias {0: 1}; nothing; {0: -1, 2: 7}; presence_penalty 2"
    )


def test_the_callers_logits_are_left_as_they_were():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    adjust(logits, [SamplingState(SamplingParams(logit_bias={0: 5}), [0], [], 0)])
    assert logits.tolist() == [[1, 2, 3]], "`logits` is the caller's: change a copy"


def test_tokens_appended_later_count():
    output: list[int] = []
    row = SamplingState(SamplingParams(frequency_penalty=1), [0], output, 0)
    for count in range(4):
        got = adjust(torch.tensor([[5.0, 5.0]]), [row])[0].tolist()
        assert got == [5, 5 - count], f"token 1 stands in the output {count} times by now"
        output.append(1)


@pytest.mark.parametrize(
    "knobs",
    [
        {"repetition_penalty": 2.0},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.25, "logit_bias": {3: 1.0, 9: -2.0}},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": -0.25},
    ],
)
@pytest.mark.parametrize("drafts", [[3], [4, 4], [3, 9, 3], [50, 51, 3, 51]])
def test_drafts_count_as_if_they_stood_in_the_output_and_are_forgotten(knobs, drafts):
    """A draft may be a token of the prompt (1), of the output (3), of a bias (9), or a new one (50)."""

    def factors(changes, *ids) -> dict[int, list[float]]:
        tokens, numbers = changes.for_output(*ids)
        return dict(zip(tokens.tolist(), numbers.tolist(), strict=True))

    def afresh(output) -> dict[int, list[float]]:
        return factors(LogitChanges(SamplingParams(**knobs), [1, 2]), output)

    changes, output = LogitChanges(SamplingParams(**knobs), [1, 2]), [3, 3, 4]
    assert factors(changes, output, drafts) == afresh([*output, *drafts]), (
        f"{drafts} count with the output {output}, as they will if they are accepted"
    )
    assert factors(changes, output) == afresh(output), "the next call knows nothing of the drafts"


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"logit_bias": {0: 1, 2: -3}},
        {"frequency_penalty": 0.5, "presence_penalty": 0.25},
        {"repetition_penalty": 2.0},
        {"min_tokens": 3},
        {"allowed_token_ids": [1, 2]},
    ],
)
def test_a_record_of_a_row_says_what_the_row_said_when_it_was_made(knobs):
    """`Draw` is what another process chooses by: it has no list that grows."""
    params, output = SamplingParams(**knobs), [1, 2]
    mask = allowed_mask(params.allowed_token_ids)
    row = SamplingState(params, [0], output, 0, [3], bad_words=Words(2, 0), mask=mask)
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    record, want = row.draw(), adjust(logits, [row]).tolist()
    for token in (1, 1, 3):
        output.append(token)
        row.changes()
    assert adjust(logits, [record], [2]).tolist() == want, f"{knobs}: tokens that came later do not count"


def test_a_record_without_changes_changes_no_logit():
    record = SamplingState(SamplingParams(logit_bias={0: 1}), [0], [], 0).draw()
    logits = torch.tensor([[1.0, 2.0]])
    bare = replace(record, tokens=None, factors=None)
    assert adjust(logits, [bare], [0]).tolist() == logits.tolist(), "it has no tokens, and so no factors"
