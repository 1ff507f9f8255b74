"""Proposals from the text itself."""

import pytest

from engine.speculation.ngram import lookup


@pytest.mark.parametrize(
    ("text", "most", "found", "rule"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 4, [9, 1, 2, 3], "what followed the same words"),
        ([1, 2, 3, 9, 1, 2, 3], 1, [9], "at most so many"),
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8], "the latest earlier place"),
        (
            [5, 1, 2, 3, 4, 6, 2, 3, 4, 7, 1, 2, 3, 4],
            1,
            [6],
            "the longest match first, though a shorter is later",
        ),
        ([1, 2, 3, 4], 3, [], "no match, no proposal"),
        ([7, 7, 7], 3, [7], "a place may overlap the end, but it is not the end itself"),
        ([3, 1, 2, 3, 1, 2], 9, [3, 1, 2], "a proposal ends where the text does"),
        ([1], 3, [], "one token is no match"),
        ([], 3, [], "an empty text has none"),
        ([1, 5, 1], 3, [], "fewer than `min_n` tokens are no match"),
    ],
)
def test_lookup_finds_what_followed_the_same_words(text, most, found, rule):
    assert lookup(text, most) == found, rule


def test_max_n_and_min_n_are_what_they_say():
    text = [1, 2, 8, 3, 2, 9, 4, 2]
    assert lookup(text, 1) == [], "one token is shorter than the default min_n, 2"
    assert lookup(text, 1, min_n=1) == [9], "the latest place of one token"
    far = [9, 1, 2, 3, 4, 5, 6, 8, 2, 3, 4, 5, 7, 1, 2, 3, 4, 5]
    assert lookup(far, 1, max_n=5) == [6], "five tokens stand at the beginning"
    assert lookup(far, 1, max_n=4) == [7], "four of them stood there later, too"
