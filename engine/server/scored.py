"""Completions with log probabilities, and with the prompt's echo. Part 10.

Promises OpenAI's shape: four lists of one length, with one entry for each token, whether the answer is whole
or streamed. In a stream, a token is sent once the text sent so far contains the token's first character. Of
text that is held back, log probabilities then show at most the rest of that token. `token_json` is for the
chat API (Part 14).
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, cast

from engine.decoding.logprobs import TokenScores, token_text
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import SamplingParams
from engine.server.errors import RequestError
from engine.server.protocol import CompletionRequest, Completions, check_num_logprobs
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # in place of -inf, which JSON cannot express; vLLM uses the same value


class ScoredCompletions(Completions[CompletionRequest]):
    """Completions with `logprobs`, `echo` and vLLM's `prompt_logprobs`.

    With `echo`, `max_tokens` may be 0. The engine then computes one token, because every step gives a token,
    and the methods leave it out of the answer.
    """

    def __init__(self, tokenizer: Tokenizer, allow_priority: bool = False) -> None:
        super().__init__(allow_priority)
        self.tokenizer = tokenizer

    def params(self, body: CompletionRequest) -> SamplingParams:
        """The parameters for the engine. Raises ParameterError or RequestError for a value out of range.

        `echo` with `logprobs` also asks the engine for the prompt's log probabilities. `max_tokens` 0 becomes
        1.
        """
        check_num_logprobs("logprobs", body.logprobs)
        check_num_logprobs("prompt_logprobs", body.prompt_logprobs)
        changes: dict[str, Any] = {"echo": None}  # `choice` does it; `CompletionRequest` would refuse it
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
        """OpenAI's choice without its index. If nothing was sent before (`previous` is None), it also has the
        prompt's part: with `echo` the text, and with `prompt_logprobs` the list of `prompt_scores_json`.
        """
        is_first = previous is None
        choice = super().choice(body, output, sample, previous)
        if body.max_tokens == 0:
            choice["text"] = ""
            if choice["finish_reason"] == "stop":  # by the token that is left out
                choice["finish_reason"] = "length"
        if body.echo and is_first:
            choice["text"] = self._prompt_text(body, output) + choice["text"]
        if body.logprobs is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            lists = LogprobLists(self.tokenizer, body.logprobs, as_ids)
            self._add_tokens(lists, body, output, sample, previous)
            choice["logprobs"] = lists.as_json()
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_scores_json(output, body.prompt_logprobs)
        return choice

    def vllm_fields(
        self,
        body: CompletionRequest,
        output: RequestOutput,
        sample: CompletionOutput,
        previous: CompletionOutput | None,
    ) -> dict:
        """As in Completions, without the token that `max_tokens` 0 leaves out."""
        fields = super().vllm_fields(body, output, sample, previous)
        if body.max_tokens == 0:
            fields["stop_reason"] = None
            if body.return_token_ids:
                fields["token_ids"] = []
        return fields

    def usage(self, body: CompletionRequest, outputs: Sequence[RequestOutput]) -> dict:
        """As in Completions, without the token that `max_tokens` 0 leaves out."""
        usage = super().usage(body, outputs)
        if body.max_tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _add_tokens(
        self,
        lists: "LogprobLists",
        body: CompletionRequest,
        output: RequestOutput,
        sample: CompletionOutput,
        previous: CompletionOutput | None,
    ) -> None:
        """Add one choice's tokens to `lists`: the echoed prompt's, if nothing was sent; then new ones."""
        prompt_text = self._prompt_text(body, output) if body.echo else ""
        if body.echo and previous is None:
            offsets = prompt_offsets(self.tokenizer, output.prompt_token_ids, prompt_text)
            lists.add(output.prompt_token_ids, prompt_scores(output), offsets)
        if body.max_tokens != 0:
            assert sample.text_offsets is not None  # outputs with log probabilities have offsets
            new_indices = range(num_visible_tokens(previous), num_visible_tokens(sample))
            token_ids = [sample.token_ids[i] for i in new_indices]
            scores = [scores_of(sample, i) for i in new_indices]
            # If a stop string cut the text, the token may begin beyond the end of the text.
            offsets = [len(prompt_text) + min(sample.text_offsets[i], len(sample.text)) for i in new_indices]
            lists.add(token_ids, scores, offsets)

    def _prompt_text(self, body: CompletionRequest, output: RequestOutput) -> str:
        """The prompt's text as the client sent it. For token ids, and with `truncate_prompt_tokens`, the text
        of the tokens that the model reads.
        """
        if output.prompt is not None and body.truncate_prompt_tokens is None:
            return output.prompt
        ids = output.prompt_token_ids
        return self.tokenizer.decode(id for id in ids if id in self.tokenizer)


class LogprobLists:
    """Collects tokens into OpenAI's four lists."""

    def __init__(self, tokenizer: Tokenizer, num_likeliest: int, as_ids: bool) -> None:
        """`num_likeliest`: how many tokens are listed for each place. `as_ids`: see `token_name`."""
        self._tokenizer, self._num_likeliest, self._as_ids = tokenizer, num_likeliest, as_ids
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(
        self, token_ids: Sequence[int], scores: Sequence[TokenScores | None], offsets: Sequence[int]
    ) -> None:
        """Append tokens. The three arguments have one entry for each token.

        `scores`: None for the first token of a prompt. `offsets`: how many characters precede the token.
        """
        self._offsets += offsets
        for token_id, token_scores in zip(token_ids, scores, strict=True):
            token = token_name(self._tokenizer, token_id, self._as_ids)
            self._tokens.append(token)
            if token_scores is None:
                self._logprobs.append(None)
                self._top.append(None)
            else:
                logprob = max(token_scores.logprob, MIN_LOGPROB)
                self._logprobs.append(logprob)
                self._top.append(self._likeliest(token_scores) | {token: logprob})

    def _likeliest(self, scores: TokenScores) -> dict[str, float]:
        """token -> log probability of the likeliest tokens at one place."""
        likeliest: dict[str, float] = {}
        for token_id, logprob in scores.top(self._num_likeliest):
            likeliest[token_name(self._tokenizer, token_id, self._as_ids)] = max(logprob, MIN_LOGPROB)
        return likeliest

    def as_json(self) -> dict:
        """The four lists under OpenAI's names."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }


def prompt_scores(output: RequestOutput) -> Sequence[TokenScores | None]:
    """The scores of each prompt token; None for the first. The request must have asked for the scores."""
    return cast(Sequence[TokenScores | None], output.prompt_logprobs)


def scores_of(sample: CompletionOutput, i: int) -> TokenScores:
    """The scores of token `i` of the sample. The request must have asked for the scores."""
    return cast(Sequence[TokenScores], sample.logprobs)[i]


def token_name(tokenizer: Tokenizer, token_id: int, as_ids: bool) -> str:
    """A token as log probabilities name it: its text, or with `as_ids` vLLM's `token_id:N`."""
    return f"token_id:{token_id}" if as_ids else token_text(tokenizer, token_id)


def token_json(tokenizer: Tokenizer, scores: TokenScores, n: int, as_ids: bool = False) -> dict:
    """One token in the chat API's shape: {"token", "logprob", "bytes", "top_logprobs"}.

    `bytes` is null for a token id that the tokenizer does not know. `top_logprobs` lists the `n` likeliest
    tokens, each with token, logprob and bytes. `as_ids` is as in `token_name`.
    """
    likeliest = [_logprob_json(tokenizer, token_id, logprob, as_ids) for token_id, logprob in scores.top(n)]
    return _logprob_json(tokenizer, scores.token_id, scores.logprob, as_ids) | {"top_logprobs": likeliest}


def _logprob_json(tokenizer: Tokenizer, token_id: int, logprob: float, as_ids: bool) -> dict:
    """One token in the chat API's shape without `top_logprobs`."""
    is_known = token_id in tokenizer
    return {
        "token": token_name(tokenizer, token_id, as_ids),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token_id)) if is_known else None,
    }


def prompt_scores_json(output: RequestOutput, n: int) -> list[dict[str, dict] | None]:
    """vLLM's `prompt_logprobs`: a `_prompt_token_json` for each prompt token; None for the first, which no
    logits predict.
    """
    return [None if scores is None else _prompt_token_json(scores, n) for scores in prompt_scores(output)]


def _prompt_token_json(scores: TokenScores, n: int) -> dict[str, dict]:
    """One prompt token in vLLM's shape: token id -> {"logprob", "rank", "decoded_token"}, for the token
    itself and the `n` likeliest.
    """
    return {
        str(token_id): {
            "logprob": max(score.logprob, MIN_LOGPROB),
            "rank": score.rank,
            "decoded_token": score.decoded_token,
        }
        for token_id, score in scores.to_dict(n).items()
    }


def num_visible_tokens(sample: CompletionOutput | None) -> int:
    """How many tokens of a sample begin within its text; all tokens if it has finished. 0 for None (nothing
    was sent yet), and for a sample without offsets (it has no log probabilities).
    """
    if sample is None or sample.text_offsets is None:
        return 0
    if sample.finish_reason:
        return len(sample.token_ids)
    return bisect_left(sample.text_offsets, len(sample.text))  # offsets rise


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """[tokens]: how many characters of a prompt's `text` precede each of its tokens.

    Tokens may spell more than `text`: the tokenizer may add a special token, and a space before the first
    word. Such added text counts 0 characters.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    first_word = 0  # the index of the first token that is not special
    while first_word < len(token_ids) and token_ids[first_word] in tokenizer.special_ids:
        first_word += 1

    offsets: list[int] = []
    offset = 0  # of the next token's text; negative where a space is added before the first word
    for i, token_id in enumerate(token_ids):
        if i == first_word and offset == 0:
            offset = _leading_spaces(text) - _leading_spaces("".join(pieces[i:]))
        offsets.append(min(max(offset, 0), len(text)))
        is_added = token_id in tokenizer.special_ids and not text.startswith(pieces[i], offset)
        if not is_added:
            offset += len(pieces[i])
    return offsets


def _leading_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
