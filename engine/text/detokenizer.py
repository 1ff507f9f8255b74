"""Text from a stream of token ids, never half a character.

Promises that the pieces joined equal `Tokenizer.decode` of all the ids. A token is bytes, and a character
such as an emoji may be spread over several tokens: its bytes wait here until the character is whole. An id
that the tokenizer does not know is no text, and no error: a model may have more ids than its tokenizer
(Qwen3's has), and may choose one. Part 2.
"""

import codecs

from engine.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing sequence of tokens."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        """`skip_special_tokens`: special tokens are no text."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes: often one word, sometimes none.

        Bytes that may still become a character wait in `_utf8`, a decoder that keeps them from call to call;
        bytes that never can become U+FFFD at once. A hidden or an unknown id is no text, and leaves what
        waits as it is.
        """
        id_to_bytes = self._tokenizer.id_to_bytes
        if token_id in self._hidden or token_id not in id_to_bytes:
            return ""
        return self._utf8.decode(id_to_bytes[token_id])

    def flush(self) -> str:
        """No more tokens will come: an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
