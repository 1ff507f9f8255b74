"""The ends of a decode step: the choice of the likeliest tokens as `sample` does it, and where tokens lie."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.decoding.params import SamplingParams
from engine.decoding.sampling import NO_TOKEN, sample
from engine.decoding.sampling_state import SamplingState
from engine.kernels.greedy import PART, Greedy, fetch
from tests.part13.test_paged_attention import DEVICE

INF, NAN = float("inf"), float("nan")
LARGE = 2 * PART + 100  # three parts, the last one not full
GREEDY = SamplingState(SamplingParams(temperature=0), [1], [], 0)


def chosen(logits: torch.Tensor, V: int, max_rows: int = 5) -> list[int]:
    out = torch.full((max_rows,), 99, device=DEVICE)
    Greedy(V, max_rows, torch.device(DEVICE))(logits, out)
    assert (out[len(logits) :] == 99).all(), "there are no more rows than logits"
    return out[: len(logits)].tolist()


@pytest.mark.parametrize("V", [1, 67, PART, PART + 1, LARGE])
def test_the_likeliest_token_wherever_it_is(V):
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(5, V, generator=generator)
    for row, token in enumerate((0, V // 2, V - 1)):
        logits[row, token] = 50
    logits[3] -= 1000  # none above 0
    logits = logits.to(DEVICE)
    assert chosen(logits, V) == sample(logits, [GREEDY] * 5).tolist()


@pytest.mark.parametrize("places", [(3, 4), (0, LARGE - 1), (PART - 1, PART), (PART + 7, 2 * PART + 7)])
def test_of_equals_the_lowest_id(places):
    logits = torch.zeros(2, LARGE, device=DEVICE)
    logits[0, list(places)] = 8
    assert chosen(logits, LARGE) == [places[0], 0]


@pytest.mark.parametrize("place", [0, 5, PART, LARGE - 1])
@pytest.mark.parametrize("broken", [NAN, INF])
def test_a_row_whose_likeliest_is_no_finite_number_has_no_token(place, broken):
    logits = torch.zeros(3, LARGE, device=DEVICE)
    logits[:, 9] = 5
    logits[1, place] = broken
    logits[2] = -INF
    assert chosen(logits, LARGE) == sample(logits, [GREEDY] * 3).tolist() == [9, NO_TOKEN, NO_TOKEN]


def test_tokens_that_are_not_likely_at_all_may_be_infinitely_unlikely():
    logits = torch.full((1, LARGE), -INF, device=DEVICE)
    logits[0, PART + 3] = -4
    assert chosen(logits, LARGE) == [PART + 3]


def test_columns_beyond_the_vocabulary_are_no_tokens():
    """The output layer may have more rows than there are tokens."""
    V, logits = 70, torch.zeros(3, 128, device=DEVICE)
    logits[:, V:] = torch.tensor([100, NAN, INF], device=DEVICE)[:, None]
    logits[:, 11] = 1
    assert chosen(logits, V) == [11, 11, 11]


def test_half_precision():
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    assert chosen(logits, 300) == sample(logits, [GREEDY] * 2).tolist()


@pytest.mark.parametrize("S", [1, 3, 8])
def test_a_token_comes_from_where_it_was_chosen_or_as_given(S):
    given = torch.arange(100, 100 + S, dtype=torch.int32, device=DEVICE)
    last = torch.tensor([50, NO_TOKEN, 52, 53, 54, 55, 56, 57], device=DEVICE)
    sources = torch.tensor([2, -1, 1, 7, 0, -1, 2, 3], dtype=torch.int32, device=DEVICE)[:S]
    out = torch.full((S + 1,), 7, dtype=torch.int32, device=DEVICE)
    fetch(given, sources, last, out)
    # Where nothing could be chosen, token 0 is read: there is no token -1 to look up.
    assert out.tolist() == [*[52, 101, 0, 57, 50, 105, 52, 53][:S], 7]
