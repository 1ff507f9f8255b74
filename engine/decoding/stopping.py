"""When to stop, and which text is safe to show meanwhile.

Promises one place where an output grows: tokens in, text and finish reason out. Does not know where tokens
come from: the greedy loop uses it now, the engine's step loop from Part 6 on. Part 2.
"""

from engine.decoding.outputs import FinishReason
from engine.decoding.params import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer


class GrowingOutput:
    """One output while it is generated.

    `text` holds everything decoded so far; `visible` leaves out an end that may turn out to be the start of a
    stop string. Once `finish_reason` is set, the two are equal and final.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_length: int,
        max_positions: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.params = params
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.eos_token_ids = () if params.ignore_eos else eos_token_ids
        room = max_positions - prompt_length
        self.limit = room if params.max_tokens is None else min(params.max_tokens, room)  # tokens
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._last_ids = frozenset((*self.eos_token_ids, *params.stop_token_ids))
        self._longest_stop = max(map(len, params.stop), default=0)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens that must not be chosen next: the ones that end the output, until `min_tokens` are there."""
        if len(self.token_ids) >= self.params.min_tokens:
            return ()
        return (*self.eos_token_ids, *self.params.stop_token_ids)

    @property
    def visible(self) -> str:
        """The text that no later token can take back.

        A stop string may have begun, so an end of the text that begins any of `params.stop` is left out, the
        longest such end. A finished output shows everything. So does a stop string that was complete before
        `min_tokens`: it ended nothing, and is text like any other.
        """
        if self.finish_reason or not self._longest_stop:
            return self.text
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self.params.stop):
                return self.text[:-length]
        return self.text

    def append(self, token_id: int) -> bool:
        """Take the next token; True when it was the last one.

        In order: end of sequence or a stop token, a stop string, the length.
        """
        self.token_ids.append(token_id)
        # 1. A token that ends the output. It counts as a token, but is not text unless asked for.
        if token_id in self._last_ids:
            shows_text = self.params.include_stop_str_in_output or not self.params.skip_special_tokens
            stop_reason = None if token_id in self.eos_token_ids else token_id
            return self._finish("stop", stop_reason, self._detokenizer.push(token_id) if shows_text else "")
        # 2. Its text, and in it a stop string, which may have begun several tokens ago.
        piece = self._detokenizer.push(token_id)
        text, self.text = self.text, ""  # with no second reference, Python appends to a str in place
        num_before = len(text)
        text += piece
        self.text = text
        may_stop = self._longest_stop and len(self.token_ids) >= self.params.min_tokens
        stop = self._find_stop(num_before) if may_stop else None
        if stop is not None:
            start, string = stop
            end = start + len(string) if self.params.include_stop_str_in_output else start
            self.text = self.text[:end]
            return self._finish("stop", string, flush=False)
        # 3. The length.
        if len(self.token_ids) >= self.limit:
            return self._finish("length", None)
        return False

    def _find_stop(self, num_before: int) -> tuple[int, str] | None:
        """(start, stop string) of the one that ends first, among those that were not complete in the first
        `num_before` characters; None: there is none.
        """
        matches = []  # (end, start, string)
        for string in self.params.stop:
            start = self.text.find(string, max(0, num_before - len(string) + 1))
            if start >= 0:
                matches.append((start + len(string), start, string))
        if not matches:
            return None
        _, start, string = min(matches)
        return start, string

    def _finish(
        self, reason: FinishReason, stop_reason: int | str | None, text: str = "", flush: bool = True
    ) -> bool:
        """End the output with `text`, and with half a character as U+FFFD if `flush`. Always True."""
        self.text += text + (self._detokenizer.flush() if flush else "")
        self.finish_reason, self.stop_reason = reason, stop_reason
        return True
