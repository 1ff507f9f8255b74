"""Decoding and merging on a vocabulary small enough to follow on paper. Hugging Face's comes after."""

from itertools import pairwise

import pytest

from engine.text.tokenizer import AddedToken, Tokenizer
from engine.text.vocabulary import byte_alphabet
from tests.part01.outcome import outcome

BYTES = {char: byte for byte, char in byte_alphabet().items()}  # a token's text -> its id, which is the byte
END, TOOL = 1000, 1001
# The five merges that the article learns from "the other hen saw the rat then the cat sat".
LEARNED = [("h", "e"), ("t", "he"), ("Ġ", "the"), ("a", "t"), ("Ġ", "s")]


def tokenizer_of(merges: list[tuple[str, str]]) -> Tokenizer:
    """Ids 0 to 255 are bytes, then one per merge; `<end>` is special, and `<tool>`, though added, is not."""
    vocab = BYTES | ids_of(merges)
    return Tokenizer(vocab, merges, [AddedToken(END, "<end>"), AddedToken(TOOL, "<tool>", special=False)])


def ids_of(merges: list[tuple[str, str]]) -> dict[str, int]:
    return {"".join(pair): 256 + i for i, pair in enumerate(merges)}


def tokens_of(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """The tokens of a word, `Ġ` for its space: what `merge` makes of its bytes."""
    tokenizer = tokenizer_of(merges)
    ids = outcome(tokenizer.merge, [BYTES[char] for char in word])
    names = byte_alphabet() | {256 + i: "".join(pair) for i, pair in enumerate(merges)}
    return [names[id] for id in ids] if isinstance(ids, list) else ids


def decode(ids, **named) -> str:
    return outcome(tokenizer_of(LEARNED).decode, ids, **named)


# Tokenizer.decode


def test_decode_joins_what_the_tokens_stand_for():
    assert decode([258, ord("n")]) == " then", "a text is what its tokens stand for, one after the other"


def test_a_character_spread_over_tokens_is_whole_again():
    got = decode("é🐉".encode())
    assert got == "é🐉", (
        "a character may be spread over tokens: join the bytes first, then read them as UTF-8"
    )


@pytest.mark.parametrize(("data", "text"), [(b"a\xf0\x9f", "a\ufffd"), (b"\xffb", "\ufffdb")])
def test_bytes_that_are_no_character_become_a_replacement_character(data, text):
    assert decode(data) == text, "bytes that are not UTF-8 become U+FFFD: no error, and not left out"


def test_an_unknown_id_is_refused_not_left_out():
    got = decode([ord("a"), 999])
    assert got.startswith("ValueError"), f"an unknown id is refused with a ValueError; this gave {got!r}"


def test_special_tokens_are_text():
    got = decode([ord("a"), END, TOOL])
    assert got == "a<end><tool>", "special tokens are text too, unless skip_special_tokens"


def test_special_tokens_are_skipped_when_asked():
    got = decode([ord("a"), END, TOOL], skip_special_tokens=True)
    assert got == "a<tool>", "skip_special_tokens leaves out the special tokens, and no others"


# Tokenizer.merge


@pytest.mark.parametrize("word", ["", "x", "xy"])
def test_what_no_merge_joins_stays_as_it_is(word):
    assert tokens_of(word, LEARNED) == list(word), "neighbours without a rank are not merged"


def test_a_merged_pair_is_a_neighbour_to_the_right():
    got = tokens_of("abc", [("a", "b"), ("ab", "c")])
    assert got == ["abc"], "a merged token has a new neighbour on its right, and may merge with it"


def test_a_merged_pair_is_a_neighbour_to_the_left():
    got = tokens_of("abc", [("b", "c"), ("a", "bc")])
    assert got == ["abc"], "a merged token has a new neighbour on its left, and may merge with it"


def test_the_lowest_rank_is_merged_first_wherever_it_stands():
    got = tokens_of("abc", [("b", "c"), ("a", "b")])
    assert got == ["a", "bc"], "the lowest rank is merged first; a pair that lost one of its two is then gone"


def test_the_rank_is_the_place_in_the_list_of_merges_not_the_merged_tokens_id():
    merges = [("b", "c"), ("a", "b")]
    ids = {"bc": 257, "ab": 256}  # the pair of the lower rank has the higher id
    got = outcome(Tokenizer(BYTES | ids, merges).merge, [BYTES[char] for char in "abc"])
    assert got == [BYTES["a"], ids["bc"]], (
        "a pair's rank is its place in the list of merges, and not the merged token's id"
    )


def test_a_pair_whose_neighbour_is_gone_cannot_be_merged():
    got = tokens_of("abcd", [("b", "c"), ("a", "b"), ("c", "d")])
    assert got == ["a", "bc", "d"], "a pair cannot be merged once one of the two has gone into another token"


@pytest.mark.parametrize(("word", "tokens"), [("aaa", ["aa", "a"]), ("aaaaa", ["aa", "aa", "a"])])
def test_of_equal_pairs_the_leftmost_is_merged_first(word, tokens):
    assert tokens_of(word, [("a", "a")]) == tokens, "of pairs with the same rank the leftmost is merged first"


@pytest.mark.parametrize(
    ("word", "tokens"),
    [
        ("Ġbathed", "Ġ b a the d"),
        ("Ġthen", "Ġthe n"),
        ("Ġshe", "Ġs he"),
        ("Ġsat", "Ġs at"),
        ("Ġthat", "Ġ t h at"),
    ],
)
def test_words_are_cut_as_the_article_cuts_them_by_hand(word, tokens):
    assert tokens_of(word, LEARNED) == tokens.split(), "the lowest rank first, until no neighbours have one"


# Around them


def test_a_word_past_64_characters_is_not_kept():
    """The cache of words holds so many of them; a web page without spaces must not fill the memory."""
    tokenizer = tokenizer_of(LEARNED)
    long, short = "a" * 65, "a" * 64
    tokenizer.encode(long)
    assert long not in tokenizer._cache, "a word of more than 64 characters is not kept in the cache"
    tokenizer.encode(short)
    assert short in tokenizer._cache, "a word of 64 characters is kept"


def test_a_tokenizer_says_which_ids_it_has():
    tokenizer = tokenizer_of(LEARNED)
    assert [id in tokenizer for id in (0, 260, END, 261, 1002, -1)] == [True, True, True, False, False, False]


def test_ranks_are_learned_by_counting():
    """The article's ten lines: the most frequent pair of neighbours is merged, and counted anew."""
    text = "the other hen saw the rat then the cat sat"
    words = [["Ġ", *word] for word in text.split()]
    for merge in LEARNED:
        pairs = [pair for word in words for pair in pairwise(word)]
        best, *others = sorted(set(pairs), key=pairs.count, reverse=True)
        assert best == merge
        assert all(pairs.count(other) < pairs.count(best) for other in others), "a tie"
        for word in words:
            for i in range(len(word)):
                if tuple(word[i : i + 2]) == best:
                    word[i : i + 2] = ["".join(best)]


def test_one_merge_at_a_time():
    """No list that was learned has such merges, but a file may; Hugging Face's merges one pair at a time."""
    got = tokens_of("aaaa", [("aa", "a"), ("a", "a")])
    assert got == ["aaa", "a"], (
        "one merge at a time: what the first `a a` became has a pair of a lower rank than the next `a a`"
    )
