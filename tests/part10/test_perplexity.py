"""One number for a whole text."""

import math
import random

import pytest

from engine.decoding.logprobs import perplexity
from tests.part01.outcome import outcome


def test_the_worked_example_of_the_article():
    assert perplexity([math.log(p) for p in (0.5, 0.25, 0.125)]) == pytest.approx(4), (
        "1/2, 1/4 and 1/8 multiply to 1/64, whose cube root is 1/4: as unsure as among 4"
    )


def test_certainty_has_perplexity_1():
    assert outcome(perplexity, [0.0] * 5) == 1, "certain of each token: as unsure as among 1"


@pytest.mark.parametrize("count", [1, 2, 10])
def test_equal_chances_give_their_number_however_long_the_text(count):
    assert perplexity([math.log(1 / 10)] * count) == pytest.approx(10), (
        "the mean is taken: the length of the text does not count"
    )


def test_a_long_text_does_not_vanish():
    got = outcome(perplexity, [math.log(1 / 10)] * 2000)
    assert got == pytest.approx(10), (
        "the probability of 2,000 tokens at 1/10 is too small for a float, and becomes 0: add logarithms, "
        f"never multiply probabilities; it was {got}"
    )


def test_a_single_surprise_counts_by_its_logarithm():
    assert perplexity([math.log(0.01), 0.0]) == pytest.approx(10), (
        "the mean is over log probabilities: of 1/100 and 1 it is ln 1/10"
    )


def test_what_cannot_be_is_infinitely_surprising():
    assert outcome(perplexity, [-1.0, -math.inf]) == math.inf, (
        "the probability 0 is a surprise without end: inf"
    )


def test_a_text_of_no_tokens_has_none():
    error = outcome(perplexity, [])
    said = str(error).startswith("ValueError") and "at least one log probability is needed" in error
    assert said, f"no log probabilities: a ValueError, at least one log probability is needed; it was {error}"


def test_it_equals_the_inverse_geometric_mean():
    rng = random.Random(3)
    chances = [rng.uniform(0.01, 1) for _ in range(20)]
    assert perplexity([math.log(p) for p in chances]) == pytest.approx(math.prod(chances) ** (-1 / 20))
