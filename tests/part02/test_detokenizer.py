"""Text streamed from tokens: whole characters only, and in the end all of them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from tests.part01.outcome import outcome

SAMPLES = [
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family",
    "🇯🇵🇰🇪",
    "e\u0301\u0323",
    "a\x00b\n",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
]
END, TOOL, UNKNOWN = 256, 257, 4000  # special, added but not special, no token at all


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return Tokenizer.from_pretrained("storyteller")


def pieces(tokenizer, ids, skip_special_tokens=True) -> list[str]:
    """What each token gives, and at the end what the flush gives."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [detokenizer.push(id) for id in ids] + [detokenizer.flush()]


def test_a_letter_comes_at_once(byte_tokenizer):
    got = pieces(byte_tokenizer, b"ab")
    assert got == ["a", "b", ""], "a token that is a whole character is shown at once"


@pytest.mark.parametrize("character", ["é", "日", "😀"])
def test_a_character_comes_with_its_last_byte(byte_tokenizer, character):
    data = character.encode()
    waiting = [""] * (len(data) - 1)
    got = pieces(byte_tokenizer, data + b"b")
    assert got == [*waiting, character, "b", ""], "the bytes of a character wait until it is whole"


def test_a_byte_that_continues_nothing_is_replaced_at_once(byte_tokenizer):
    got = pieces(byte_tokenizer, [0x80, ord("a")])
    assert got == ["\ufffd", "a", ""], "a byte that can never become a character is U+FFFD at once, not kept"


def test_a_character_broken_off_is_replaced_when_the_next_one_begins(byte_tokenizer):
    got = pieces(byte_tokenizer, [0xF0, 0x9F, ord("a")])
    assert got == ["", "", "\ufffda", ""], "once the next character begins, what waited is U+FFFD"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_flush_turns_an_unfinished_character_into_one_replacement(byte_tokenizer, count):
    got = pieces(byte_tokenizer, "😀".encode()[:count])
    assert got == [""] * count + ["\ufffd"], "what still waits at the end is one U+FFFD, from flush"


def test_special_tokens_are_no_text(byte_tokenizer):
    got = pieces(byte_tokenizer, [ord("a"), END, ord("b")])
    assert got == ["a", "", "b", ""], "a special token is no text"


def test_special_tokens_are_text_when_asked_for(byte_tokenizer):
    got = pieces(byte_tokenizer, [ord("a"), END], skip_special_tokens=False)
    assert got == ["a", "<end>", ""], "with skip_special_tokens=False a special token is text"


def test_a_token_that_was_added_but_is_not_special_is_text(byte_tokenizer):
    assert pieces(byte_tokenizer, [TOOL]) == ["<tool>", ""], "only special tokens are hidden"


def test_a_hidden_token_within_a_character_leaves_the_character_whole(byte_tokenizer):
    first, second = "é".encode()
    got = pieces(byte_tokenizer, [first, END, second])
    assert got == ["", "", "é", ""], "a hidden token leaves the bytes that wait as they are"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("unknown", [258, UNKNOWN, -1])
def test_an_id_the_tokenizer_does_not_know_is_no_text(byte_tokenizer, unknown, skip):
    """A model may have more ids than its tokenizer; one such choice must not end a story."""
    first, second = "é".encode()
    got = outcome(pieces, byte_tokenizer, [ord("a"), first, unknown, second], skip)
    assert got == ["a", "", "", "é", ""], "an id that the tokenizer does not know is no text, and no error"


def test_nothing_is_left_after_a_flush(byte_tokenizer):
    detokenizer = Detokenizer(byte_tokenizer)
    detokenizer.push(0xF0)
    got = [detokenizer.flush(), detokenizer.flush(), detokenizer.push(ord("a"))]
    assert got == ["\ufffd", "", "a"], "flush leaves nothing behind"


def test_two_streams_do_not_share_their_bytes(byte_tokenizer):
    one, two = Detokenizer(byte_tokenizer), Detokenizer(byte_tokenizer)
    first, second = "é".encode()
    one.push(first)
    assert (two.push(ord("a")), one.push(second)) == ("a", "é"), "each stream has waiting bytes of its own"


@pytest.mark.parametrize("text", SAMPLES)
def test_characters_spread_over_tokens_come_out_whole(embedded, text):
    assert "".join(pieces(embedded, embedded.encode(text))) == text


@given(text=st.text())
def test_text_split_into_bytes_never_shows_a_broken_character(byte_tokenizer, text):
    got = pieces(byte_tokenizer, list(text.encode()))
    assert "".join(got) == text
    assert got[-1] == ""
    assert all(len(piece) <= 1 for piece in got), "a byte completes one character or none"


@given(ids=st.lists(st.integers(0, 257), max_size=30))
def test_pieces_of_any_bytes_joined_equal_decode(byte_tokenizer, ids):
    assert "".join(pieces(byte_tokenizer, ids)) == byte_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("skip", [True, False])
@given(seed=st.integers(0, 10_000), length=st.integers(0, 40))
def test_pieces_of_any_tokens_joined_equal_decode(embedded, skip, seed, length):
    ids = random.Random(seed).choices(range(embedded.vocab_size), k=length)
    assert "".join(pieces(embedded, ids, skip)) == embedded.decode(ids, skip_special_tokens=skip)
