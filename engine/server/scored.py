"""Completions with log probabilities, and with the prompt's echo. Part 10.

Promises OpenAI's shape: four lists of one length, in which every token stands once, whole or streamed. A
chunk has the tokens whose first character is in the text sent so far, so it never tells of text held back.
`token_json` is one token in the shape of the chat API (Part 14).
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, cast

from engine.decoding.logprobs import TokenScores, token_text
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import MAX_LOGPROBS, SamplingParams
from engine.server.errors import RequestError
from engine.server.limits import MAX_COMPLETION_LOGPROBS
from engine.server.protocol import CompletionRequest, Completions
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for -inf, which JSON does not have; vLLM's choice


class ScoredCompletions(Completions[CompletionRequest]):
    """`logprobs`, `echo`, `max_tokens` 0 with `echo`, and vLLM's `prompt_logprobs`."""

    def __init__(self, tokenizer: Tokenizer, allow_priority: bool = False) -> None:
        super().__init__(allow_priority)
        self.tokenizer = tokenizer

    def params(self, body: CompletionRequest) -> SamplingParams:
        """What the engine is asked. Raises ParameterError or RequestError for a value out of range.

        `echo` with `logprobs` asks for the prompt's, too. `max_tokens` 0 asks for one token, which is not
        sent: the engine has no step without one.
        """
        for name, maximum in (("logprobs", MAX_COMPLETION_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            value = getattr(body, name)
            if value is not None and not 0 <= value <= maximum:
                message = f"{name}={value}: a whole number from 0 to {maximum} is accepted"
                raise RequestError(400, message, param=name)
        changes: dict[str, Any] = {"echo": None}
        if body.echo and body.logprobs is not None:
            changes["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        if body.max_tokens == 0:
            if not body.echo:
                message = "max_tokens=0 is accepted with echo=true only: nothing else would be shown"
                raise RequestError(400, message, param="max_tokens")
            if body.min_tokens:
                message = f"min_tokens={body.min_tokens} is more than max_tokens=0"
                raise RequestError(400, message, param="min_tokens")
            changes |= {"max_tokens": 1, "logprobs": None}
        return super().params(body.model_copy(update=changes))

    def choice(
        self,
        body: CompletionRequest,
        output: RequestOutput,
        sample: CompletionOutput,
        previous: CompletionOutput | None = None,
    ) -> dict:
        """OpenAI's choice. What is said of the prompt comes with the first chunk (`previous` is None).

        `prompt_logprobs`, if asked for, are vLLM's: token id -> logprob, rank, text, for each prompt token.
        """
        is_first = previous is None
        choice = super().choice(body, output, sample, previous)
        if body.max_tokens == 0:  # the one token that the engine gave is not sent
            choice["text"] = ""
            if choice["finish_reason"] == "stop":
                choice["finish_reason"] = "length"
        if body.echo and is_first:
            choice["text"] = self._prompt_text(output) + choice["text"]
        if body.logprobs is not None:
            choice["logprobs"] = self._logprobs(body, body.logprobs, output, sample, previous)
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = [
                None if scores is None else _prompt_token_json(scores, body.prompt_logprobs)
                for scores in prompt_scores(output)
            ]
        return choice

    def usage(self, body: CompletionRequest, outputs: Sequence[RequestOutput]) -> dict:
        """Part 4's; with `max_tokens` 0, the token that is not sent is not counted."""
        usage = super().usage(body, outputs)
        if body.max_tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _logprobs(
        self,
        body: CompletionRequest,
        num_likeliest: int,
        output: RequestOutput,
        sample: CompletionOutput,
        previous: CompletionOutput | None,
    ) -> dict:
        """OpenAI's `logprobs` of one chunk: of an echoed prompt with the first, then of the new tokens."""
        lists = _LogprobLists(self.tokenizer, num_likeliest)
        prompt_text = self._prompt_text(output) if body.echo else ""
        if body.echo and previous is None:
            offsets = prompt_offsets(self.tokenizer, output.prompt_token_ids, prompt_text)
            lists.add(output.prompt_token_ids, prompt_scores(output), offsets)
        if body.max_tokens != 0:
            assert sample.text_offsets is not None  # they come with log probabilities
            new_indices = range(num_visible_tokens(previous), num_visible_tokens(sample))
            token_ids = [sample.token_ids[i] for i in new_indices]
            scores = [scores_of(sample, i) for i in new_indices]
            # A stop string may have cut the text off before the token.
            offsets = [len(prompt_text) + min(sample.text_offsets[i], len(sample.text)) for i in new_indices]
            lists.add(token_ids, scores, offsets)
        return lists.as_json()

    def _prompt_text(self, output: RequestOutput) -> str:
        """The prompt as it was sent; of token ids, their text."""
        if output.prompt is not None:
            return output.prompt
        ids = output.prompt_token_ids
        return self.tokenizer.decode(id for id in ids if id in self.tokenizer)


class _LogprobLists:
    """OpenAI's four lists, which grow token by token."""

    def __init__(self, tokenizer: Tokenizer, num_likeliest: int) -> None:
        self._tokenizer, self._num_likeliest = tokenizer, num_likeliest
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(
        self, token_ids: Sequence[int], scores: Sequence[TokenScores | None], offsets: Sequence[int]
    ) -> None:
        """Add tokens: their scores (None for the first of a prompt), and the characters before each."""
        for token_id, token_scores, offset in zip(token_ids, scores, offsets, strict=True):
            token = token_text(self._tokenizer, token_id)
            self._tokens.append(token)
            self._offsets.append(offset)
            if token_scores is None:
                self._logprobs.append(None)
                self._top.append(None)
                continue
            logprob = max(token_scores.logprob, MIN_LOGPROB)
            top = {
                token_text(self._tokenizer, likely_id): max(likely_logprob, MIN_LOGPROB)
                for likely_id, likely_logprob in token_scores.top(self._num_likeliest)
            }
            self._logprobs.append(logprob)
            self._top.append(top | {token: logprob})

    def as_json(self) -> dict:
        """The lists under OpenAI's names."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }


def prompt_scores(output: RequestOutput) -> Sequence[TokenScores | None]:
    """The scores of each prompt token, where they were asked for; None for the first."""
    return cast(Sequence[TokenScores | None], output.prompt_logprobs)


def scores_of(sample: CompletionOutput, i: int) -> TokenScores:
    """The scores of the sample's token i, where they were asked for."""
    return cast(Sequence[TokenScores], sample.logprobs)[i]


def token_json(tokenizer: Tokenizer, scores: TokenScores, n: int) -> dict:
    """One token in the chat API's shape: `token`, `logprob`, `bytes` (null for an id the tokenizer does not
    know), and in `top_logprobs` the same of the n likeliest.
    """
    likeliest = [_logprob_json(tokenizer, token_id, logprob) for token_id, logprob in scores.top(n)]
    return _logprob_json(tokenizer, scores.token_id, scores.logprob) | {"top_logprobs": likeliest}


def _logprob_json(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict:
    """One token without its neighbours, in the chat API's shape."""
    is_known = token_id in tokenizer
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token_id)) if is_known else None,
    }


def _prompt_token_json(scores: TokenScores, n: int) -> dict[str, dict]:
    """One prompt token in vLLM's shape: itself, then the n likeliest, by token id."""
    return {
        str(token_id): {
            "logprob": max(score.logprob, MIN_LOGPROB),
            "rank": score.rank,
            "decoded_token": score.decoded_token,
        }
        for token_id, score in scores.first(n).items()
    }


def num_visible_tokens(sample: CompletionOutput | None) -> int:
    """How many of a sample's tokens begin in its text; once it has finished, all of them. 0 for None."""
    if sample is None or sample.text_offsets is None:
        return 0
    if sample.finish_reason:
        return len(sample.token_ids)
    return bisect_left(sample.text_offsets, len(sample.text))  # offsets rise


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """[tokens]: the characters of a prompt's `text` before each of its tokens.

    What the tokenizer put in front takes no room: a special token that `text` does not spell, and a space
    before the first word.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    offsets: list[int] = []
    offset, is_before_first_word = 0, True
    for i, (token_id, piece) in enumerate(zip(token_ids, pieces, strict=True)):
        is_special = token_id in tokenizer.special_ids
        if is_before_first_word and not is_special:
            is_before_first_word = False
            if offset == 0:  # negative if the tokens begin with a space that the text does not have
                offset = _leading_spaces(text) - _leading_spaces("".join(pieces[i:]))
        offsets.append(min(max(offset, 0), len(text)))
        if not is_special or text.startswith(piece, offset):
            offset += len(piece)
    return offsets


def _leading_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
