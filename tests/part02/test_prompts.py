"""A prompt's length is bounded before it is worked on, and the bound is never wrong."""

import time
import unicodedata
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decoding.params import ParameterError
from engine.decoding.prompts import prompt_token_ids
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import AddedToken
from engine.text.vocabulary import byte_alphabet

PLAIN = {char: byte for byte, char in byte_alphabet().items()}  # a token for each byte
LONG = PLAIN | {"a" * 2: 256, "a" * 4: 257, "a" * 8: 258}
MERGES = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")]
COMPOSED = "".join(unicodedata.normalize("NFD", char) for char in "\u1f82\u1faf각Å")  # up to four in one
FORMS = [None, "NFC", "NFD", "NFKC", "NFKD"]


def config(max_positions: int) -> SimpleNamespace:
    return SimpleNamespace(vocab_size=256, max_positions=max_positions)


@pytest.mark.parametrize("form", FORMS)
@given(text=st.text() | st.text("a") | st.text("a𝐀①" + COMPOSED) | st.sampled_from(["a" * 80, COMPOSED * 9]))
@settings(max_examples=100, deadline=None)
def test_no_text_has_fewer_tokens_than_its_length_says(form, text):
    for tokenizer in (Tokenizer(LONG, MERGES, normal_form=form), Tokenizer(PLAIN, [], normal_form=form)):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def test_the_bound_is_reached_by_the_longest_token():
    assert (
        Tokenizer(LONG, MERGES).fewest_tokens("a" * 80) == 10 == len(Tokenizer(LONG, MERGES).encode("a" * 80))
    )
    assert Tokenizer(LONG, MERGES).fewest_tokens("🦊" * 20) == 10, "bytes count, not characters"


def test_a_token_that_takes_in_space_makes_a_length_say_nothing():
    greedy = AddedToken(256, "<mask>", lstrip=True)
    tokenizer = Tokenizer(PLAIN, [], [greedy])
    assert tokenizer.encode(" " * 1000 + "<mask>") == [256]
    assert tokenizer.fewest_tokens(" " * 1000 + "<mask>") == 0


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch):
    tokenizer = Tokenizer(PLAIN, [])
    monkeypatch.setattr(tokenizer, "encode", None)
    with pytest.raises(ParameterError, match="prompt has at least 10 tokens; accepted are 1 to 9") as caught:
        prompt_token_ids("a" * 10, tokenizer, config(10))
    assert caught.value.field == "prompt"


def test_the_longest_prompt_that_fits_is_accepted():
    tokenizer = Tokenizer(PLAIN, [])
    assert len(prompt_token_ids("a" * 9, tokenizer, config(10))) == 9
    assert len(prompt_token_ids([5] * 9, tokenizer, config(10))) == 9
    for prompt in ("a" * 10, [5] * 10, "", []):
        with pytest.raises(ParameterError, match=f"{len(prompt)} tokens; accepted are 1 to 9"):
            prompt_token_ids(prompt, tokenizer, config(10))


def test_a_token_of_the_tokenizer_that_the_model_does_not_have_is_refused_by_name():
    """The model failed on it, in a step: a 500."""
    tokenizer = Tokenizer(PLAIN, [], [AddedToken(256, "<tool>")])
    assert prompt_token_ids("a tool", tokenizer, config(10))
    with pytest.raises(ParameterError, match=r"'<tool>'.*token id is 256; accepted are 0 to 255") as caught:
        prompt_token_ids("a<tool>b", tokenizer, config(10))
    assert caught.value.field == "prompt"


def test_ids_that_are_too_many_are_refused_before_each_is_looked_at():
    class Endless(list):
        def __len__(self):
            return 10**9

        def __iter__(self):
            raise AssertionError("they are looked at")

    with pytest.raises(ParameterError, match="1000000000 tokens"):
        prompt_token_ids(Endless(), Tokenizer(PLAIN, []), config(10))


@pytest.mark.parametrize("form", FORMS[1:])
def test_marks_without_number_on_one_character_are_refused_in_no_time(form):
    """The time to put them in order grows with the square of their number: minutes for a megabyte of them."""
    tokenizer = Tokenizer(PLAIN, [], normal_form=form)
    start = time.process_time()
    with pytest.raises(ParameterError, match="combining marks"):
        prompt_token_ids("a" + "\u0301\u0316" * 250_000, tokenizer, config(10**9))
    assert time.process_time() - start < 2
    few = "a" + "\u0301\u0316" * 50
    assert tokenizer.decode(tokenizer.encode(few)) == unicodedata.normalize(form, few)


@pytest.mark.parametrize(
    ("prompt", "truncate", "kept"),
    [
        ("abcdef", None, b"abcdef"),
        ("abcdef", 2, b"ef"),
        ([*b"abcdef"], 2, b"ef"),
        ("ab", 5, b"ab"),
        ("x" * 500 + "yz", 3, b"xyz"),
        ("x" * 500 + "yz", -1, b"x" * 7 + b"yz"),
        ([120] * 500, -1, b"x" * 9),
        ("ab", -1, b"ab"),
    ],
)
def test_a_prompt_keeps_as_many_tokens_at_its_end_as_are_asked_for(prompt, truncate, kept):
    assert prompt_token_ids(prompt, Tokenizer(PLAIN, []), config(10), truncate=truncate) == [*kept]


def test_no_more_can_be_kept_than_a_prompt_may_have():
    with pytest.raises(ParameterError, match="truncate_prompt_tokens=10: at most 9 are accepted") as caught:
        prompt_token_ids("ab", Tokenizer(PLAIN, []), config(10), truncate=10)
    assert caught.value.field == "truncate_prompt_tokens"
    with pytest.raises(ParameterError, match="prompt has 0 tokens"):
        prompt_token_ids([], Tokenizer(PLAIN, []), config(10), truncate=2)
