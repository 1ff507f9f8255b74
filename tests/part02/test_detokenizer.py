"""Text streamed from tokens: whole characters only, and in the end all of them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer
from engine.tokenizer import Tokenizer

SAMPLES = [
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family",
    "🇯🇵🇰🇪",
    "e\u0301\u0323",
    "a\x00b\n",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
]


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return Tokenizer.from_pretrained("storyteller")


def pieces(tokenizer, ids, skip_special_tokens=True) -> list[str]:
    """What each token gives, and at the end what the flush gives."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [detokenizer.push(id) for id in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("skip", [True, False])
@given(seed=st.integers(0, 10_000), length=st.integers(0, 40))
def test_pieces_of_any_tokens_joined_equal_decode(embedded, skip, seed, length):
    ids = random.Random(seed).choices(range(embedded.vocab_size), k=length)
    assert "".join(pieces(embedded, ids, skip)) == embedded.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 257), max_size=30))
def test_pieces_of_any_bytes_joined_equal_decode(byte_tokenizer, ids):
    assert "".join(pieces(byte_tokenizer, ids)) == byte_tokenizer.decode(ids, skip_special_tokens=True)


@given(text=st.text())
def test_text_split_into_bytes_never_shows_a_broken_character(byte_tokenizer, text):
    got = pieces(byte_tokenizer, list(text.encode()))
    assert "".join(got) == text
    assert got[-1] == ""
    for piece in got:  # each is a character of the text, or nothing
        assert len(piece) <= 1
        assert piece in text


@pytest.mark.parametrize("text", SAMPLES)
def test_characters_spread_over_tokens_come_out_whole(embedded, text):
    ids = embedded.encode(text)
    got = pieces(embedded, ids)
    assert "".join(got) == text
    assert "\ufffd" not in "".join(got)


def test_an_emoji_comes_with_its_last_byte(byte_tokenizer):
    assert pieces(byte_tokenizer, "a😀b".encode()) == ["a", "", "", "", "😀", "b", ""]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_flush_turns_an_unfinished_character_into_one_replacement(byte_tokenizer, count):
    assert pieces(byte_tokenizer, "😀".encode()[:count]) == [""] * count + ["\ufffd"]


def test_nothing_is_left_after_a_flush(byte_tokenizer):
    detokenizer = Detokenizer(byte_tokenizer)
    detokenizer.push(0xF0)
    assert [detokenizer.flush(), detokenizer.flush(), detokenizer.push(ord("a"))] == ["\ufffd", "", "a"]


def test_a_byte_that_continues_nothing_is_replaced_at_once(byte_tokenizer):
    assert pieces(byte_tokenizer, [0x80, ord("a")]) == ["\ufffd", "a", ""]


@pytest.mark.parametrize(("skip", "text"), [(True, "ab<tool>"), (False, "a<end>b<tool>")])
def test_only_special_tokens_are_left_out_and_only_when_asked(byte_tokenizer, skip, text):
    assert "".join(pieces(byte_tokenizer, [ord("a"), 256, ord("b"), 257], skip)) == text


def test_a_hidden_token_within_a_character_leaves_the_character_whole(byte_tokenizer):
    first, second = "é".encode()
    assert "".join(pieces(byte_tokenizer, [first, 256, second])) == "é"


def test_two_streams_do_not_share_their_bytes(byte_tokenizer):
    one, two = Detokenizer(byte_tokenizer), Detokenizer(byte_tokenizer)
    first, second = "é".encode()
    one.push(first)
    assert (two.push(ord("a")), one.push(second)) == ("a", "é")
