"""SentencePiece's kind of BPE, as tokenizer.json describes it (Llama 1 and 2, TinyLlama). Part 20.

Byte-level BPE merges bytes. SentencePiece merges characters, and writes a space as "▁". A "▁" marks the
beginning of a word, so most files have a "▁" put before the first word, too, and its space removed when text
is decoded. A character without a token falls back to the tokens of its UTF-8 bytes, such as "<0xE2>", so
every character can be encoded.

Promises the ids of Hugging Face's `tokenizers`, and the same text for ids whose bytes are valid UTF-8.
Invalid bytes become one U+FFFD for each broken character, as everywhere in this engine, so that a stream can
show a character as soon as it is complete. (`tokenizers` writes one U+FFFD for each byte of a run of bytes
that has a broken character.) Source: Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import regex

from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import (
    NO_AFFIXES,
    AddedToken,
    Affixes,
    added_tokens,
    affixes_of,
    merge_pairs,
    steps_of,
)
from engine.text.vocabulary import byte_token_ids

SPACE_MARK = "▁"
BYTE_TOKEN = regex.compile(r"<0x([0-9A-Fa-f]{2})>")
# Where a "▁" is added. A stretch is the text between two added tokens (such as "</s>").
# - "every": before each stretch.
# - "always": before each stretch that does not begin with a space.
# - "first": before the first stretch, if it begins the text and does not begin with a space.
# - "never": nowhere.
Prepend = Literal["every", "always", "first", "never"]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece vocabulary, its merges, and the rule for added spaces."""

    def __init__(
        self,
        vocab: dict[str, int],
        merges: Iterable[tuple[str, str]],
        added_tokens: Iterable[AddedToken],
        prepend: Prepend,
        split: bool,
        strip: bool,
        ignore_merges: bool = False,
        affixes: Affixes = NO_AFFIXES,
        eos_token: str | None = None,
    ) -> None:
        """A tokenizer with these tokens and merges.

        With `split`, each "▁" begins a word, and no merge crosses the beginning of a word. With `strip`,
        `decode` removes the first space of a text. The other arguments are those of `Tokenizer`. Raises
        ValueError if a byte has no token, and KeyError if `vocab` lacks a token of a merge.
        """
        super().__init__(
            vocab,
            merges,
            added_tokens,
            pattern=rf"{SPACE_MARK}[^{SPACE_MARK}]*|[^{SPACE_MARK}]+" if split else r"(?s).+",
            ignore_merges=ignore_merges,
            affixes=affixes,
            eos_token=eos_token,
        )
        self._prepend, self._strip = prepend, strip

    def _index_vocab(self, vocab: dict[str, int], ignore_merges: bool) -> None:
        """As in `Tokenizer`, for SentencePiece's spellings. Also sets `_vocab` and `_spellings`.

        The words that are encoded have "▁" for a space, so the keys of `_whole_word_ids` have "▁", too.
        `id_to_bytes` has spaces, since it is for decoding.
        """
        self._vocab = vocab
        self._byte_to_id = byte_token_ids(vocab, [f"<0x{byte:02X}>" for byte in range(256)])
        self._whole_word_ids = {}
        if ignore_merges:
            self._whole_word_ids = {token.encode(): id for token, id in vocab.items()}
        spellings = vocab | {token.content: token.id for token in self.added.values()}
        self._spellings = {id: token for token, id in spellings.items()}
        self.id_to_bytes = {id: _bytes_of(token) for id, token in self._spellings.items()}
        # Of the spelling, since a text may contain "▁" itself.
        self._max_token_bytes = max(len(token.encode()) for token in spellings)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`, without the space that `encode` added before the text.

        `ids` are a whole text. A model's output continues a text and keeps its first space (`Detokenizer`).
        Invalid bytes, special tokens and errors are as in `Tokenizer.decode`.
        """
        text = super().decode(ids, skip_special_tokens)
        return text.removeprefix(" ") if self._strip else text

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary's file writes it, such as "▁a". Raises ValueError as `Tokenizer`'s."""
        try:
            return [self._spellings[id] for id in ids]
        except KeyError as error:
            raise ValueError(f"token id {error} is not in the vocabulary") from None

    def _split_specials(self, text: str) -> Iterator[str | AddedToken]:
        """Yield the added tokens in `text`, and the stretches between them, marked as `_marked` says."""
        for i, piece in enumerate(super()._split_specials(text)):
            yield piece if isinstance(piece, AddedToken) else self._marked(piece, is_first=(i == 0))

    def _marked(self, text: str, is_first: bool) -> str:
        """A stretch of text with "▁" for each space, and with a "▁" before it if `_prepend` says so."""
        text = text.replace(" ", SPACE_MARK)
        if self._prepend == "every":
            return SPACE_MARK + text
        if text.startswith(SPACE_MARK):
            return text
        if self._prepend == "always" or (self._prepend == "first" and is_first):
            return SPACE_MARK + text
        return text

    def _encode_word(self, word: str) -> list[int]:
        """The token ids of one word: those of its characters or their bytes, merged."""
        data = word.encode()
        if data in self._whole_word_ids:
            return [self._whole_word_ids[data]]
        ids: list[int] = []
        for char in word:
            if char in self._vocab:
                ids.append(self._vocab[char])
            else:
                ids += [self._byte_to_id[byte] for byte in char.encode()]
        return self.merge(ids)


def _bytes_of(token: str) -> bytes:
    """The bytes that a token stands for: one byte for "<0xE2>", else its characters with spaces for "▁"."""
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(SPACE_MARK, " ").encode()


def from_tokenizer_json(raw: dict) -> dict[str, Any]:
    """The arguments of `SentencePieceTokenizer` in the content of a tokenizer.json, and the class itself as
    "tokenizer_class".

    Raises KeyError for a missing setting, and ValueError for a setting that is not supported.
    """
    model = raw["model"]
    prepend, split = _spaces(raw.get("normalizer"), raw.get("pre_tokenizer"))
    for token in raw.get("added_tokens", []):
        if token.get("normalized") and raw.get("normalizer"):
            raise ValueError(f"added token {token['content']!r}: normalized=true is not supported")
    return {
        "tokenizer_class": SentencePieceTokenizer,
        "vocab": model["vocab"],
        "merges": merge_pairs(model["merges"]),
        "added_tokens": added_tokens(raw),
        "prepend": prepend,
        "split": split,
        "strip": _strips_first_space(raw.get("decoder")),
        "ignore_merges": model.get("ignore_merges", False),
        "affixes": affixes_of(raw.get("post_processor")),
    }


def _spaces(normalizer: dict | None, pre_tokenizer: dict | None) -> tuple[Prepend, bool]:
    """The arguments (prepend, split) of `SentencePieceTokenizer`.

    Older files describe them by a normalizer, newer files by a Metaspace pre-tokenizer. Raises ValueError for
    any other combination.
    """
    normal_steps = steps_of(normalizer, "normalizers")
    split_steps = steps_of(pre_tokenizer, "pretokenizers")
    # 1. An older file.
    prepend = {"type": "Prepend", "prepend": SPACE_MARK}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    if not split_steps and normal_steps == [prepend, replace]:
        return "every", False
    if not split_steps and normal_steps == [replace]:
        return "never", False
    # 2. A newer file. Its `add_prefix_space` is an older name of `prepend_scheme`.
    if not normal_steps and [step["type"] for step in split_steps] == ["Metaspace"]:
        metaspace = split_steps[0]
        default = "always" if metaspace.get("add_prefix_space", True) else "never"
        scheme = metaspace.get("prepend_scheme", default)
        if metaspace["replacement"] == SPACE_MARK and scheme in ("always", "first", "never"):
            return scheme, metaspace.get("split", True)
    raise ValueError(
        f"a byte_fallback model with normalizer {normalizer} and pre_tokenizer {pre_tokenizer} is not "
        f"supported, only with Prepend and Replace, or with Metaspace, and {SPACE_MARK!r}"
    )


def _strips_first_space(decoder: dict | None) -> bool:
    """Whether the decoder removes the first space of a text. Raises ValueError for any other decoder."""
    steps = steps_of(decoder, "decoders")
    replace = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    accepted = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if steps == accepted:
        return False
    if steps == [*accepted, strip]:
        return True
    raise ValueError(f"decoder {decoder} is not supported with byte_fallback, only {accepted} and {strip}")
