"""Byte-level BPE: text to token ids and back, written out.

Promises the ids of Hugging Face's `tokenizers` for every byte-level BPE tokenizer (GPT-2, Llama 3, Qwen),
read from tokenizer.json or from vocab.json and merges.txt. No text is unknown: a character without a token of
its own falls back to the tokens of its UTF-8 bytes. Does not know any model, nor chat templates (Part 14).
Part 1.
Sources: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; byte level: Radford et al. 2019 (GPT-2).
"""

import heapq
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import regex

from engine.models.checkpoint import CheckpointError, resolve
from engine.text.tokenizer_files import GPT2_PATTERN, AddedToken, NormalForm, read_tokenizer

CACHED_WORDS = 1 << 16  # a word is merged once, then looked up; a full cache is emptied
CACHED_WORD_LENGTH = 64  # characters; longer words hardly come twice, and would fill the memory
MANY_MARKS = regex.compile(r"\p{M}{101}")  # combining marks: to reorder n of them takes time in n²


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, used by vocabulary files: a space is written 'Ġ'."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {byte: chr(byte) for byte in printable}
    not_printable = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(256 + i) for i, byte in enumerate(not_printable)}


def merge_table(
    vocab: dict[str, int], merges: Iterable[tuple[str, str]]
) -> dict[tuple[int, int], tuple[int, int]]:
    """(left id, right id) -> (rank, merged id); a lower rank was learned earlier and merges first."""
    return {(vocab[a], vocab[b]): (rank, vocab[a + b]) for rank, (a, b) in enumerate(merges)}


def byte_token_ids(vocab: dict[str, int], spellings: Sequence[str]) -> list[int]:
    """[256]: the id of each byte's token, which `vocab` has under these spellings.

    Raises ValueError for a byte without a token.
    """
    for byte, spelling in enumerate(spellings):
        if spelling not in vocab:
            raise ValueError(f"the vocabulary has no token for byte {byte}")
    return [vocab[spelling] for spelling in spellings]


class Tokenizer:
    """A vocabulary, its merges in order of rank, and how text is cut into words before merging."""

    def __init__(
        self,
        vocab: dict[str, int],
        merges: Iterable[tuple[str, str]],
        added_tokens: Iterable[AddedToken] = (),
        pattern: str = GPT2_PATTERN,
        normal_form: NormalForm | None = None,
        add_prefix_space: bool = False,
        ignore_merges: bool = False,
        affixes: tuple[Sequence[int], Sequence[int]] = ((), ()),
        eos_token: str | None = None,
    ) -> None:
        """`added_tokens` are found in a text as a whole, before `pattern` cuts it into words. `normal_form`:
        of Unicode, before that. `ignore_merges`: a word that is a token is not merged. `affixes`: ids before
        and after each text. Raises ValueError: a byte has no token.
        """
        self._index_added_tokens(added_tokens, vocab, eos_token)
        self._normal_form, self._add_prefix_space = normal_form, add_prefix_space
        self._affixes = affixes
        self._word_regex = regex.compile(pattern)

        alphabet = byte_alphabet()
        byte_of_char = {char: byte for byte, char in alphabet.items()}
        self.id_to_bytes: dict[int, bytes] = {
            id: bytes(byte_of_char[char] for char in token)
            for token, id in vocab.items()
            if token not in self.added
        }
        self.id_to_bytes |= {token.id: token.content.encode() for token in self.added.values()}
        self._max_token_bytes = max(map(len, self.id_to_bytes.values()))
        self._byte_to_id = byte_token_ids(vocab, [alphabet[byte] for byte in range(256)])
        self._merges = merge_table(vocab, merges)
        self._whole_word_ids: dict[str, int] = {}  # for `ignore_merges`: by the token's text
        if ignore_merges:
            self._whole_word_ids = {
                self.id_to_bytes[id].decode(errors="replace"): id for id in vocab.values()
            }
        self._cache: dict[str, list[int]] = {}

    def _index_added_tokens(
        self, added_tokens: Iterable[AddedToken], vocab: dict[str, int], eos_token: str | None
    ) -> None:
        """Set what depends on the added tokens, which are found in a text as a whole, and the id of the token
        that ends a text.
        """
        self.added = {token.content: token for token in added_tokens}
        self.special_ids = frozenset(token.id for token in self.added.values() if token.special)
        self.eos_token_id: int | None = None
        if eos_token is not None:
            self.eos_token_id = self.added[eos_token].id if eos_token in self.added else vocab.get(eos_token)
        longest_first = sorted(self.added.values(), key=lambda token: -len(token.content))
        self._added_regex: regex.Pattern[str] | None = None
        if self.added:
            self._added_regex = regex.compile("|".join(token.pattern() for token in longest_first))

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "Tokenizer":
        """Read the tokenizer of an embedded model, a folder or a hub id.

        Raises CheckpointError, which names the file: it is missing or damaged, or its kind of tokenizer is
        not supported.
        """
        folder = resolve(name)
        file, fields = read_tokenizer(folder)
        # A reader that a later part adds (Part 20: SentencePiece) names its own class.
        tokenizer_class = fields.pop("tokenizer_class", cls)
        try:
            return tokenizer_class(**fields)
        except (AttributeError, KeyError, TypeError, ValueError, regex.error) as error:
            raise CheckpointError(f"{file}: {type(error).__name__}: {error}") from None

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.id_to_bytes) + 1

    def __contains__(self, id: int) -> bool:
        """Whether the id is a token's. A model may have more ids than its tokenizer, as Qwen3's does."""
        return id in self.id_to_bytes

    def encode(self, text: str, add_special_tokens: bool = True, guard: str = "") -> list[int]:
        """Token ids of `text`. `add_special_tokens` adds the tokenizer's affixes (Llama 3's token for the
        beginning). `guard` is a character that is taken out once special tokens are found: so "<|user|>" with
        a guard inside becomes text like any other (Part 14).

        Raises ValueError for a lone surrogate, half a character, which UTF-8 cannot express; and, from a
        tokenizer with a normal form, for more than 100 combining marks on one character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise ValueError(
                f"text has a lone surrogate U+{code:04X} at position {error.start}: not a character"
            ) from None
        ids = [id for piece in self._split_specials(text) for id in self._encode_piece(piece, guard)]
        before, after = self._affixes
        return [*before, *ids, *after] if add_special_tokens else ids

    def fewest_tokens(self, text: str) -> int:
        """The fewest tokens that `encode(text)` may give, from the text's length alone: no token stands for
        more bytes than the longest one has.
        """
        if any(token.lstrip or token.rstrip for token in self.added.values()):
            return 0  # such a token takes in any amount of space
        # A normal form makes one character of at most four, and a character has at least one byte.
        size = len(text) // 4 if self._normal_form else len(text.encode(errors="replace"))
        return size // self._max_token_bytes

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`: their bytes joined, and only then read as UTF-8, since a character may be spread
        over several tokens. Bytes that are not UTF-8, such as half an emoji, become U+FFFD.

        Special tokens (`special_ids`) are text too, unless `skip_special_tokens`. Raises ValueError for an
        unknown id.
        """
        hidden = self.special_ids if skip_special_tokens else ()
        return b"".join(self.token_bytes(id) for id in ids if id not in hidden).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes one token stands for, perhaps only part of a character.

        Raises ValueError for an unknown id.
        """
        try:
            return self.id_to_bytes[id]
        except KeyError:
            raise ValueError(f"token id {id} is not in the vocabulary (0 to {self.vocab_size - 1})") from None

    def _split_specials(self, text: str) -> Iterator[str | AddedToken]:
        """The added tokens in `text`, and the text between them."""
        end = 0
        for match in self._added_regex.finditer(text) if self._added_regex else ():
            if match.start() > end:
                yield text[end : match.start()]
            # The match has the space that the token takes in, unless that belongs to its content.
            yield self.added.get(match.group()) or self.added[match.group().strip()]
            end = match.end()
        if end < len(text):
            yield text[end:]

    def _encode_piece(self, piece: str | AddedToken, guard: str) -> Iterator[int]:
        """Token ids of what `_split_specials` gives. Raises ValueError: too many combining marks."""
        if isinstance(piece, AddedToken):
            yield piece.id
            return
        piece = piece.replace(guard, "")
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
        """The words of `text`, which are all of it."""
        end = 0
        for match in self._word_regex.finditer(text):
            if match.start() > end:  # what the pattern does not match is a word too
                yield text[end : match.start()]
            if match.group():
                yield match.group()
            end = match.end()
        if end < len(text):
            yield text[end:]

    def _encode_word(self, word: str) -> list[int]:
        """Token ids of one word, not from the cache."""
        if word in self._whole_word_ids:
            return [self._whole_word_ids[word]]
        return self.merge([self._byte_to_id[byte] for byte in word.encode()])

    def merge(self, ids: list[int]) -> list[int]:
        """Byte-pair encoding of one word: merge the neighbours of lowest rank, leftmost first, until no two
        neighbours can be merged.

        `_merges[left id, right id]` is (rank, merged id). Takes O(n log n) for n bytes: a heap of possible
        merges over a linked list, where a merge only changes its two neighbours. A heap entry has a pair's
        position and its two ids; it is skipped if they are not there any more. Rescanning the word after each
        merge gives the same ids in O(n²).
        """
        ids = list(ids)
        # A linked list of the positions that still have a token; -1 at both ends.
        next_position = [*range(1, len(ids)), -1]
        previous_position = [*range(-1, len(ids) - 1)]

        # 1. Every pair of neighbours that can be merged, the lowest rank first.
        heap: list[tuple[int, int, int, int]] = []  # (rank, position, left id, right id)

        def offer(left: int, right: int) -> None:
            merge = self._merges.get((ids[left], ids[right]))
            if merge:
                heapq.heappush(heap, (merge[0], left, ids[left], ids[right]))

        for left, right in pairwise(range(len(ids))):
            offer(left, right)
        while heap:
            _, left, left_id, right_id = heapq.heappop(heap)
            right = next_position[left]
            # 2. Skip an entry whose pair has changed since: one of its two took part in a better merge.
            if right == -1 or (ids[left], ids[right]) != (left_id, right_id):
                continue
            # 3. Merge in place: the left one becomes the pair, the right one leaves the list.
            ids[left] = self._merges[left_id, right_id][1]
            ids[right] = -1
            next_position[left] = next_position[right]
            if next_position[left] != -1:
                previous_position[next_position[left]] = left
                offer(left, next_position[left])
            # 4. The merged token has a new neighbour on either side.
            if previous_position[left] != -1:
                offer(previous_position[left], left)
        return [id for id in ids if id != -1]
