"""A regular expression as an automaton: by hand on twelve tokens, and against Python's re by drawing."""

import random
import re

import numpy as np
import pytest

from engine.decoding.sampling_state import allowed_by
from engine.structured import automaton
from engine.structured.automaton import ByteAutomaton, TokenAutomaton
from engine.structured.derivative import matches_empty
from engine.structured.matcher import StructureFailed
from engine.structured.regex import RegexError, parse
from engine.structured.utf8 import characters, complement
from tests.partB.words import WORDS, ids, shown, vocabulary

LETTERS = "abé\n1 _-]€😀"


def drawn(rng: random.Random, depth: int) -> str:
    """A regular expression over LETTERS."""
    sets = [".", r"\d", r"\w", r"\S", r"\W", "[ab]", "[^a]", "[a-é]", "[^é€]", r"[\d_]", "[€-😀]", r"[\]a-]"]
    inner = [drawn(rng, depth - 1) for _ in range(2)] if depth else []
    least = rng.randrange(3)
    kinds = [re.escape(rng.choice(LETTERS)), rng.choice(sets)]
    if depth:
        kinds += [
            "".join(inner),
            f"(?:{'|'.join(inner)})",
            f"({inner[0]}){rng.choice(['*', '+', '?', '*?', f'{{{least},{least + rng.randrange(3)}}}'])}",
            "|".join(inner),
        ]
    return rng.choice(kinds)


def fits(states: ByteAutomaton, text: str) -> bool:
    state = 0
    for byte in text.encode():
        state = states.after(state, byte)
        if state is None:
            return False
    return states.may_end(state)


def test_the_empty_text_matches_what_may_be_left_out():
    assert [r for r in ("", "a", "a?", "a*", "a+", "a?b?", "a?b", "(a*)+") if matches_empty(parse(r))] == [
        "", "a?", "a*", "a?b?", "(a*)+",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_an_automaton_and_pythons_re_agree(seed):
    rng = random.Random(seed)
    num_fitting = 0
    for _ in range(250):
        pattern = drawn(rng, 4)
        states, theirs = ByteAutomaton(parse(pattern)), re.compile(pattern, re.ASCII)
        for _ in range(12):
            text = "".join(rng.choice(LETTERS) for _ in range(rng.randrange(6)))
            wanted = theirs.fullmatch(text) is not None
            assert fits(states, text) == wanted, f"{pattern!r} and {text!r}"
            num_fitting += wanted
    assert num_fitting > 100


def test_a_token_may_span_several_states_and_fits_only_if_all_its_bytes_do():
    tokens = TokenAutomaton(parse("(ab)+c|no"), vocabulary())
    assert shown(tokens.allowed(0)) == {"a", "ab", "n", "no"}
    behind_ab = tokens.after(0, ids("ab")[0])
    assert behind_ab == tokens.after(tokens.after(0, ids("a")[0]), ids("b")[0]), "the same state on both ways"
    assert shown(tokens.allowed(behind_ab)) == {"a", "ab", "c"}
    behind_a = tokens.after(0, ids("a")[0])
    assert shown(tokens.allowed(behind_a)) == {"b", "ba"}, "ba is the end of one round and half the next"
    assert tokens.after(behind_a, ids("ab")[0]) is None
    assert tokens.after(0, 99) is None, "a token that stands for no text"
    assert [tokens.may_end(state) for state in (0, behind_ab, tokens.after(0, ids("no")[0]))] == [
        False, False, True,
    ]  # fmt: skip


def test_a_mask_allows_what_fits_one_by_one():
    rng, words = random.Random(5), vocabulary()
    for _ in range(60):
        tokens = TokenAutomaton(parse(drawn(rng, 3)), words)
        state = 0
        for _ in range(4):
            allowed = set(np.flatnonzero(allowed_by(tokens.allowed(state), 32)))
            assert allowed == {i for i in words.tokens if tokens.after(state, i) is not None}
            if not allowed:
                break
            state = tokens.after(state, rng.choice(sorted(allowed)))


def test_a_character_may_come_in_halves():
    tokens = TokenAutomaton(parse("[à-ÿ]"), vocabulary())
    assert shown(tokens.allowed(0)) == {"é", "c3"}
    half = tokens.after(0, len(WORDS))
    assert shown(tokens.allowed(half)) == {"a9"}
    assert not tokens.may_end(half)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0x10FFFF), (0x7F, 0x80), (0x7FF, 0x800), (0xFFFF, 0x10000), (0x20, 0x20AC)]
)
def test_a_range_of_characters_is_that_range_in_utf8(low, high):
    states = ByteAutomaton(characters([(low, high)]))
    rng = random.Random(low)
    near = [point + d for point in (low, high, 0x7F, 0x7FF, 0xD800, 0xDFFF, 0xFFFF) for d in (-1, 0, 1)]
    for point in [*near, *(rng.randrange(0x110000) for _ in range(500))]:
        if 0 <= point <= 0x10FFFF and not 0xD800 <= point <= 0xDFFF:
            assert fits(states, chr(point)) == (low <= point <= high), hex(point)
    assert complement([]) == [(0, 0xD7FF), (0xE000, 0x10FFFF)], "halves of UTF-16 are no characters"


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(?=a)b", "look-ahead is not supported"),
        ("a(?<=a)b", "look-behind is not supported"),
        (r"\bfoo", "word boundaries and references back are not supported"),
        (r"(a)\1", "references back are not supported"),
        ("(?P<x>a)", "a named group is not supported"),
        ("(?i)a", "this group is not supported"),
        ("(a", "a closing bracket is missing"),
        ("a)", "an opening bracket is missing"),
        ("[a", "ends too early"),
        ("[z-a]", "a range from a character to a later one"),
        (r"[a-\d]", "a range from a character to a later one"),
        ("*a", "there is nothing to repeat"),
        ("a**", "a repetition of a repetition"),
        ("a{2,1}", "with m up to n"),
        ("a{5000}", "n up to 1000"),
        ("a{x}", "a number of repetitions is expected"),
        ("a^b", r"\^ is accepted at the beginning"),
        (r"\x9", "2 hexadecimal digits"),
        (r"\q", "an escape of this letter"),
        ("(" * 60 + "a" + ")" * 60, "more than 50 groups"),
        ("\\", "ends too early"),
    ],
)
def test_what_is_no_expression_or_not_supported_is_refused_with_its_place(pattern, says):
    with pytest.raises(RegexError, match=f"at character [0-9]+, .*{says}"):
        parse(pattern)


@pytest.mark.parametrize("pattern", ["^a$", "^ab*$", r"\u00e9", r"\x41", r"[\n\t ]", "a{2}", "a{,2}", "[]a]"])
def test_forms_of_pythons_are_read_as_python_reads_them(pattern):
    states, theirs = ByteAutomaton(parse(pattern)), re.compile(pattern, re.ASCII)
    for text in ("", "a", "aa", "ab", "é", "A", "\n", "]", "abb"):
        assert fits(states, text) == bool(theirs.fullmatch(text)), text


def test_states_are_bounded(monkeypatch):
    monkeypatch.setattr(automaton, "MAX_STATES", 100)
    states = ByteAutomaton(parse("(a|b)*a(a|b){12}"))
    texts = (f"{i:012b}".replace("0", "a").replace("1", "b") for i in range(2000))
    with pytest.raises(StructureFailed, match="more than 100 states"):
        any(fits(states, text) for text in texts)


def test_what_is_left_in_a_state_is_bounded(monkeypatch):
    monkeypatch.setattr(automaton, "MAX_SIZE", 50)
    states = ByteAutomaton(parse("((a|b)*a(a|b){6}|(a|bb)*){1,20}"))
    with pytest.raises(StructureFailed, match="grows too large"):
        fits(states, "abababbabaabbabababbab")
