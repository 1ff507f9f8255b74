"""Byte-level BPE: text to token ids, and token ids to text.

Promises the ids of Hugging Face's `tokenizers` for each byte-level BPE tokenizer whose settings are supported
(GPT-2, Llama 3, Qwen), read from tokenizer.json or from vocab.json and merges.txt. Every character can be
encoded, because one without a token falls back to the tokens of its UTF-8 bytes. Does not know any model, nor
chat templates (Part 14). Part 1.
Sources: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; byte level: Radford et al. 2019 (GPT-2).
"""

import heapq
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import regex

from engine.models.checkpoint import CheckpointError, resolve
from engine.text.tokenizer_files import (
    GPT2_PATTERN,
    NO_AFFIXES,
    AddedToken,
    Affixes,
    NormalForm,
    read_tokenizer,
)
from engine.text.vocabulary import byte_alphabet, byte_token_ids, merge_table

CACHED_WORDS = 1 << 16  # words whose ids are cached; a full cache is cleared
CACHED_WORD_LENGTH = 64  # characters of the longest cached word; longer words rarely repeat, and take memory
MANY_MARKS = regex.compile(r"\p{M}{101}")  # normalisation sorts n combining marks in O(n²) time


class Tokenizer:
    """A vocabulary, its merges in order of rank, and the pattern that splits text into words."""

    def __init__(
        self,
        vocab: dict[str, int],
        merges: Iterable[tuple[str, str]],
        added_tokens: Iterable[AddedToken] = (),
        pattern: str = GPT2_PATTERN,
        normal_form: NormalForm | None = None,
        add_prefix_space: bool = False,
        ignore_merges: bool = False,
        affixes: Affixes = NO_AFFIXES,
        eos_token: str | None = None,
    ) -> None:
        """A tokenizer with these tokens and merges, which are in order of rank.

        `encode` first finds `added_tokens` as a whole in the text. It brings the text between them to
        `normal_form` of Unicode, adds a space before it if `add_prefix_space`, and splits it into words by
        the regular expression `pattern`. With `ignore_merges`, a word that is a token is not merged.
        `affixes` are the ids before and after each text. `eos_token` is the text of the token that ends a
        text.

        Raises ValueError if a byte has no token, and KeyError if a token has a character that stands for no
        byte, or if `vocab` lacks a token of a merge.
        """
        self._index_added_tokens(added_tokens, vocab, eos_token)
        self._normal_form, self._add_prefix_space = normal_form, add_prefix_space
        self._affixes = affixes
        self._word_regex = regex.compile(pattern)
        self._index_vocab(vocab, ignore_merges)
        self._merges = merge_table(vocab, merges)
        self._cache: dict[str, list[int]] = {}  # the ids of words that were encoded before

    def _index_added_tokens(
        self, added_tokens: Iterable[AddedToken], vocab: dict[str, int], eos_token: str | None
    ) -> None:
        """Set `added`, `special_ids`, `eos_token_id`, and the regular expression that finds added tokens."""
        self.added = {token.content: token for token in added_tokens}
        self.special_ids = frozenset(token.id for token in self.added.values() if token.special)
        self.eos_token_id: int | None = None  # None if there is no such token
        if eos_token in self.added:
            self.eos_token_id = self.added[eos_token].id
        elif eos_token is not None:
            self.eos_token_id = vocab.get(eos_token)
        # A regular expression takes the first alternative that matches, and the longest token should win.
        longest_first = sorted(self.added.values(), key=lambda token: -len(token.content))
        self._added_regex: regex.Pattern[str] | None = None
        if self.added:
            self._added_regex = regex.compile("|".join(token.pattern() for token in longest_first))

    def _index_vocab(self, vocab: dict[str, int], ignore_merges: bool) -> None:
        """Set `id_to_bytes`, `_max_token_bytes`, `_byte_to_id` and `_whole_word_ids`. They depend on how the
        vocabulary spells bytes: here by the characters of `byte_alphabet`.
        """
        alphabet = byte_alphabet()
        byte_of_char = {char: byte for byte, char in alphabet.items()}
        self.id_to_bytes: dict[int, bytes] = {}
        for spelling, id in vocab.items():
            if spelling not in self.added:
                self.id_to_bytes[id] = bytes(byte_of_char[char] for char in spelling)
        for token in self.added.values():
            self.id_to_bytes[token.id] = token.content.encode()
        self._max_token_bytes = max(map(len, self.id_to_bytes.values()))
        self._byte_to_id = byte_token_ids(vocab, [alphabet[byte] for byte in range(256)])
        self._whole_word_ids: dict[bytes, int] = {}  # by the word's bytes; empty without `ignore_merges`
        if ignore_merges:
            self._whole_word_ids = {self.id_to_bytes[id]: id for id in vocab.values()}

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "Tokenizer":
        """Read the tokenizer of an embedded model, a folder or a hub id (see `resolve`).

        Raises CheckpointError, which names the file, if the file is missing or damaged, or if it describes a
        kind of tokenizer that is not supported.
        """
        folder = resolve(name)
        file, fields = read_tokenizer(folder)
        # The reader of another kind of tokenizer (SentencePiece, Part 20) names its own class.
        tokenizer_class = fields.pop("tokenizer_class", cls)
        try:
            return tokenizer_class(**fields)
        except (AttributeError, KeyError, TypeError, ValueError, regex.error) as error:
            raise CheckpointError(f"{file}: {type(error).__name__}: {error}") from None

    @property
    def vocab_size(self) -> int:
        """The largest id plus 1."""
        return max(self.id_to_bytes) + 1

    def __contains__(self, id: int) -> bool:
        """Whether the tokenizer has a token with this id. A model may have more ids, as Qwen3 does."""
        return id in self.id_to_bytes

    def encode(self, text: str, add_special_tokens: bool = True, guard: str = "") -> list[int]:
        """The token ids of `text`.

        `add_special_tokens` adds the tokenizer's affixes, such as Llama 3's token for the beginning of a
        text. `guard` is a character that `encode` removes after it has found the special tokens. So
        "<|user|>" with a guard inside is encoded as ordinary text (Part 14).

        Raises ValueError for a lone surrogate, which is half a character and has no UTF-8. A tokenizer with a
        normal form also raises ValueError for more than 100 combining marks in a row.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise ValueError(
                f"text has a lone surrogate U+{code:04X} at position {error.start}: not a character"
            ) from None
        ids: list[int] = []
        for piece in self._split_specials(text):
            ids += self._encode_piece(piece, guard)
        if add_special_tokens:
            return [*self._affixes.before, *ids, *self._affixes.after]
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of len(encode(text)): the bytes of the text divided by those of the longest token."""
        if any(token.lstrip or token.rstrip for token in self.added.values()):
            return 0  # one such token includes any number of spaces beside it
        if self._normal_form:  # it joins at most four characters to one, which has at least one byte
            min_bytes = len(text) // 4
        else:
            min_bytes = len(text.encode(errors="replace"))
        return min_bytes // self._max_token_bytes

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`. The bytes of all tokens are joined first and then decoded as UTF-8, because the
        bytes of one character may be spread over several tokens. Invalid bytes, such as half an emoji, become
        U+FFFD.

        The text has special tokens (`special_ids`), too, unless `skip_special_tokens`. Raises ValueError for
        an unknown id.
        """
        hidden = self.special_ids if skip_special_tokens else ()
        return b"".join(self.token_bytes(id) for id in ids if id not in hidden).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one token stands for. They may be only a part of a character.

        Raises ValueError for an unknown id.
        """
        try:
            return self.id_to_bytes[id]
        except KeyError:
            raise ValueError(f"token id {id} is not in the vocabulary (0 to {self.vocab_size - 1})") from None

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary's file writes it, such as 'Ġa' for " a": half a character has a
        spelling, too. Raises ValueError for an unknown id.
        """
        alphabet = byte_alphabet()
        added_ids = {token.id for token in self.added.values()}
        spellings: list[str] = []
        for id in ids:
            data = self.token_bytes(id)
            if id in added_ids:
                spellings.append(data.decode())
            else:
                spellings.append("".join(alphabet[byte] for byte in data))
        return spellings

    def _split_specials(self, text: str) -> Iterator[str | AddedToken]:
        """Yield the added tokens in `text` and the stretches of text between them, in order."""
        end = 0
        matches = self._added_regex.finditer(text) if self._added_regex else ()
        for match in matches:
            if match.start() > end:
                yield text[end : match.start()]
            content = match.group()
            if content not in self.added:  # the match includes spaces beside the token (lstrip, rstrip)
                content = content.strip()
            yield self.added[content]
            end = match.end()
        if end < len(text):
            yield text[end:]

    def _encode_piece(self, piece: str | AddedToken, guard: str) -> Iterator[int]:
        """The token ids of one piece of `_split_specials`.

        Raises ValueError for more than 100 combining marks in a row, if there is a normal form.
        """
        if isinstance(piece, AddedToken):
            yield piece.id
            return
        piece = piece.replace(guard, "")  # changes nothing if the guard is ""
        if self._normal_form:
            if MANY_MARKS.search(piece):
                raise ValueError("text has more than 100 combining marks in a row: not a character")
            piece = unicodedata.normalize(self._normal_form, piece)
        if self._add_prefix_space and not piece.startswith(" "):
            piece = " " + piece
        for word in self._split_words(piece):
            ids = self._cache.get(word)
            if ids is None:
                ids = self._encode_word(word)
                if len(word) <= CACHED_WORD_LENGTH:
                    if len(self._cache) >= CACHED_WORDS:
                        self._cache.clear()
                    self._cache[word] = ids
            yield from ids

    def _split_words(self, text: str) -> Iterator[str]:
        """Yield the words of `text`, in order. Joined, the words are the whole text."""
        end = 0
        for match in self._word_regex.finditer(text):
            if match.start() > end:  # text that the pattern does not match is a word, too
                yield text[end : match.start()]
            if match.group():
                yield match.group()
            end = match.end()
        if end < len(text):
            yield text[end:]

    def _encode_word(self, word: str) -> list[int]:
        """The token ids of one word, without the cache."""
        data = word.encode()
        if data in self._whole_word_ids:
            return [self._whole_word_ids[data]]
        return self.merge([self._byte_to_id[byte] for byte in data])

    def merge(self, ids: list[int]) -> list[int]:
        """Byte-pair encoding of one word, whose bytes have the token ids `ids`: merge the pair of neighbours
        of the lowest rank, and of equal pairs the leftmost, until no pair of neighbours can be merged.

        `_merges[left id, right id]` is (rank, merged id). Looking at all pairs again after each merge gives
        these ids, too. That takes O(n²) time for n bytes, which is fast enough for most words, but a word may
        be a megabyte. This takes O(n log n): a heap has the possible merges, and a linked list the tokens,
        since a merge changes only the pairs beside it. An entry of the heap is skipped if its pair is no
        longer there.
        """
        ids = list(ids)
        # A linked list of the positions that still have a token; -1 marks both ends.
        next_position = [*range(1, len(ids)), -1]
        previous_position = [*range(-1, len(ids) - 1)]

        # 1. Push every pair of neighbours that can be merged. The heap has the lowest rank first.
        heap: list[tuple[int, int, int, int]] = []  # (rank, position, left id, right id)

        def offer(left: int, right: int) -> None:
            """Push the tokens at these two positions, if they can be merged."""
            merge = self._merges.get((ids[left], ids[right]))
            if merge:
                rank, _merged_id = merge
                heapq.heappush(heap, (rank, left, ids[left], ids[right]))

        for left, right in pairwise(range(len(ids))):
            offer(left, right)
        while heap:
            _, left, left_id, right_id = heapq.heappop(heap)
            right = next_position[left]
            # 2. Skip a pair that is no longer there, because another merge has taken one of its two tokens.
            if right == -1 or (ids[left], ids[right]) != (left_id, right_id):
                continue
            # 3. Merge in place: the left position gets the merged token, the right one leaves the list.
            _rank, ids[left] = self._merges[left_id, right_id]
            ids[right] = -1
            next_position[left] = next_position[right]
            if next_position[left] != -1:
                previous_position[next_position[left]] = left
                offer(left, next_position[left])
            # 4. The merged token forms a new pair with its left neighbour, too.
            if previous_position[left] != -1:
                offer(previous_position[left], left)
        return [id for id in ids if id != -1]
