"""Words that an output must not contain, given as token ids. Part 2.

Promises vLLM's meaning of `bad_words`: the token that would complete a word is forbidden, and the tokens
before it are not. Only tokens of the output count, not those of the prompt.
"""

from collections import defaultdict
from collections.abc import Sequence

from engine.decoding.params import ParameterError, SamplingParams
from engine.text.tokenizer import Tokenizer


class BadWords:
    """The words of one request, each in two spellings: at the beginning of a text, and behind a space."""

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> None:
        """Raises ParameterError (field `bad_words`) if the tokenizer refuses a word, or if the model does not
        have one of a word's tokens.
        """
        self._single_tokens: set[int] = set()  # words of one token, which are always forbidden
        # The other words, by their last token but one: only those that are listed under the last token of the
        # output have to be compared with it.
        self._by_previous: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        self._longest = 1  # tokens of the longest word
        for word in words:
            for ids in _spellings(word, tokenizer):
                if max(ids) >= vocab_size:
                    raise ParameterError(
                        "bad_words",
                        f"bad_words has {word!r}, which this model does not know: "
                        f"it has token id {max(ids)}; accepted are 0 to {vocab_size - 1}",
                    )
                self._longest = max(self._longest, len(ids))
                if len(ids) == 1:
                    self._single_tokens.add(ids[0])
                else:
                    self._by_previous[ids[-2]].add(ids)

    def completing(self, output_ids: Sequence[int], drafts: Sequence[int] = ()) -> tuple[int, ...]:
        """The tokens that would complete a word if they came next, behind the output and `drafts`, which are
        taken to follow the output (Part 16).
        """
        last_ids = (*output_ids[-self._longest :], *drafts)  # long enough for the beginning of any word
        completing = list(self._single_tokens)
        if last_ids:
            for word in self._by_previous.get(last_ids[-1], ()):
                beginning = word[:-1]
                if last_ids[-len(beginning) :] == beginning:
                    completing.append(word[-1])
        return tuple(completing)


def bad_words_of(params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> BadWords | None:
    """The words of `params`, or None if there are none. Raises ParameterError as `BadWords` does."""
    return BadWords(params.bad_words, tokenizer, vocab_size) if params.bad_words else None


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The token ids of `word` without and with a space before it: most tokenizers have different tokens for
    the two. Raises ParameterError if the tokenizer refuses the word.
    """
    word = word.lstrip()
    try:
        spellings = [tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word)]
    except ValueError as error:
        raise ParameterError("bad_words", f"bad_words: {error}") from None
    return [tuple(ids) for ids in spellings if ids]
