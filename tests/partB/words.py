"""A vocabulary of twelve tokens, and what of it a mask allows."""

import numpy as np

from engine.decoding.sampling_state import allowed_by
from engine.structured.vocabulary import Vocabulary

WORDS = ["a", "b", "ab", "ba", "c", "yes", "no", "n", "o", "ye", "s", "é"]  # twelve, by id


def vocabulary() -> Vocabulary:
    """The twelve words, and one token for each half of "é"."""
    tokens = [word.encode() for word in WORDS]
    return Vocabulary(dict(enumerate([*tokens, *("é".encode()[i : i + 1] for i in (0, 1))])))


def ids(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


def shown(mask: np.ndarray) -> set[str]:
    """The words that a mask allows; a half of "é" as its byte."""
    allowed = np.flatnonzero(allowed_by(mask, 32))
    return {WORDS[i] if i < len(WORDS) else f"{vocabulary().tokens[i][0]:02x}" for i in allowed}
