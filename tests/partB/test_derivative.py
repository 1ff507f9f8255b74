"""What is left of a regular expression behind a byte, by hand."""

import pytest

from engine.structured.derivative import EMPTY, NOTHING, Expression, derivative, matches_empty
from engine.structured.regex import parse


def left(pattern: str, text: str) -> Expression:
    """What is left of a pattern behind a text."""
    expression = parse(pattern)
    for byte in text.encode():
        expression = derivative(expression, byte)
    return expression


def test_a_byte_uses_up_a_set_that_has_it():
    assert left("a", "a") == EMPTY, "the byte is used up: the empty text is left"
    assert left("[a-c]", "b") == EMPTY, "one byte of the set is enough"
    assert left("a", "b") == NOTHING, "no text of it begins with b: NOTHING is left"


def test_the_byte_belongs_to_the_first_item_of_a_chain_and_the_others_follow():
    rule = "the items behind the one that the byte belongs to follow"
    assert not matches_empty(left("abc", "a")), rule
    assert matches_empty(left("abc", "abc")), rule
    assert not matches_empty(left("abc", "bc")), "an item that may not be empty is not stepped over"


def test_items_that_may_be_empty_are_stepped_over():
    assert matches_empty(left("a?b", "b")), "an item that may be empty is stepped over"
    assert matches_empty(left("a?b?cd", "cd")), "an item that may be empty is stepped over, and the next, too"
    assert not matches_empty(left("a?bc", "c")), "an item that may not be empty is not stepped over"


def test_every_option_goes_on():
    for text in ("ab", "ac"):
        assert matches_empty(left("ab|ac", text)), "every option goes on that the byte fits: b or c is left"
    assert not matches_empty(left("ab|cd", "cb")), "an option that the byte does not fit is gone"


def test_what_is_left_is_in_its_simple_form():
    """Equal rests are equal objects: so an automaton has few states."""
    rule = "what is left is kept in its simple form by"
    assert left("abc", "a") == parse("bc"), f"{rule} `chain`: bc, and no empty text before it"
    assert left("a?b", "b") == EMPTY, f"{rule} `chain`: what holds NOTHING is NOTHING, and is no option"
    assert left("ab|ac", "a") == parse("[bc]"), f"{rule} `either`: one set of both bytes"
    assert left("ab|cd", "c") == parse("d"), f"{rule} `either`: an option that is NOTHING is none"
    assert left("aa", "aa") == EMPTY


def test_one_round_of_a_repetition_is_taken_and_the_others_follow():
    assert left("(ab)*", "a") == parse("b(ab)*"), (
        "the other rounds follow what is left of this one, and no number of rounds is below 0"
    )
    assert left("a{2,3}", "a") == parse("a{1,2}"), "a round is taken: one less at least, and one less at most"
    assert left("a+", "a") == parse("a*"), "a round is taken: of one or more, none or more are left"
    assert left("a*", "a") == parse("a*"), "no number of rounds is below 0: of any number any number is left"
    assert left("a{0,2}", "a") == parse("a?"), "no number of rounds is below 0, and at most one is left"
    assert left("a{2}", "a") == parse("a"), (
        "a round is taken, and `repeat` makes of one round the item itself"
    )
    assert left("a{2}", "aaa") == NOTHING, "no number of rounds is below 0: after two, none is left"


def test_a_byte_may_belong_to_several_items_at_once():
    assert left("(a|b)*a", "a") == parse("(a|b)*a|"), "it is the last a, or one before it"
    assert left("a*ab", "a") == parse("a*ab|b"), "it is the last a, or one before it"


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("(ab)+c", ["abc", "ababc"], ["c", "ab", "abcc", "aabc"]),
        (r"\d{3}-\d{4}", ["555-1234"], ["55-1234", "555-123", "555-12345"]),
        ("(yes|no|none)!?", ["yes", "no!", "none"], ["yesno", "n", "!"]),
        ("é+", ["é", "éé"], ["e", ""]),
    ],
)
def test_a_text_fits_if_what_is_left_in_the_end_matches_the_empty_text(pattern, fitting, others):
    assert [text for text in (*fitting, *others) if matches_empty(left(pattern, text))] == fitting
