"""The bonus of `Tokenizer.merge`: words so long that the whole word cannot be looked at after each merge.

A `merge` that rescans gives the right ids and fails here alone.
"""

import pytest

from tests.part01.outcome import difference
from tests.part01.test_tokenizer_by_hand import tokenizer_of


class Counting(dict):
    """A table of merges that counts how often it is asked."""

    asked = 0

    def get(self, *key):
        self.asked += 1
        return super().get(*key)

    def __getitem__(self, key):
        self.asked += 1
        return super().__getitem__(key)

    def __contains__(self, key):
        self.asked += 1
        return super().__contains__(key)


def test_a_long_word_is_not_looked_at_again_after_every_merge():
    """Looking at every pair after each merge asks over a million times here; at the new ones, 8,000."""
    tokenizer = tokenizer_of([("a", "a"), ("b", "b"), ("aa", "bb")])
    tokenizer._merges = Counting(tokenizer._merges)
    tokenizer.merge(list(b"aabb" * 500))
    asked = tokenizer._merges.asked
    assert asked < 20_000, (
        f"the bonus: a merge changes its two neighbours only, so {asked:,} looks at pairs are too many"
    )


@pytest.mark.timeout(120)  # rescanning would take hours
def test_a_word_of_200_000_letters_is_encoded(pair):
    text = "o" * 200_000
    ids = pair.ours.encode(text)
    back = pair.ours.decode(ids) == text
    assert back, "the text of its ids is the word again"
    assert difference(ids, pair.theirs.encode(text).ids) == ""
