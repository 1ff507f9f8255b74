"""Probabilities: four tokens worked out by hand, then Hugging Face's processors, in any company."""

import math
import random

import pytest
import torch

from engine.decoding.params import SamplingParams
from engine.decoding.sampling import distribution, sample
from engine.decoding.sampling_state import SamplingState
from tests.part05 import reference

# --- by hand: four tokens with the probabilities 0.4, 0.3, 0.2 and 0.1 ---

FOUR = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]


def percent(logits=FOUR, **knobs) -> list[float]:
    """What each of the tokens gets, in percent; nothing was said so far."""
    probs = distribution(torch.tensor([logits]), [SamplingState(SamplingParams(**knobs), [], [], 0)])[0]
    return [round(100 * p, 1) for p in probs.tolist()]


def test_without_a_knob_it_is_the_softmax():
    assert percent() == [40, 30, 20, 10], "no knob is set: the probabilities are the softmax of the logits"


def test_temperature_divides_the_logits():
    assert percent(temperature=0.5) == [53.3, 30, 13.3, 3.3], (
        "temperature 0.5 doubles the logits, so the probabilities are squared (16 : 9 : 4 : 1) and scaled"
    )


def test_a_temperature_near_zero_divides_as_any_other():
    assert percent([1e-5 * math.log(3), 0.0], temperature=1e-5) == [75, 25], (
        "temperature 0.00001 is a temperature: it divides, and only 0 itself is greedy by definition"
    )
    assert percent([2.0, 1.0], temperature=1e-40) == [100, 0], (
        "a temperature below COLDEST counts as COLDEST: to divide by less gives infinity, and then NaN"
    )


def test_top_k_keeps_the_k_likeliest_and_scales_them_to_one():
    assert percent(top_k=2) == [57.1, 42.9, 0, 0], (
        "top-k 2 keeps 40 and 30, and what stays is scaled up to 100"
    )
    for off in (0, -1, 4, 99):
        try:
            kept = percent(top_k=off)
        except (IndexError, RuntimeError) as error:
            pytest.fail(f"top_k={off} cuts nothing off four tokens, but raised {error}")
        assert kept == [40, 30, 20, 10], f"top_k={off} cuts nothing off four tokens"
    both = [SamplingState(SamplingParams(top_k=k), [1], [], 0) for k in (-1, 2)]
    try:
        probs = distribution(torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 2).log(), both)
    except (IndexError, RuntimeError) as error:
        pytest.fail(f"top_k=-1 is off, also in a row beside one with top_k=2, but it raised {error}")
    assert (probs > 0).sum(-1).tolist() == [4, 2], "top_k=-1 is off, also in a row beside one with top_k=2"


def test_top_p_keeps_the_token_that_crosses_p():
    assert percent(top_p=0.6) == [57.1, 42.9, 0, 0], (
        "top-p keeps the smallest set that reaches p: 40 falls short of 60, the token that crosses it stays"
    )
    assert percent(top_p=0.95) == [40, 30, 20, 10], "40 + 30 + 20 falls short of 95: the fourth token stays"


def test_top_p_stops_at_the_token_that_reaches_p_exactly():
    logits = torch.tensor([4.0, 2.0, 1.0, 1.0]).log()
    assert logits.softmax(-1).tolist() == [0.5, 0.25, 0.125, 0.125]  # exact: nothing hangs on rounding
    assert percent(logits.tolist(), top_p=0.75) == [66.7, 33.3, 0, 0], (
        "top-p stops as soon as p is reached: 50 + 25 is 75, so nothing after these two stays"
    )
    assert percent(logits.tolist(), top_p=0.5) == [100, 0, 0, 0], "the first token reaches 50 by itself"


def test_the_likeliest_stays_however_small_p_is():
    assert percent(top_p=0.01) == [100, 0, 0, 0], "the likeliest token always stays"


def test_min_p_is_a_share_of_the_likeliest():
    assert percent(min_p=0.6) == [57.1, 42.9, 0, 0], (
        "min-p 0.6 keeps what has at least 0.6 of the likeliest token's 40, which is 24"
    )


def test_top_p_measures_what_top_k_left():
    assert percent(top_k=2, top_p=0.5) == [100, 0, 0, 0], (
        "top-p comes after top-k and measures over what top-k left: of 57 and 43, the first reaches 50 alone"
    )


def test_top_p_comes_after_the_temperature():
    assert percent(temperature=2, top_p=0.65) == [38.9, 33.7, 27.5, 0], (
        "temperature comes before the fences: at 2 the four are 33, 28, 23, 16, and top-p 0.65 needs three"
    )


def test_min_p_comes_after_the_temperature():
    assert percent(temperature=2, min_p=0.7) == [38.9, 33.7, 27.5, 0], (
        "temperature comes before the fences: at 2 the third is 23/33 = 0.71 of the first and passes 0.7"
    )


def test_min_p_comes_after_top_p():
    assert percent(top_p=0.6, min_p=0.4) == [57.1, 42.9, 0, 0], (
        "min-p lets nothing back in that top-p cut off"
    )


def test_bias_and_penalties_come_before_the_temperature():
    assert percent([1.0, 1.0], temperature=0.5, logit_bias={0: 1}) == [88.1, 11.9], (
        "a bias is added before the temperature divides: (1 + 1) / 0.5 against 1 / 0.5"
    )


def test_temperature_zero_leaves_one_token_possible():
    assert percent(temperature=0) == [100, 0, 0, 0], (
        "temperature 0 is greedy: the likeliest token gets everything"
    )
    assert percent([1.0, 3.0, 3.0, 0.0], temperature=0) == [0, 100, 0, 0], (
        "temperature 0 gives one token everything: of two equals the first"
    )
    assert percent(temperature=0, top_k=2, min_p=0.1) == [100, 0, 0, 0], "greedy with fences is greedy"
    assert percent(temperature=0, logit_bias={3: 9}) == [0, 0, 0, 100], (
        "greedy looks at the logits after their bias"
    )


@pytest.mark.parametrize("knob", [{"top_k": 2}, {"top_p": 0.4}, {"min_p": 1.0}], ids=str)
def test_equals_at_the_border_all_stay(knob):
    assert percent([3.0, 3.0, 3.0, 1.0], **knob) == [33.3, 33.3, 33.3, 0], (
        "the border is a value: who equals it stays, so three equal tokens stay or go together"
    )


def test_each_row_has_its_own_knobs():
    wishes = [{}, {"top_k": 1}, {"top_p": 0.6}, {"min_p": 0.6}, {"temperature": 0.5}, {"temperature": 0}]
    rows = [SamplingState(SamplingParams(**wish), [], [], 0) for wish in wishes]
    together = distribution(torch.tensor([FOUR]).repeat(6, 1), rows)
    for wish, probs in zip(wishes, together.tolist(), strict=True):
        got = [round(100 * p, 1) for p in probs]
        assert got == percent(**wish), (
            f"the row that asks for {wish or 'nothing'} gets the same in a batch as alone"
        )


# --- against Hugging Face, and OpenAI's formula for frequency and presence ---

ONE_KNOB = [
    *[{"temperature": value} for value in (0.01, 0.1, 0.5, 0.7, 1, 1.5, 10, 1000)],
    *[{"top_k": value} for value in (-1, 0, 1, 2, 7, 50, 256, 257, 10**9)],
    *[{"top_p": value} for value in (1e-9, 0.01, 0.3, 0.5, 0.9, 0.99, 0.99999, 1)],
    *[{"min_p": value} for value in (0, 1e-6, 0.01, 0.05, 0.3, 0.9, 1)],
    *[{"repetition_penalty": value} for value in (0.1, 0.8, 1.2, 2, 10)],
    *[{"frequency_penalty": value} for value in (-2, -0.5, 0.3, 2)],
    *[{"presence_penalty": value} for value in (-2, -0.5, 0.3, 2)],
    *[{"logit_bias": value} for value in ({3: 5.0}, {3: -100, 9: 100}, {0: 0.5, 256: -0.5}, {1: 0.0})],
    *[{"min_tokens": value} for value in (1, 6, 7)],
]


def assert_equals_reference(logits, rows):
    """distribution(logits[R, V]) against one call of Hugging Face's per row."""
    __tracebackhide__ = True
    probs = distribution(logits, rows)
    assert probs.dtype == torch.float32
    for row, ours, row_logits in zip(rows, probs, logits, strict=True):
        theirs = reference.probabilities(row_logits, row)
        token = int((ours - theirs).abs().argmax())
        mine, wanted, possible = float(ours[token]), float(theirs[token]), int((theirs > 0).sum())
        assert mine == pytest.approx(wanted, abs=1e-6), f"token {token} with {reference.knobs(row)}"
        assert int((ours > 0).sum()) == possible, f"so many tokens are possible with {reference.knobs(row)}"
        assert torch.equal(ours > 0, theirs > 0), f"other tokens are possible with {reference.knobs(row)}"


@pytest.mark.parametrize("knob", ONE_KNOB, ids=str)
def test_each_knob_alone_equals_hugging_faces_processor(knob):
    logits = reference.random_logits(8, 257, seed=1)
    rows = [
        SamplingState(SamplingParams(**knob), [1, 2, 3, 3], [5, 5, 5, 9, 2, 256][:n], 0, [4, 200])
        for n in range(7)
    ]
    rows.append(SamplingState(SamplingParams(**knob), [256], [0] * 20, 0, [4]))
    assert_equals_reference(logits, rows)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("vocab_size", [11, 257, 4096])
def test_knobs_chained_in_a_batch_of_unlike_rows_equal_hugging_faces_chain(seed, vocab_size):
    rng = random.Random(f"{seed} {vocab_size}")
    rows = [reference.random_row(rng, vocab_size) for _ in range(16)]
    logits = reference.random_logits(16, vocab_size, seed, scale=rng.choice([0.5, 3, 12]))
    assert_equals_reference(logits, rows)


@pytest.mark.parametrize("seed", range(10))
def test_a_row_among_others_equals_the_row_alone(seed):
    rng = random.Random(seed)
    rows = [reference.random_row(rng, 300) for _ in range(40)]
    rows += [
        SamplingState(SamplingParams(temperature=0), [1], [], 0),
        SamplingState(SamplingParams(), [1], [], 0),
    ]
    logits = reference.random_logits(42, 300, seed)
    together = distribution(logits, rows)
    alone = torch.cat([distribution(logits[i : i + 1], [row]) for i, row in enumerate(rows)])
    off = float((together - alone).abs().max())
    assert off <= 1e-6, f"a row's probabilities hang on its own knobs, not on its neighbours': off by {off}"
    order = list(range(42))
    rng.shuffle(order)
    shuffled = distribution(logits[order], [rows[i] for i in order])
    assert (shuffled - together[order]).abs().max() <= 1e-7


def test_logits_are_left_as_they_were():
    rng = random.Random(0)
    logits = reference.random_logits(16, 50, 0)
    before = logits.clone()
    distribution(logits, [reference.random_row(rng, 50) for _ in range(16)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_worked_on_in_fp32(dtype):
    rng = random.Random(0)
    rows = [reference.random_row(rng, 100) for _ in range(8)]
    logits = reference.random_logits(8, 100, 3).to(dtype)
    probs = distribution(logits, rows)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, distribution(logits.float(), rows))


@pytest.mark.parametrize(
    "others", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"logit_bias": {7: 100}}]
)
def test_a_row_with_temperature_zero_is_one_hot_at_the_likeliest(others):
    logits = reference.random_logits(3, 50, 5)
    rows = [SamplingState(SamplingParams(temperature=t, **others), [1], [], 0) for t in (0, 1, 0)]
    probs = distribution(logits, rows)
    for i in (0, 2):
        expected = torch.zeros(50)
        expected[7 if "logit_bias" in others else int(logits[i].argmax())] = 1
        assert torch.equal(probs[i], expected)
    assert torch.equal(probs[1:2], distribution(logits[1:2], rows[1:2]))


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-6, 1e-10, 1e-30, 1e-38, 1e-45, 1e-300, 5e-324])
def test_as_temperature_goes_to_zero_sampling_becomes_greedy(temperature):
    logits = torch.tensor([[1.0, 20.0, -30.0, 19.5], [-1e4, -2e4, -3e4, -1.1e4]])
    rows = [SamplingState(SamplingParams(temperature=temperature, seed=s), [1], [], s) for s in range(2)]
    probs = distribution(logits, rows)
    assert torch.allclose(probs, torch.tensor([[0.0, 1, 0, 0], [1, 0, 0, 0]]), atol=1e-12)
    assert sample(logits, rows).tolist() == [1, 0]


def test_the_likeliest_token_always_stays():
    logits = reference.random_logits(4, 50, 6, scale=0.01)
    params = SamplingParams(top_p=1e-12, top_k=1, min_p=1.0)
    probs = distribution(logits, [SamplingState(params, [1], [], 0)] * 4)
    assert torch.equal(probs, torch.nn.functional.one_hot(logits.argmax(-1), 50).float())


def test_logit_bias_of_a_hundred_forces_and_of_minus_a_hundred_bans():
    logits = reference.random_logits(500, 50, 7)
    rows = [SamplingState(SamplingParams(logit_bias={9: 100}, seed=i), [1], [], i) for i in range(250)]
    rows += [SamplingState(SamplingParams(logit_bias={9: -100}, seed=i), [1], [], i) for i in range(250)]
    tokens = sample(logits, rows)
    assert set(tokens[:250].tolist()) == {9}
    assert 9 not in tokens[250:].tolist()
    greedy = [SamplingState(SamplingParams(temperature=0, logit_bias={9: 100}), [1], [], 0)]
    assert sample(logits[:1], greedy).item() == 9


def test_penalties_bend_greedy_choices_too():
    logits = torch.tensor([[5.0, 4.0, 1.0]])
    for penalty in ({"repetition_penalty": 2}, {"frequency_penalty": 1.5}, {"presence_penalty": 1.5}):
        params = SamplingParams(temperature=0, **penalty)
        assert sample(logits, [SamplingState(params, [2], [0], 0)]).item() == 1
        assert sample(logits, [SamplingState(params, [2], [], 0)]).item() == 0


def test_stop_tokens_cannot_be_drawn_before_min_tokens():
    logits = torch.tensor([[50.0, 1.0, 2.0, 50.0]])
    params = SamplingParams(min_tokens=3, seed=0)
    for length in range(5):
        probs = distribution(logits, [SamplingState(params, [1], [1] * length, 0, [0, 3])])[0]
        assert (probs[[0, 3]] == 0).all() == (length < 3)
        greedy = SamplingParams(min_tokens=3, temperature=0)
        chosen = sample(logits, [SamplingState(greedy, [1], [1] * length, 0, [0, 3])]).item()
        assert chosen == (2 if length < 3 else 0)


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, 10), []).tolist() == []


@pytest.mark.parametrize("vocab_size", [11, 257])
def test_no_decision_is_read_back_from_the_device(vocab_size):
    """On the meta device there are no values: whoever asks for one (item, tolist, nonzero, a mask) fails."""
    rng = random.Random(0)
    rows = [reference.random_row(rng, vocab_size) for _ in range(30)]
    rows += [SamplingState(SamplingParams(temperature=0, logit_bias={1: 1}), [1], [], 0)]
    tokens = sample(torch.empty(31, vocab_size, device="meta"), rows)
    assert tokens.shape == (31,)
    assert sample(torch.empty(1, vocab_size, device="meta"), rows[-1:]).shape == (1,)
