"""Text from a stream of token ids, never half a character.

Promises that the pieces joined equal `Tokenizer.decode` of all the ids. A token is bytes, and a character
such as an emoji may be spread over several tokens: its bytes wait here until the character is whole. Part 2.
"""

import codecs

from engine.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing sequence of tokens."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes: often one word, sometimes none."""
        if token_id in self._hidden:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """No more tokens will come: an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
