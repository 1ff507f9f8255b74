"""Encoding and decoding against Hugging Face's `tokenizers`, on the embedded vocabulary and GPT-2's.

From single texts to ten thousand; single rules are in test_tokenizer_by_hand.py.
"""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import engine.text.tokenizer
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import byte_alphabet
from tests.part01.outcome import difference
from tests.part01.unicode_fuzz import strings

FUZZ = strings(10_000, seed=0)


def naive_bpe(word: list[str], rank: dict[tuple[str, str], int]) -> list[str]:
    """Byte-pair encoding as it is told: look at the whole word again after every merge."""
    while True:
        pairs = [(rank[pair], i) for i, pair in enumerate(pairwise(word)) if pair in rank]
        if not pairs:
            return word
        _, i = min(pairs)
        word = [*word[:i], word[i] + word[i + 1], *word[i + 2 :]]


@cache
def read_files(folder: Path) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """(vocabulary, rank of each merge) of vocab.json and merges.txt."""
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if not line.startswith("#version")]
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    return vocab, {pair: i for i, pair in enumerate(merges)}


def naive_ids(folder: Path, word: str) -> list[int]:
    vocab, rank = read_files(folder)
    return [vocab[token] for token in naive_bpe(list(word), rank)]


def test_hello_world_has_gpt2s_ids(gpt2_pair):
    assert gpt2_pair.ours.encode("Hello world") == [15496, 995]
    assert gpt2_pair.ours.decode([15496, 995]) == "Hello world"


def test_gpt2_files_alone_give_vocabulary_special_token_and_end_of_sequence(gpt2_pair):
    ours = gpt2_pair.ours
    assert (ours.vocab_size, ours.eos_token_id, ours.special_ids) == (50257, 50256, {50256})
    assert ours.encode("<|endoftext|>") == [50256]


@given(text=st.text())
def test_decoding_what_was_encoded_gives_the_text_back(embedded_pair, text):
    assert embedded_pair.ours.decode(embedded_pair.ours.encode(text)) == text


@given(text=st.text())
def test_token_bytes_joined_are_the_texts_utf8(embedded_pair, text):
    ours = embedded_pair.ours
    assert b"".join(ours.token_bytes(id) for id in ours.encode(text)) == text.encode()


@pytest.mark.parametrize("text", ["", " ", "\n\n", "a", "\x00", "<|endoftext|><|user|>", "'s", "\U0010ffff"])
def test_short_texts_survive_the_round_trip(embedded_pair, text):
    ours, theirs = embedded_pair.ours, embedded_pair.theirs
    assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("text", "code", "position"),
    [
        ("\ud800", "U+D800", 0),
        ("ab\udfff", "U+DFFF", 2),
        ("😀\ud83d!", "U+D83D", 1),
        ("\ude00\ud83d", "U+DE00", 0),
    ],
)
def test_a_lone_surrogate_is_refused_with_its_code_and_position(embedded_pair, text, code, position):
    with pytest.raises(ValueError, match=rf"{code.replace('+', '[+]')} at position {position}\b"):
        embedded_pair.ours.encode(text)


@pytest.mark.parametrize("id", [-1, 4096, 10**9])
def test_an_unknown_id_is_refused_with_the_range_there_is(embedded_pair, id):
    with pytest.raises(ValueError, match=rf"{id} is not in the vocabulary \(0 to 4095\)"):
        embedded_pair.ours.decode([0, id])


def test_spellings_are_hugging_faces_also_of_special_tokens_and_half_characters(embedded_pair):
    ours, theirs = embedded_pair.ours, embedded_pair.theirs
    ids = ours.encode("A dog 🦊 said\n<|endoftext|>") + list(range(300))
    assert ours.spellings(ids) == [theirs.id_to_token(id) for id in ids]
    with pytest.raises(ValueError, match="not in the vocabulary"):
        ours.spellings([ours.vocab_size])


def test_special_tokens_are_left_out_only_when_asked(embedded_pair):
    ours = embedded_pair.ours
    ids = ours.encode("Hi<|endoftext|><|user|> you")
    assert ours.decode(ids) == "Hi<|endoftext|><|user|> you"
    assert ours.decode(ids, skip_special_tokens=True) == "Hi you"


@pytest.mark.parametrize("text", ["Hi<|user|> you", "<|user|><|endoftext|>", "a <|user|", "no special token"])
def test_a_special_token_with_a_guard_in_it_is_the_text_that_it_looks_like(embedded_pair, text):
    guard = "\ufdd0"
    guarded = text.replace("<|", f"<{guard}|")
    embedded_pair.theirs.encode_special_tokens = True  # to Hugging Face: as text
    try:
        ids = embedded_pair.theirs.encode(text).ids
    finally:
        embedded_pair.theirs.encode_special_tokens = False
    assert embedded_pair.ours.encode(guarded, guard=guard) == ids
    assert not embedded_pair.ours.special_ids & set(ids)


def test_every_byte_has_a_printable_stand_in_of_its_own():
    alphabet = byte_alphabet()
    assert sorted(alphabet) == list(range(256))
    assert sorted(alphabet.values()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert alphabet[ord(" ")] == "Ġ"


def test_a_vocabulary_without_a_token_for_every_byte_is_refused():
    vocab = {char: byte for byte, char in byte_alphabet().items() if byte != 7}
    with pytest.raises(ValueError, match="no token for byte 7"):
        Tokenizer(vocab, [])


def test_random_words_are_merged_as_by_rescanning_the_whole_word(pair):
    random = Random(2)
    words = ["".join(random.choices("etaoinshrdluEA", k=random.randint(1, 40))) for _ in range(300)]
    words += [
        "".join(random.choices(letters, k=60)) for letters in ("ab", "no", "th", "e") for _ in range(10)
    ]
    for word in words:
        assert pair.ours.encode(word) == naive_ids(pair.folder, word), (
            f"{word!r} is not merged as by rescanning"
        )


@given(data=st.data())
def test_any_list_of_merges_gives_what_rescanning_gives(data):
    """Also lists that no training makes, where a part is learned after the whole."""
    tokens, merges = ["a", "b", "c"], []
    for _ in range(data.draw(st.integers(1, 8))):
        pair = data.draw(st.tuples(st.sampled_from(tokens), st.sampled_from(tokens)))
        if "".join(pair) not in tokens:
            tokens.append("".join(pair))
            merges.append(pair)
    merges = data.draw(st.permutations(merges))
    vocab = {char: byte for byte, char in byte_alphabet().items()}
    vocab |= {token: 256 + i for i, token in enumerate(tokens[3:])}
    word = data.draw(st.text("abc", min_size=1, max_size=40))
    expected = [vocab[token] for token in naive_bpe(list(word), {pair: i for i, pair in enumerate(merges)})]
    assert Tokenizer(vocab, merges).encode(word) == expected


@pytest.mark.parametrize("length", [1, 2, 3, 100, 1023])
def test_one_letter_repeated_is_merged_as_by_rescanning(pair, length):
    assert pair.ours.encode("o" * length) == naive_ids(pair.folder, "o" * length)


def test_a_long_text_has_hugging_faces_ids(pair):
    random = Random(3)
    text = pair.ours.decode(random.choices(range(200, pair.ours.vocab_size - 1), k=90_000)).replace(
        "\ufffd", ""
    )
    text = text[:300_000]
    assert len(text) == 300_000
    assert difference(pair.ours.encode(text), pair.theirs.encode(text).ids) == ""


def test_a_full_word_cache_changes_nothing(embedded_pair, monkeypatch):
    monkeypatch.setattr(engine.text.tokenizer, "CACHED_WORDS", 3)
    fresh = Tokenizer.from_pretrained("storyteller")
    for text in FUZZ[:300]:
        assert fresh.encode(text) == embedded_pair.ours.encode(text)
    assert len(fresh._cache) <= 3


def test_results_are_lists_of_the_callers_own(embedded_pair):
    embedded_pair.ours.encode("word").append(-1)
    assert -1 not in embedded_pair.ours.encode("word")


def test_ids_equal_hugging_faces_on_10000_fuzzed_strings(pair):
    expected = [encoding.ids for encoding in pair.theirs.encode_batch(FUZZ)]
    for text, ids in zip(FUZZ, expected, strict=True):
        assert pair.ours.encode(text) == ids, f"{text!r}: ours on the left, Hugging Face's ids on the right"


@pytest.mark.parametrize("skip", [False, True])
def test_text_equals_hugging_faces_for_encoded_strings_and_random_ids(pair, skip):
    random = Random(1)
    streams = [encoding.ids for encoding in pair.theirs.encode_batch(FUZZ[:2000])]
    streams += [random.choices(range(pair.ours.vocab_size), k=12) for _ in range(2000)]
    expected = pair.theirs.decode_batch(streams, skip_special_tokens=skip)
    for ids, text in zip(streams, expected, strict=True):
        assert pair.ours.decode(ids, skip_special_tokens=skip) == text, f"ours is left, of {ids}"
    assert any("\ufffd" in text for text in expected), "no stream here splits a character"
