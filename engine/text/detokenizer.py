"""Turns a stream of token ids into text, and never returns half a character.

Promises that the pieces, joined, equal `Tokenizer.decode` of all ids that the tokenizer knows, by default
without those of special tokens. (A SentencePiece tokenizer, Part 20, also removes the space before a whole
text.) A token stands for bytes, and the bytes of one character, such as an emoji, may be spread over several
tokens. A `Detokenizer` keeps such bytes until the character is complete. An unknown id has no text and is no
error, because a model may have more ids than its tokenizer, and may choose one of them (Qwen3 does). Part 2.
"""

import codecs

from engine.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing sequence of tokens."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        """With `skip_special_tokens`, special tokens such as "<|endoftext|>" have no text."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the characters that `token_id` completes: often a word, sometimes "".

        `_utf8` is a decoder that keeps an incomplete character's bytes from call to call. Bytes that cannot
        become a character any more become U+FFFD at once. A hidden or unknown id has no text, and does not
        change the bytes that are kept.
        """
        id_to_bytes = self._tokenizer.id_to_bytes
        if token_id in self._hidden or token_id not in id_to_bytes:
            return ""
        return self._utf8.decode(id_to_bytes[token_id])

    def flush(self) -> str:
        """Return the rest of the text after the last token: U+FFFD for an incomplete character, else ""."""
        return self._utf8.decode(b"", final=True)
