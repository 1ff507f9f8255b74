"""Decides when an output ends, and which of its text is safe to show before. Part 2.

Promises that an output grows in one place only: tokens go in, text and a finish reason come out. Does not
know where tokens come from. The greedy loop uses `GrowingOutput` here, and the engine's loop from Part 6 on.
"""

from collections.abc import Callable

from engine.decoding.bad_words import BadWords
from engine.decoding.outputs import FinishReason
from engine.decoding.params import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer


class GrowingOutput:
    """One output while it is generated.

    `text` is all text decoded so far, up to a stop string. `visible` leaves out an end of `text` that may be
    the beginning of a stop string. Once `finish_reason` is set, `text` and `visible` are equal and final.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_length: int,
        max_positions: int,
        eos_token_ids: tuple[int, ...],
        bad_words: BadWords | None = None,
    ) -> None:
        """`prompt_length` is the number of tokens of the prompt. `max_positions` and `eos_token_ids` are
        those of the model's `ModelConfig`. `bad_words` are those of `params`.
        """
        self.params, self.bad_words = params, bad_words
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.eos_token_ids = () if params.ignore_eos else eos_token_ids
        room = max_positions - prompt_length
        # `limit` is the most tokens that the output may have.
        self.limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        # Takes in a token, and returns the characters that it completes; none without `detokenize`.
        self._push: Callable[[int], str] = self._detokenizer.push if params.detokenize else _no_text
        # The end-of-sequence token whose `stop_reason` is None; the model may have others beside it.
        self._main_eos = tokenizer.eos_token_id
        if self._main_eos is None and eos_token_ids:
            self._main_eos = eos_token_ids[0]
        self._last_ids = frozenset((*self.eos_token_ids, *params.stop_token_ids))
        self._longest_stop = max(map(len, params.stop), default=0)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """The tokens that must not be chosen next: those that end the output, before it has `min_tokens`, and
        those that would complete a bad word.
        """
        bad_ids = self.bad_words.completing(self.token_ids) if self.bad_words else ()
        if len(self.token_ids) >= self.params.min_tokens:
            return bad_ids
        return (*self.eos_token_ids, *self.params.stop_token_ids, *bad_ids)

    @property
    def visible(self) -> str:
        """The text that no later token can remove.

        The end of the text may be the beginning of a stop string. So the longest end of the text that begins
        any of `params.stop` is left out. A finished output shows its whole text. A stop string that was
        complete before `min_tokens` did not end the output, and is shown like other text.
        """
        if self.finish_reason or not self._longest_stop:
            return self.text
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self.params.stop):
                return self.text[:-length]
        return self.text

    def append(self, token_id: int) -> bool:
        """Append the next token. Returns True if the output has ended, else False.

        The output ends, in this order of checks, at the end of sequence or a stop token, a stop string, or
        the length.
        """
        self.token_ids.append(token_id)
        # 1. Does the token end the output? Such a token has no text, unless the parameters ask for its text.
        if token_id in self._last_ids:
            is_main_eos = token_id == self._main_eos and token_id in self.eos_token_ids
            if self.params.include_stop_str_in_output:
                self.text += self._push(token_id)
            self._finish("stop", None if is_main_eos else token_id)
            return True
        # 2. Append the token's text. Is there a stop string, which may have begun several tokens ago?
        new_text = self._push(token_id)
        # Python appends to a str in place if there is only one reference to it, so `self.text` lets go of it.
        text, self.text = self.text, ""
        num_before = len(text)
        text += new_text
        self.text = text
        stop = None
        if self._longest_stop and len(self.token_ids) >= self.params.min_tokens:
            stop = self._find_stop(num_before)
        if stop is not None:
            start, stop_string = stop
            end = start + len(stop_string) if self.params.include_stop_str_in_output else start
            self.text = self.text[:end]
            self._finish("stop", stop_string, flush=False)
            return True
        # 3. Has the output reached its limit?
        if len(self.token_ids) >= self.limit:
            self._finish("length", None)
            return True
        return False

    def _find_stop(self, num_before: int) -> tuple[int, str] | None:
        """(start, stop string) of the stop string that ends first in the text, or None. Of several that end
        there, it is the longest.

        Only a stop string that ends after the first `num_before` characters counts.
        """
        matches = []  # (end, start, stop string), of which the smallest ends first, and then begins first
        for stop_string in self.params.stop:
            start = self.text.find(stop_string, max(0, num_before - len(stop_string) + 1))
            if start >= 0:
                matches.append((start + len(stop_string), start, stop_string))
        if not matches:
            return None
        _, start, stop_string = min(matches)
        return start, stop_string

    def _finish(self, reason: FinishReason, stop_reason: int | str | None, flush: bool = True) -> None:
        """End the output. With `flush`, append U+FFFD for an incomplete character."""
        if flush:
            self.text += self._detokenizer.flush()
        self.finish_reason, self.stop_reason = reason, stop_reason


def _no_text(token_id: int) -> str:
    """Takes the place of `Detokenizer.push` if no text is wanted."""
    return ""
