"""Which tokens fit in a state of an automaton over bytes, by hand: a table of bytes and twelve tokens."""

import pytest

from engine.structured.automaton import TokenAutomaton
from engine.structured.derivative import NOTHING
from engine.structured.vocabulary import Vocabulary
from tests.partB.words import WORDS, ids, vocabulary

# (ab)+c: by state, what each byte leads to. State 3 is the end.
STATES = [{"a": 1}, {"b": 2}, {"a": 1, "c": 3}, {}]


class Table:
    """In place of a `ByteAutomaton`: states, the one where a text may end, and what was asked about."""

    def __init__(self, states: list[dict[str, int]], end: int) -> None:
        self.states, self.end = states, end
        self.asked: list[tuple[int, str]] = []

    def after(self, state: int, byte: int) -> int | None:
        self.asked.append((state, chr(byte)))
        return self.states[state].get(chr(byte))

    def may_end(self, state: int) -> bool:
        return state == self.end


def automaton(words: Vocabulary | None = None, states=STATES, end: int = 3) -> TokenAutomaton:
    tokens = TokenAutomaton(NOTHING, words or vocabulary())
    tokens.byte_automaton = Table(states, end)
    return tokens


@pytest.fixture
def tokens() -> TokenAutomaton:
    return automaton()


def words(token_ids: list[int]) -> list[str]:
    return sorted(WORDS[i] if i < len(WORDS) else "half of é" for i in token_ids)


def test_a_token_of_one_byte_fits_where_its_byte_does(tokens):
    found = words(tokens._fitting(2))
    assert "c" in found, "a token need not begin at the first state: state 2 is asked about, where c fits"
    assert "b" not in found, "b does not fit in state 2"


def test_a_token_of_several_bytes_fits_if_each_does_in_the_state_behind_the_one_before(tokens):
    assert words(tokens._fitting(0)) == ["a", "ab"], (
        "a leads to state 1, where b fits: so `a` and `ab`, the longer token, too, and none that begins with "
        "another byte"
    )


def test_a_token_may_span_the_end_of_one_round_and_the_beginning_of_the_next(tokens):
    assert words(tokens._fitting(1)) == ["b", "ba"], "ba goes from state 1 through state 2 to state 1"


def test_one_byte_that_does_not_fit_rules_a_token_out():
    tokens = automaton(Vocabulary({0: b"abc", 1: b"abb", 2: b"xabc", 3: b"axbc"}))
    assert tokens._fitting(0) == [0], "one byte that does not fit, wherever it stands, rules the token out"


@pytest.mark.parametrize(
    ("states", "end", "word", "rule"),
    [
        ([{"a": 1}, {"b": 0}], 2, b"aba", "state 0 is a state like any other: a token may come back to it"),
        ([{"a": 1}, {"a": 1}], 1, b"aa", "where a text may end, it may go on as well"),
        ([{"\xc3": 1}, {}], 1, b"\xc3", "a token may be half of a character"),
    ],
)
def test_what_does_not_rule_a_token_out(states, end, word, rule):
    assert automaton(Vocabulary({0: word}), states, end)._fitting(0) == [0], rule


def test_the_tree_is_not_changed(tokens):
    assert [words(tokens._fitting(0)) for _ in range(3)] == [["a", "ab"]] * 3, (
        "the tree of tokens is not written to: who asks again gets the same answer"
    )


def test_nothing_fits_at_the_end(tokens):
    assert tokens._fitting(3) == []


def test_two_tokens_may_have_the_same_bytes():
    tokens = automaton(Vocabulary({0: b"ab", 1: b"b", 2: b"ab"}))
    assert sorted(tokens._fitting(0)) == [0, 2], "two tokens may have the same bytes: both fit"


def test_tokens_with_the_same_beginning_are_tried_together(tokens):
    tokens._fitting(0)
    asked = tokens.byte_automaton.asked
    assert len(asked) == len(set(asked)) == 10, (
        "each byte is tried once for all tokens that begin so: nine first bytes, and behind the a, which "
        f"fits, the b of ab; {len(asked)} were tried"
    )


def test_a_mask_has_what_fits_and_is_computed_once_for_a_state(tokens):
    first = tokens.allowed(0)
    assert int(first[0]) == sum(1 << i for i in ids("a", "ab"))
    count = len(tokens.byte_automaton.asked)
    assert tokens.allowed(0) is first, "the mask of a state is kept"
    assert len(tokens.byte_automaton.asked) == count


@pytest.mark.parametrize("empty", [{}, {0: b""}])
def test_a_vocabulary_without_text_says_so(empty):
    with pytest.raises(ValueError, match="no token stands for text"):
        Vocabulary(empty)
