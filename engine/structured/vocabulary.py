"""The tokens of a model as bytes, in the order in which structures look them up. Extension B.

A token is bytes: with byte-level BPE as with SentencePiece, a token may be half a character. Special tokens
stand for no text, so that no structure allows them; neither are tokens that the model has and the tokenizer
does not know.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from engine.structured.matcher import Mask
from engine.text.tokenizer import Tokenizer


@dataclass
class TrieNode:
    """The tokens that begin with the bytes on the way to this node."""

    children: dict[int, "TrieNode"] = field(default_factory=dict)  # by the next byte
    token_ids: list[int] = field(default_factory=list)  # the tokens that end here


class Vocabulary:
    """The tokens that stand for text."""

    def __init__(self, tokens: Mapping[int, bytes]) -> None:
        """`tokens` has the bytes of each token by its id. A token without bytes is left out: an output that
        may choose it need never go on.
        """
        self.tokens = {token_id: data for token_id, data in tokens.items() if data}
        self.size = max(self.tokens) + 1
        self.ids: dict[bytes, list[int]] = {}  # two tokens may stand for the same bytes
        for token_id, data in self.tokens.items():
            self.ids.setdefault(data, []).append(token_id)
        self.longest = max(map(len, self.ids))

    @cached_property
    def root(self) -> TrieNode:
        """The tree of all tokens, byte by byte. Made when it is first asked for."""
        root = TrieNode()
        for data, token_ids in self.ids.items():
            node = root
            for byte in data:
                node = node.children.setdefault(byte, TrieNode())
            node.token_ids = token_ids
        return root

    @classmethod
    def of(cls, tokenizer: Tokenizer, others: Iterable[int] = ()) -> "Vocabulary":
        """The tokenizer's tokens without its special ones and `others`, which end an output."""
        hidden = {*tokenizer.special_ids, *others}
        return cls({id: data for id, data in tokenizer.id_to_bytes.items() if id not in hidden})

    def mask(self, token_ids: Iterable[int]) -> Mask:
        """The mask that allows these tokens alone."""
        bits = np.zeros(-(-self.size // 32) * 32, dtype=np.bool_)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def continuing(self, data: bytes) -> list[int]:
        """The tokens that are a beginning of `data`."""
        lengths = range(1, min(len(data), self.longest) + 1)
        return [token_id for length in lengths for token_id in self.ids.get(data[:length], ())]

    def longest_tokens(self, data: bytes) -> list[int]:
        """Tokens with these bytes, the longest at each place. Raises ValueError where no token begins."""
        token_ids: list[int] = []
        place = 0
        while place < len(data):
            may_come = self.continuing(data[place : place + self.longest])
            if not may_come:
                raise ValueError(f"no token begins with the byte {data[place]:#04x}")
            token_ids.append(may_come[-1])
            place += len(self.tokens[may_come[-1]])
        return token_ids
