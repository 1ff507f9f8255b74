"""Completions with log probabilities, and with the prompt's echo. Part 10.

Promises OpenAI's shape: four lists of one length, in which every token stands once, whole or streamed. A
token goes with the text in which its first character is shown, so a chunk never tells of text held back.
`entry` is one token in the shape of the chat API (Part 14).
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

LEAST = -9999.0  # JSON has no infinity: what a logit of -inf is shown as


class ScoredCompletions(Completions[CompletionRequest]):
    """`logprobs`, `echo`, `max_tokens` 0 with `echo`, and vLLM's `prompt_logprobs`."""

    def __init__(self, tokenizer: Tokenizer, allow_priority: bool = False) -> None:
        super().__init__(allow_priority)
        self.tokenizer = tokenizer

    def params(self, body: CompletionRequest) -> SamplingParams:
        """What the engine is asked. Raises ParameterError or RequestError for a value out of range.

        `echo` with `logprobs` asks for the prompt's, too. `max_tokens` 0 asks for one token, which is not
        shown: the engine has no step without one.
        """
        for name, most in (("logprobs", MAX_COMPLETION_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            value = getattr(body, name)
            if value is not None and not 0 <= value <= most:
                message = f"{name}={value}: a whole number from 0 to {most} is accepted"
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
        shown: CompletionOutput | None = None,
    ) -> dict:
        """OpenAI's choice; the prompt's share comes with what is shown first.

        `prompt_logprobs`, if asked for, are vLLM's: token id -> logprob, rank, text, for each prompt token.
        """
        choice = super().choice(body, output, sample, shown)
        prompt_only = body.max_tokens == 0
        if prompt_only:
            reason = choice["finish_reason"]
            choice |= {"text": "", "finish_reason": "length" if reason == "stop" else reason}
        prompt = self._prompt(output) if body.echo else ""
        if body.echo and shown is None:
            choice["text"] = prompt + choice["text"]
        if body.logprobs is not None:
            lists = _Lists(self.tokenizer, body.logprobs)
            if body.echo and shown is None:
                offsets = _offsets(self.tokenizer, output.prompt_token_ids, prompt)
                lists.add(output.prompt_token_ids, prompt_scores(output), offsets)
            if not prompt_only:
                assert sample.text_offsets is not None  # they come with log probabilities
                new = range(tokens_shown(shown), tokens_shown(sample))
                offsets = [len(prompt) + min(sample.text_offsets[i], len(sample.text)) for i in new]
                lists.add([sample.token_ids[i] for i in new], [scores_of(sample, i) for i in new], offsets)
            choice["logprobs"] = lists.shown()
        if body.prompt_logprobs is not None and shown is None:
            choice["prompt_logprobs"] = [
                scores and _entries(scores, body.prompt_logprobs) for scores in prompt_scores(output)
            ]
        return choice

    def usage(self, body: CompletionRequest, outputs: Sequence[RequestOutput]) -> dict:
        """As ever; a token that is not shown is not counted."""
        usage = super().usage(body, outputs)
        if body.max_tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _prompt(self, output: RequestOutput) -> str:
        """The prompt's text: as it was sent, or of the token ids that were."""
        if output.prompt is not None:
            return output.prompt
        ids = output.prompt_token_ids
        return self.tokenizer.decode(id for id in ids if id in self.tokenizer)


class _Lists:
    """OpenAI's four lists, token by token."""

    def __init__(self, tokenizer: Tokenizer, n: int) -> None:
        self._tokenizer, self._n = tokenizer, n
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(
        self, token_ids: Sequence[int], scores: Sequence[TokenScores | None], offsets: Sequence[int]
    ) -> None:
        """Tokens with their scores (None: the first of a prompt) and where they begin in the text shown."""
        for token_id, token_scores, offset in zip(token_ids, scores, offsets, strict=True):
            token = token_text(self._tokenizer, token_id)
            self._tokens.append(token)
            self._offsets.append(offset)
            if token_scores is None:
                self._logprobs.append(None)
                self._top.append(None)
                continue
            logprob = max(token_scores.logprob, LEAST)
            top = {token_text(self._tokenizer, id): max(p, LEAST) for id, p in token_scores.top(self._n)}
            self._logprobs.append(logprob)
            self._top.append(top | {token: logprob})

    def shown(self) -> dict:
        """As OpenAI's `logprobs` has them."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }


def prompt_scores(output: RequestOutput) -> Sequence[TokenScores | None]:
    """Of each prompt token, where they were asked for; None for the first."""
    return cast(Sequence[TokenScores | None], output.prompt_logprobs)


def scores_of(sample: CompletionOutput, i: int) -> TokenScores:
    """Of the sample's token i, where they were asked for."""
    return cast(Sequence[TokenScores], sample.logprobs)[i]


def entry(tokenizer: Tokenizer, scores: TokenScores, n: int) -> dict:
    """One token as the chat API shows it: `token`, `logprob`, `bytes` (null for an id the tokenizer does not
    know), and in `top_logprobs` the same of the n likeliest.
    """

    def shown(token_id: int, logprob: float) -> dict:
        known = token_id in tokenizer
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": max(logprob, LEAST),
            "bytes": list(tokenizer.token_bytes(token_id)) if known else None,
        }

    top = [shown(token_id, logprob) for token_id, logprob in scores.top(n)]
    return shown(scores.token_id, scores.logprob) | {"top_logprobs": top}


def _entries(scores: TokenScores, n: int) -> dict[str, dict]:
    """vLLM's entry of one prompt token: the token, and the n likeliest."""
    return {
        str(id): {
            "logprob": max(score.logprob, LEAST),
            "rank": score.rank,
            "decoded_token": score.decoded_token,
        }
        for id, score in scores.first(n).items()
    }


def tokens_shown(sample: CompletionOutput | None) -> int:
    """How many of a sample's tokens go with the text it shows: those that begin in it, and in the end all."""
    if sample is None or sample.text_offsets is None:
        return 0
    return (
        len(sample.token_ids) if sample.finish_reason else bisect_left(sample.text_offsets, len(sample.text))
    )


def _leading_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where each of a prompt's tokens begins in its text. A special token that is not written there, such as
    one that the tokenizer puts in front, takes no room; nor does a space that it puts there.
    """
    detokenizer, offsets = Detokenizer(tokenizer, skip_special_tokens=False), []
    offset, has_begun = 0, False
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    for i, (token_id, piece) in enumerate(zip(token_ids, pieces, strict=True)):
        if not has_begun and token_id not in tokenizer.special_ids:
            has_begun, offset = True, offset or _leading_spaces(text) - _leading_spaces("".join(pieces[i:]))
        offsets.append(min(max(offset, 0), len(text)))
        if token_id not in tokenizer.special_ids or text.startswith(piece, offset):
            offset += len(piece)
    return offsets
