"""The bonus of `Tokenizer.merge`: words so long that the whole word cannot be looked at after each merge.

A `merge` that rescans gives the right ids and fails here alone. It fails at once: the table of merges counts
how often it is asked, and refuses at some number.
"""

import pytest

from tests.part01.outcome import difference
from tests.part01.test_tokenizer_by_hand import tokenizer_of


class Counting(dict):
    """A table of merges that may be asked `most` times."""

    def __init__(self, merges: dict, most: int) -> None:
        super().__init__(merges)
        self.most, self.asked = most, 0

    def count(self) -> None:
        self.asked += 1
        assert self.asked <= self.most, (
            f"the bonus: a merge changes its two neighbours only: {self.asked:,} looks at pairs are too many"
        )

    def get(self, *key):
        self.count()
        return super().get(*key)

    def __getitem__(self, key):
        self.count()
        return super().__getitem__(key)

    def __contains__(self, key):
        self.count()
        return super().__contains__(key)


def test_a_long_word_is_not_looked_at_again_after_every_merge():
    """Looking at every pair after each merge asks over a million times here; at the new ones, 8,000."""
    tokenizer = tokenizer_of([("a", "a"), ("b", "b"), ("aa", "bb")])
    tokenizer._merges = Counting(tokenizer._merges, most=20_000)
    tokenizer.merge(list(b"aabb" * 500))


@pytest.mark.timeout(120)
def test_a_word_of_200_000_letters_is_encoded(pair, monkeypatch):
    text = "o" * 200_000
    monkeypatch.setattr(pair.ours, "_merges", Counting(pair.ours._merges, most=20 * len(text)))
    ids = pair.ours.encode(text)
    back = pair.ours.decode(ids) == text
    assert back, "the text of its ids is the word again"
    assert difference(ids, pair.theirs.encode(text).ids) == ""
