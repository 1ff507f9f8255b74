"""How likely the model thought a token was, its rank, and the likeliest tokens beside it.

Promises numbers from the model's raw logits, in fp32, whatever bias, penalties and temperature made of them
later. Scores are kept as small arrays, and become records when somebody reads them. Does not know which row
of a step speaks of which token (engine/requests/batch.py does). Part 10.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.decoding import sampling
from engine.decoding.outputs import Logprob
from engine.text.tokenizer import Tokenizer

SUPPORTS = sampling.SUPPORTS | {"logprobs", "prompt_logprobs"}
CHUNK_LOGITS = 2**22  # that are scored at once: 16 MiB of fp32, and as much again for their logarithms


class Scores(NamedTuple):
    """What R rows of logits say, each of one token and of the n likeliest."""

    logprobs: Tensor  # [R]: of the row's token
    ranks: Tensor  # [R]: of the row's token; 1 is the likeliest
    top_ids: Tensor  # [R, n], the likeliest first
    top_logprobs: Tensor  # [R, n]


def score(logits: Tensor, token_ids: Tensor, n: int) -> Scores:
    """What logits[R, V] say of token_ids[R], a token for each row, and of the n likeliest tokens.

    A log probability is the natural logarithm of a token's share in the softmax of its row, all V tokens
    counted, worked out in fp32 whatever the logits are in. A rank is 1 more than the number of tokens that
    are likelier, so equals share one. A vocabulary of fewer than n tokens gives all it has.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)  # [R, V]
    token_logprobs = logprobs.gather(-1, token_ids[:, None])  # [R, 1]
    ranks = (logprobs > token_logprobs).sum(-1) + 1  # [R]
    top_logprobs, top_ids = logprobs.topk(min(n, logits.shape[-1]), dim=-1)  # [R, n]
    return Scores(token_logprobs[:, 0], ranks, top_ids, top_logprobs)


def score_in_chunks(logits_of: Callable[[slice], Tensor], token_ids: Tensor, n: int, V: int) -> Scores:
    """`score` of token_ids[R] for any R: `logits_of` gives logits[r, V] of r of the rows at a time, and no
    more than CHUNK_LOGITS numbers (or one row) are there at once.
    """
    size = max(1, CHUNK_LOGITS // V)
    chunks = [slice(start, start + size) for start in range(0, len(token_ids), size)]
    scores = [score(logits_of(rows), token_ids[rows], n) for rows in chunks]  # of [r, V] and [r]
    return scores[0] if len(scores) == 1 else Scores(*map(torch.cat, zip(*scores, strict=True)))


def perplexity(logprobs: Sequence[float]) -> float:
    """e to the power of the mean surprise (the negated log probability): among how many equally likely tokens
    the model might as well have been guessing, on average. 1 is certainty.

    Raises ValueError without any: "at least one log probability is needed".
    """
    if not logprobs:
        raise ValueError("perplexity of no tokens: at least one log probability is needed")
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; OpenAI's `bytes:\\xf0\\x9f` where its bytes are no text by themselves; `token_id:N` for
    an id that the tokenizer does not know. No two tokens have the same.
    """
    if token_id not in tokenizer:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenScores(Mapping[int, Logprob]):
    """Token id -> Logprob at one position: the token that is there, then the likeliest that are not it.

    A read-only dict that makes its entries when they are read: a step collects thousands, and few are read.
    """

    __slots__ = ("_ids", "_logprobs", "_rank", "_text")

    def __init__(
        self, token_ids: np.ndarray, logprobs: np.ndarray, rank: int, text: Callable[[int], str]
    ) -> None:
        """`token_ids[1+n]` and `logprobs[1+n]`: of the token that is there, then of the n likeliest in order,
        among which it may be again. `rank`: its rank. `text`: from a token id to its text.
        """
        self._ids, self._logprobs, self._rank, self._text = token_ids, logprobs, rank, text

    @property
    def token_id(self) -> int:
        """The token that is there."""
        return int(self._ids[0])

    @property
    def logprob(self) -> float:
        """Its log probability."""
        return float(self._logprobs[0])

    def top(self, n: int) -> list[tuple[int, float]]:
        """(id, log probability) of the n likeliest, or of as many as were asked of the engine."""
        return list(zip(self._ids[1 : n + 1].tolist(), self._logprobs[1 : n + 1].tolist(), strict=True))

    def first(self, n: int) -> dict[int, Logprob]:
        """The token that is there, then the n likeliest: the entries of `self`, but made in one pass."""
        ids, logprobs = self._ids[: n + 1].tolist(), self._logprobs[: n + 1].tolist()
        records = {ids[0]: Logprob(logprobs[0], self._rank, self._text(ids[0]))}
        rank = 1
        for i in range(1, len(ids)):  # from the likeliest on
            if i > 1 and logprobs[i] != logprobs[i - 1]:  # equals share a rank
                rank = i
            if ids[i] not in records:
                records[ids[i]] = Logprob(logprobs[i], rank, self._text(ids[i]))
        return records

    def __getitem__(self, token_id: int) -> Logprob:
        indices = (self._ids == token_id).nonzero()[0]
        if not len(indices):
            raise KeyError(token_id)
        i = indices[0]
        logprob = self._logprobs[i]
        if i == 0:
            rank = self._rank
        else:
            rank = int((self._logprobs[1:] > logprob).sum()) + 1
        return Logprob(float(logprob), rank, self._text(token_id))

    def __iter__(self) -> Iterator[int]:
        yield from dict.fromkeys(self._ids.tolist())

    def __len__(self) -> int:
        return len(set(self._ids.tolist()))

    def __repr__(self) -> str:
        return repr(dict(self))
