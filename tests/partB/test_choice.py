"""A choice by hand: which of twelve tokens may come."""

import numpy as np
import pytest

from engine.decoding.sampling_state import allowed_by
from engine.structured.choice import Choice
from engine.structured.constraint import OutputConstraint
from engine.structured.vocabulary import Vocabulary
from tests.partB.words import ids, shown, vocabulary

CHOICES = ["yes", "no", "none", "abc"]


@pytest.fixture
def choice() -> Choice:
    return Choice(CHOICES, vocabulary())


def test_a_token_that_goes_on_past_the_end_of_a_choice_may_not_come():
    assert shown(Choice(["a"], vocabulary()).allowed(b"")) == {"a"}, (
        "no token goes on past what a choice has left: `ab` says more than `a`"
    )


@pytest.mark.parametrize(
    ("said", "may_come", "rule"),
    [
        ("ye", {"s"}, "a token begins what is left behind what was said, and not the whole choice"),
        ("y", set(), "a token that begins what is left: `es` begins with none of the twelve"),
        ("a", {"b"}, "a token may be a part of what is left, it need not be all of it"),
        ("", {"yes", "ye", "no", "n", "a", "ab"}, "each beginning of every choice, short or long"),
        ("n", {"o"}, "no token goes on past what a choice has left, and both choices have an o left"),
        ("no", {"n"}, "where one choice is complete, a longer one may still go on"),
        ("yes", set(), "where nothing is left, no token may come"),
        ("x", set(), "no choice begins so: no token may come"),
    ],
)  # fmt: skip
def test_a_token_may_come_if_it_begins_what_a_choice_has_left(choice, said, may_come, rule):
    assert shown(choice.allowed(said.encode())) == may_come, rule


def test_an_output_may_end_at_a_whole_choice_even_one_that_begins_another(choice):
    ends = [text for text in ("", "n", "no", "non", "none", "yes", "abc") if choice.may_end(text.encode())]
    assert ends == ["no", "none", "yes", "abc"]


def test_a_matcher_follows_tokens_and_takes_them_back(choice):
    matcher = choice.start()
    assert not matcher.advance(ids("s")[0]), "no choice begins with it"
    assert matcher.advance(ids("n")[0])
    assert matcher.advance(ids("o")[0])
    assert matcher.may_end()
    assert shown(matcher.allowed()) == {"n"}
    matcher.rollback(2)
    assert not matcher.may_end()
    assert shown(matcher.allowed()) == {"yes", "ye", "no", "n", "a", "ab"}, (
        "`allowed` changes nothing: a token that is taken back leaves every choice as it was"
    )
    assert not matcher.advance(99), "a token that stands for no text"


def test_a_character_may_come_in_halves():
    choice = Choice(["é"], vocabulary())
    rule = "choices are bytes, not characters: a token may be half of one"
    assert shown(choice.allowed(b"")) == {"é", "c3"}, rule
    assert shown(choice.allowed(b"\xc3")) == {"a9"}, rule


def test_two_tokens_may_have_the_same_bytes():
    choice = Choice(["ab"], Vocabulary({0: b"ab", 1: b"b", 2: b"ab"}))
    assert np.flatnonzero(allowed_by(choice.allowed(b""), 32)).tolist() == [0, 2], (
        "two tokens may have the same bytes: both may come"
    )


def test_a_constraint_without_tokens_that_end_an_output_allows_words_alone(choice):
    output: list[int] = []
    constraint = OutputConstraint(choice, [], output)
    assert shown(constraint.masks([])[0]) == {"yes", "ye", "no", "n", "a", "ab"}
    output += ids("yes")
    assert shown(constraint.masks([])[0]) == set(), "the output is whole, and nothing can end it"
