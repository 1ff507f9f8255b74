"""Random text that is hard on a tokenizer, the same for every run: the seed decides."""

import unicodedata
from collections.abc import Callable
from random import Random

SPACES = (
    "\t\n\v\f\r \x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2000\u2003\u2009\u200a\u200b"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)
WORDS = [
    *("the", "The", "and", "story's", "don't", "I'LL", "we'Ve", "o'clock", "cat", "naïve", "Straße"),
    *("東京都", "한국어", "हिन्दी", "123", "4567", "½", "...", "!?", "--", "\r\n", "{}"),
    *("<|endoftext|>", "<|user|>", "<|assistant|>", "<|endof", "<|endoftext|"),
]
QUOTED = ["s", "S", "ſ", "t", "re", "RE", "ve", "ll", "d", "m", "x"]

Known = Callable[[str], bool]


def assigned(char: str) -> bool:
    """A character this Python knows. The regex engines of `tokenizers` and of ours come with Unicode versions
    of their own: whether a character newer than either is a letter is their affair.
    """
    return unicodedata.category(char) not in ("Cn", "Cs")


def assigned_long_ago(char: str) -> bool:
    """In Unicode 3.2 (2002) already: the normalization tables of `tokenizers` are of 2016 (Unicode 9)."""
    return unicodedata.ucd_3_2_0.category(char) not in ("Cn", "Cs")


def strings(count: int, seed: int, known: Known = assigned, words: list[str] = WORDS) -> list[str]:
    """`count` strings of one to fifteen parts, each part of another kind of trouble."""
    random = Random(seed)

    def char(low: int, high: int) -> str:
        while not known(found := chr(random.randrange(low, high))):
            pass
        return found

    def chars(low: int, high: int, at_most: int) -> str:
        return "".join(char(low, high) for _ in range(random.randint(1, at_most)))

    def pictures() -> list[str]:
        return [chr(random.randrange(0x1F300, 0x1F600)) for _ in range(random.randint(1, 4))]

    def flag() -> str:
        return "".join(chr(random.randrange(0x1F1E6, 0x1F200)) for _ in range(random.randint(1, 3)))

    kinds = [
        lambda: random.choice(words),
        lambda: " " * random.randint(1, 3) + random.choice(words),
        lambda: "".join(random.choices(SPACES, k=random.randint(1, 4))),
        lambda: "'" + random.choice(QUOTED),
        lambda: chars(0, 0xA0, 3),  # ASCII and control characters
        lambda: chars(0, 0x10000, 4),  # the whole basic plane
        lambda: chars(0x10000, 0x110000, 2),  # beyond it, private use included
        lambda: "e" + chars(0x300, 0x370, 4),  # combining marks, not in their canonical order
        lambda: "\u200d".join(pictures()) + "\ufe0f",  # joined into one emoji
        lambda: flag() + random.choice("\U0001f3fb\U0001f3ff\u20e3"),  # and a skin tone or a keycap
    ]
    return ["".join(random.choice(kinds)() for _ in range(random.randint(1, 15))) for _ in range(count)]
