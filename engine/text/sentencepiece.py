"""The other kind of BPE: SentencePiece's, as tokenizer.json has it (Llama 1 and 2, TinyLlama). Part 20.

Byte-level BPE begins with bytes; SentencePiece's begins with characters, and writes a space as "▁". A "▁"
marks the beginning of a word, so one is put before the first word, too, and taken off again when text is
decoded. A character that has no token falls back to the tokens of its UTF-8 bytes, "<0xE2>": no text is
unknown here either.

Promises the ids of Hugging Face's `tokenizers`, and its text of all ids whose bytes are UTF-8. Other bytes
become U+FFFD as everywhere in this engine, one for each broken character, so that a stream can show a
character once it is whole. (`tokenizers` writes a U+FFFD for each byte of a run that has a broken character.)
Source: Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import regex

from engine.text.tokenizer import Tokenizer, byte_token_ids, merge_table
from engine.text.tokenizer_files import AddedToken, added_tokens, affixes, merge_pairs, steps_of

SPACE = "▁"
BYTE = regex.compile(r"<0x([0-9A-Fa-f]{2})>")
# A stretch is the text between two added tokens (such as "</s>"). A "▁" is put before
# - "every" stretch;
# - "always": every stretch that does not begin with a space;
# - "first": the first stretch, if it does not begin with a space, and no added token is before it;
# - "never": none.
Prepend = Literal["every", "always", "first", "never"]


class SentencePieceTokenizer(Tokenizer):
    """A vocabulary of characters and their merges, and where spaces are added."""

    def __init__(
        self,
        vocab: dict[str, int],
        merges: Iterable[tuple[str, str]],
        added_tokens: Iterable[AddedToken],
        prepend: Prepend,
        split: bool,
        strip: bool,
        ignore_merges: bool = False,
        affixes: tuple[Sequence[int], Sequence[int]] = ((), ()),
        eos_token: str | None = None,
    ) -> None:
        """`split`: each "▁" begins a word, and nothing is merged across its beginning. `strip`: `decode`
        takes off the space that a text begins with. Raises ValueError: a byte has no token.
        """
        self._index_added_tokens(added_tokens, vocab, eos_token)
        self._prepend, self._strip = prepend, strip
        self._normal_form, self._add_prefix_space = None, False  # a stretch comes as `_marked` makes it
        self._ignore_merges, self._affixes = ignore_merges, affixes
        self._word_regex = regex.compile(rf"{SPACE}[^{SPACE}]*|[^{SPACE}]+" if split else r"(?s).+")
        self._vocab, self._cache = vocab, {}
        self._byte_to_id = byte_token_ids(vocab, [f"<0x{byte:02X}>" for byte in range(256)])
        self._merges = merge_table(vocab, merges)
        spellings = vocab | {token.content: token.id for token in self.added.values()}
        self.id_to_bytes = {id: _spelled(token) for token, id in spellings.items()}
        self._max_token_bytes = max(len(token.encode()) for token in spellings)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`, a whole text, without the space that was put before it. A model's output begins in
        the middle of a text, and keeps its space (`Detokenizer`).
        """
        text = super().decode(ids, skip_special_tokens)
        return text.removeprefix(" ") if self._strip else text

    def _split_specials(self, text: str) -> Iterator[str | AddedToken]:
        for i, piece in enumerate(super()._split_specials(text)):
            yield piece if isinstance(piece, AddedToken) else self._marked(piece, is_first=i == 0)

    def _marked(self, text: str, is_first: bool) -> str:
        """A stretch of text with "▁" for spaces, and with one before it if `_prepend` says so."""
        text = text.replace(" ", SPACE)
        if self._prepend == "every":
            return SPACE + text
        if text.startswith(SPACE):
            return text
        if self._prepend == "always" or (self._prepend == "first" and is_first):
            return SPACE + text
        return text

    def _encode_word(self, word: str) -> list[int]:
        if self._ignore_merges and word in self._vocab:
            return [self._vocab[word]]
        ids: list[int] = []
        for char in word:
            if char in self._vocab:
                ids.append(self._vocab[char])
            else:
                ids += [self._byte_to_id[byte] for byte in char.encode()]
        return self.merge(ids)


def _spelled(token: str) -> bytes:
    """The bytes of a token: one byte, "<0xE2>", or its characters with spaces in the place of "▁"."""
    byte = BYTE.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(SPACE, " ").encode()


def from_tokenizer_json(raw: dict) -> dict[str, Any]:
    """The arguments of `SentencePieceTokenizer`, and the class itself as "tokenizer_class".

    Raises KeyError or ValueError for what is missing, or is not computed here.
    """
    model, added = raw["model"], added_tokens(raw)
    prepend, split = _spaces(raw.get("normalizer"), raw.get("pre_tokenizer"))
    for token in raw.get("added_tokens", []):
        if token.get("normalized") and raw.get("normalizer"):
            raise ValueError(f"added token {token['content']!r}: normalized=true is not supported")
    return {
        "tokenizer_class": SentencePieceTokenizer,
        "vocab": model["vocab"],
        "merges": merge_pairs(model["merges"]),
        "added_tokens": added,
        "prepend": prepend,
        "split": split,
        "strip": _strips(raw.get("decoder")),
        "ignore_merges": model.get("ignore_merges", False),
        "affixes": affixes(raw.get("post_processor")),
    }


def _spaces(normalizer: dict | None, pre_tokenizer: dict | None) -> tuple[Prepend, bool]:
    """(where "▁" is put, whether it splits), as a normalizer says (older files), or Metaspace. Raises
    ValueError for anything else.
    """
    normal_steps = steps_of(normalizer, "normalizers")
    split_steps = steps_of(pre_tokenizer, "pretokenizers")
    prepend = {"type": "Prepend", "prepend": SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if not split_steps and normal_steps == [prepend, replace]:
        return "every", False
    if not split_steps and normal_steps == [replace]:
        return "never", False
    if not normal_steps and [step["type"] for step in split_steps] == ["Metaspace"]:
        step = split_steps[0]
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        if step["replacement"] == SPACE and scheme in ("always", "first", "never"):
            return scheme, step.get("split", True)
    raise ValueError(
        f"a byte_fallback model with normalizer {normalizer} and pre_tokenizer {pre_tokenizer} is not "
        f"supported, only with Prepend and Replace, or with Metaspace, and {SPACE!r}"
    )


def _strips(decoder: dict | None) -> bool:
    """Whether the decoder takes off the space before a text. Raises ValueError for an unknown decoder."""
    steps = steps_of(decoder, "decoders")
    replace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    accepted = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if steps == accepted:
        return False
    if steps == [*accepted, strip]:
        return True
    raise ValueError(f"decoder {decoder} is not supported with byte_fallback, only {accepted} and {strip}")
