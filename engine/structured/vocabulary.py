"""The text tokens of a model, looked up by id, by bytes, or along a trie. Extension B.

With byte-level BPE as with SentencePiece, the bytes of a token may be only a part of a character. Special
tokens stand for no text, so they are left out here, and no structure allows them. The same holds for tokens
that the model has and the tokenizer does not know.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from engine.structured.matcher import Mask
from engine.text.tokenizer import Tokenizer


@dataclass
class TrieNode:
    """A node in the tree of all tokens: the bytes on the way from the root to this node."""

    children: dict[int, "TrieNode"] = field(default_factory=dict)  # by the next byte
    token_ids: list[int] = field(default_factory=list)  # the tokens with exactly these bytes


class Vocabulary:
    """The tokens that stand for text."""

    def __init__(self, tokens: Mapping[int, bytes]) -> None:
        """`tokens` has the bytes of each token by its id. A token without bytes is left out: an output could
        repeat it for ever and never come to its end. Raises ValueError if no token has bytes.
        """
        self.tokens = {token_id: data for token_id, data in tokens.items() if data}
        if not self.tokens:
            raise ValueError("no token stands for text")
        self.size = max(self.tokens) + 1
        self.ids: dict[bytes, list[int]] = {}  # two tokens may stand for the same bytes
        for token_id, data in self.tokens.items():
            self.ids.setdefault(data, []).append(token_id)
        self.max_bytes = max(map(len, self.ids))  # of a token

    @cached_property
    def root(self) -> TrieNode:
        """The root of the tree of all tokens, byte by byte. The tree is made at the first use."""
        root = TrieNode()
        for data, token_ids in self.ids.items():
            node = root
            for byte in data:
                node = node.children.setdefault(byte, TrieNode())
            node.token_ids = token_ids
        return root

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos_ids: Iterable[int] = ()) -> "Vocabulary":
        """The tokenizer's tokens, without its special tokens and without `eos_ids`, which end an output.
        Raises ValueError if no token is left that stands for text.
        """
        left_out = {*tokenizer.special_ids, *eos_ids}
        return cls({id: data for id, data in tokenizer.id_to_bytes.items() if id not in left_out})

    def mask(self, token_ids: Iterable[int]) -> Mask:
        """The mask that allows these tokens and no others."""
        num_words = -(-self.size // 32)  # rounded up
        bits = np.zeros(32 * num_words, dtype=np.bool_)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def prefixes_of(self, text: bytes) -> list[int]:
        """The ids of the tokens whose bytes are a beginning of `text`, or all of it, the shortest first."""
        token_ids: list[int] = []
        for length in range(1, min(len(text), self.max_bytes) + 1):
            token_ids += self.ids.get(text[:length], [])
        return token_ids

    def longest_tokens(self, text: bytes) -> list[int]:
        """The ids of tokens with these bytes, the longest at each place. Raises ValueError where no token
        begins.
        """
        token_ids: list[int] = []
        place = 0
        while place < len(text):
            candidates = self.prefixes_of(text[place : place + self.max_bytes])
            if not candidates:
                raise ValueError(f"no token begins with the byte {text[place]:#04x}")
            token_ids.append(candidates[-1])
            place += len(self.tokens[candidates[-1]])
        return token_ids
