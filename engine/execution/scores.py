"""Log probabilities of a step's tokens, for the requests that ask for them. Part 10.

Scores change no token, except that a request whose scores are not numbers gets NO_TOKEN, and fails. A step in
which no request asks for log probabilities computes nothing more. All numbers of a step are copied from the
device at once. The logits of a long prompt are never all in memory: the output layer gets the prompt's rows
in chunks. The step's record says which row is scored for which token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from engine.decoding.logprobs import TokenScores, score_in_chunks, token_text
from engine.decoding.outputs import Logprobs, TokenLogprobs
from engine.decoding.sampling import NO_TOKEN
from engine.execution.runner import Logits
from engine.machine.device import on_device
from engine.requests.batch import UNSCORED, Batch
from engine.requests.step import StepResult
from engine.text.tokenizer import Tokenizer

ToLogits = Callable[[Tensor], Tensor]  # hidden[N, D] -> logits[N, V], for any N


class ChosenLogprobs:
    """A `Score`: the log probabilities of the chosen tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer` gives the text of a token."""
        self.text_of = partial(token_text, tokenizer)

    def __call__(self, logits: Logits, token_ids: Tensor, batch: Batch) -> list[Tensor] | None:
        """The fields of a `Scores` (logprobs.py), for the rows whose requests ask for log probabilities; None
        if no request asks. Each row has as many likeliest tokens as the request that asks for most.
        """
        rows, values = self._rows(batch), logits.values
        if not rows:
            return None
        token_ids = token_ids.to(values.device)
        if len(rows) < len(token_ids):
            (index,) = on_device(values.device, rows)
            values, token_ids = values[index], token_ids[index]
        n = max(batch.rows.logprobs)
        # NO_TOKEN, which is below 0, is scored as token 0. Its request fails, so the score is not used.
        token_ids = token_ids.clamp(min=0)
        return list(score_in_chunks(lambda chunk: values[chunk], token_ids, n, values.shape[-1]))

    def add_to(
        self, result: StepResult, batch: Batch, token_ids: np.ndarray, arrays: Sequence[np.ndarray]
    ) -> StepResult:
        """The result with `logprobs`[S]: a sequence whose request asks has an entry for each of its tokens,
        and other sequences have an empty list.
        """
        scores = HostScores(token_ids[self._rows(batch)], arrays, self.text_of)
        logprobs: list[list[TokenLogprobs]] = []
        for tokens, n in zip(result.tokens, batch.rows.logprobs, strict=True):
            logprobs.append([] if n == UNSCORED else list(scores.take(len(tokens), n)))
        return replace(result, logprobs=logprobs)

    def _rows(self, batch: Batch) -> list[int]:
        """The indices of those of the R rows that are scored."""
        if not batch.rows.logprobs:
            return []
        is_scored = [n != UNSCORED for n in batch.rows.logprobs]  # [S]
        return np.flatnonzero(np.repeat(is_scored, batch.rows.chosen_counts)).tolist()


class PromptLogprobs:
    """A `Score`: the log probabilities of the prompts' tokens. The pass of the model gives hidden states of
    the prompts' rows, without the output layer.
    """

    def __init__(self, tokenizer: Tokenizer, to_logits: ToLogits) -> None:
        """`tokenizer` gives the text of a token. `to_logits` is the model's output layer."""
        self.text_of, self.to_logits = partial(token_text, tokenizer), to_logits

    def __call__(self, logits: Logits, token_ids: Tensor, batch: Batch) -> list[Tensor] | None:
        """The fields of a `Scores` for the N rows that are scored for a prompt's token; [] if N is 0. None if
        no request asks. The output layer gets a chunk of the rows at a time.
        """
        hidden, num_likeliest = logits.prompt_hidden, batch.rows.prompt_logprobs  # [N, D], [S] or ()
        if not num_likeliest or max(num_likeliest) == UNSCORED:
            return None
        if hidden is None:  # no row to score in this step, as in a prompt of one token
            return []
        (prompt_ids,) = on_device(hidden.device, batch.rows.prompt_ids)
        n, V = max(num_likeliest), logits.values.shape[-1]
        return list(score_in_chunks(lambda chunk: self.to_logits(hidden[chunk]), prompt_ids, n, V))

    def add_to(
        self, result: StepResult, batch: Batch, token_ids: np.ndarray, arrays: Sequence[np.ndarray]
    ) -> StepResult:
        """The result with `prompt_logprobs`[S]. The entry of a prompt's first token is None, since no token
        comes before it. If a score is not a number, the request's token becomes NO_TOKEN, so it fails.
        """
        scores = HostScores(np.array(batch.rows.prompt_ids), arrays, self.text_of) if arrays else None
        tokens = list(result.tokens)
        prompts: list[Logprobs] = []
        counts = zip(batch.rows.prompt_counts, batch.rows.prompt_logprobs, strict=True)
        for s, (count, n) in enumerate(counts):
            scored = scores.take(count, n) if scores else []
            if any(math.isnan(token.logprob) for token in scored):
                tokens[s] = [NO_TOKEN]
            prompt: Logprobs = [*scored]
            begins_prompt = batch.positions[batch.query_start[s]] == 0
            if n != UNSCORED and begins_prompt:
                prompt.insert(0, None)
            prompts.append(prompt)
        return replace(result, tokens=tokens, prompt_logprobs=prompts)


class HostScores:
    """The scores of a step's rows, on the host. `take` gives them to the sequences in order."""

    def __init__(
        self, token_ids: np.ndarray, scores: Sequence[np.ndarray], text_of: Callable[[int], str]
    ) -> None:
        """`token_ids` are the R scored tokens, and `scores` the arrays of their `Scores`, field by field.
        `text_of` is as in `TokenScores`.
        """
        logprobs, ranks, top_ids, top_logprobs = scores  # [R], [R], [R, n], [R, n]
        self.ranks = ranks
        self.ids = np.concatenate([token_ids[:, None], top_ids], axis=1)  # [R, 1+n]
        self.logprobs = np.concatenate([logprobs[:, None], top_logprobs], axis=1)  # [R, 1+n]
        self.text_of = text_of
        self._next_row = 0

    def take(self, count: int, n: int) -> list[TokenScores]:
        """The next `count` rows, each with its n likeliest tokens. Each row is a copy: a request that keeps a
        row would otherwise keep the arrays of the whole step in memory.
        """
        rows = range(self._next_row, self._next_row + count)
        self._next_row = rows.stop
        return [
            TokenScores(
                token_ids=self.ids[row, : n + 1].copy(),
                logprobs=self.logprobs[row, : n + 1].copy(),
                rank=int(self.ranks[row]),
                text_of=self.text_of,
            )
            for row in rows
        ]


def logprobs_of(tokenizer: Tokenizer, to_logits: ToLogits) -> list[ChosenLogprobs | PromptLogprobs]:
    """The `scores` of a runner: of chosen tokens, and of prompts. `to_logits` is the model's output layer."""
    return [ChosenLogprobs(tokenizer), PromptLogprobs(tokenizer, to_logits)]
