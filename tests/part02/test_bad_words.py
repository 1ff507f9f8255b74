"""Words that must not be generated: which token is forbidden when, on words of one token and of several."""

import random

import pytest
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from engine.decoding.bad_words import BadWords
from engine.decoding.greedy import decode_steps
from engine.decoding.params import ParameterError, SamplingParams
from engine.models.config import ModelConfig
from engine.text.tokenizer import AddedToken, Tokenizer
from engine.text.vocabulary import byte_alphabet

A, B, C, SPACE = b"abc "


def config(vocab_size: int = 257, max_positions: int = 100) -> ModelConfig:
    return ModelConfig("gpt2", vocab_size, 8, 1, 1, 1, 8, 8, max_positions, 1e-5, "gelu_new", True)


def test_a_word_of_one_token_is_forbidden_always(byte_tokenizer):
    words = BadWords(["a"], byte_tokenizer, 257)
    for output in ([], [B], [A, B]):
        assert words.completing(output) == (A,)
    assert set(words.completing([B, SPACE])) == {A}, (
        "behind a space it is a word of two tokens, which ends so"
    )


def test_of_several_tokens_only_the_last_is_forbidden_and_only_behind_the_others(byte_tokenizer):
    words = BadWords(["abc"], byte_tokenizer, 257)
    assert words.completing([]) == ()
    assert words.completing([A]) == (), "a word may begin"
    assert words.completing([B]) == ()
    assert words.completing([A, B]) == (C,)
    assert words.completing([B, A, B]) == (C,)
    assert words.completing([A, B, B]) == ()
    assert words.completing([A], drafts=[B]) == (C,), "drafts count as if they followed the output"


def test_the_word_behind_a_space_is_forbidden_too():
    vocab = {char: byte for byte, char in byte_alphabet().items()} | {"Ġa": 256}
    words = BadWords(["a"], Tokenizer(vocab, [("Ġ", "a")]), 257)
    assert set(words.completing([])) == {A, 256}
    longer = BadWords(["  ab"], Tokenizer(vocab, [("Ġ", "a")]), 257)
    assert longer.completing([256]) == longer.completing([A]) == (B,), "whatever spaces it was given with"


def test_it_forbids_what_hugging_face_forbids(byte_tokenizer):
    """Its processor counts the prompt, too, so it is given the output alone."""
    rng = random.Random(3)
    for _ in range(200):
        words = ["".join(rng.choices("ab ", k=rng.randint(1, 4))) + "c" for _ in range(rng.randint(1, 5))]
        output = [*"".join(rng.choices("abc ", k=rng.randint(1, 6))).encode()]
        spellings = {space + word.lstrip() for word in words for space in ("", " ")}
        theirs = NoBadWordsLogitsProcessor([list(text.encode()) for text in spellings])
        scores = theirs(torch.tensor([output]), torch.zeros(1, 257))[0]
        got = BadWords(words, byte_tokenizer, 257).completing(output)
        assert set(got) == set(scores.isinf().nonzero()[:, 0].tolist()), f"{words} after {output}"


def test_the_loop_does_not_choose_the_token_that_completes_a_word(byte_tokenizer):
    def forward(ids):  # "abcabc…": the next letter is the likeliest, "x" the second
        logits = torch.zeros(257)
        logits[97 + (len(ids) - 1) % 3], logits[ord("x")] = 9, 5
        return logits

    for words, text in ((None, "abcabc"), (["abc"], "abxabx"), (["b"], "axcaxc"), (["ab", "ca"], "axcxbc")):
        params = SamplingParams(max_tokens=6, bad_words=words)
        steps = [*decode_steps(forward, byte_tokenizer, config(), "z", params)]
        assert steps[-1].output.text == text, f"bad_words={words}"


def test_the_prompt_does_not_count(byte_tokenizer):
    def forward(ids):
        return torch.arange(257.0).eq(C).float()

    params = SamplingParams(max_tokens=2, bad_words=["abc"])
    assert [*decode_steps(forward, byte_tokenizer, config(), "ab", params)][-1].output.text == "cc"


@pytest.mark.parametrize(("word", "says"), [("\ud800", "lone surrogate"), ("x<tool>", "has token id 257")])
def test_a_word_without_tokens_of_the_model_is_refused(byte_tokenizer, word, says):
    params = SamplingParams(bad_words=["a", word])
    with pytest.raises(ParameterError, match=says) as caught:
        decode_steps(lambda ids: torch.zeros(257), byte_tokenizer, config(), "z", params)
    assert caught.value.field == "bad_words"


def test_tokens_that_are_special_can_be_words():
    tokenizer = Tokenizer(
        {char: byte for byte, char in byte_alphabet().items()},
        [],
        [AddedToken(256, "<end>")],
        eos_token="<end>",
    )
    assert 256 in BadWords(["<end>"], tokenizer, 257).completing([])
