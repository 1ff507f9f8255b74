"""Log probabilities: how likely a token was for the model, its rank, and the likeliest tokens.

Promises numbers from the model's raw logits in fp32, before bias, penalties and temperature. Scores are kept
in small arrays, and become `Logprob` records only when they are read. Does not know which row of a step
belongs to which token (engine/requests/batch.py does). Part 10.
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
CHUNK_LOGITS = 2**22  # logits scored at once: 16 MiB in fp32, and 16 MiB for their log probabilities


class Scores(NamedTuple):
    """The scores of one token of each of R rows of logits, and of the n likeliest tokens of each row."""

    logprobs: Tensor  # [R]: of the row's token
    ranks: Tensor  # [R]: of the row's token; 1 is the likeliest
    top_ids: Tensor  # [R, n], the likeliest first
    top_logprobs: Tensor  # [R, n]


def score(logits: Tensor, token_ids: Tensor, n: int) -> Scores:
    """Score token_ids[R], one token for each row of logits[R, V], and the n likeliest tokens of each row.

    A log probability is the natural logarithm of a token's probability in the softmax over all V tokens of
    its row. It is computed in fp32, whatever the dtype of the logits. A rank is 1 more than the number of
    likelier tokens, so equally likely tokens share a rank. If V is less than n, all V tokens are returned.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)  # [R, V]
    token_logprobs = logprobs.gather(-1, token_ids[:, None])  # [R, 1]
    ranks = (logprobs > token_logprobs).sum(-1) + 1  # [R]
    top_logprobs, top_ids = logprobs.topk(min(n, logits.shape[-1]), dim=-1)  # [R, n]
    return Scores(token_logprobs[:, 0], ranks, top_ids, top_logprobs)


def score_in_chunks(logits_of: Callable[[slice], Tensor], token_ids: Tensor, n: int, V: int) -> Scores:
    """The `score` of token_ids[R], computed for a chunk of rows at a time to limit the memory. R is at least
    1.

    `logits_of` takes a slice of the R rows and returns their logits [r, V]. A chunk has at most CHUNK_LOGITS
    logits, or one row if a row has more.
    """
    size = max(1, CHUNK_LOGITS // V)
    chunks = [slice(start, start + size) for start in range(0, len(token_ids), size)]
    scores = [score(logits_of(rows), token_ids[rows], n) for rows in chunks]  # of [r, V] and [r]
    if len(scores) == 1:
        return scores[0]
    return Scores(  # each field of all chunks, end to end
        logprobs=torch.cat([chunk.logprobs for chunk in scores]),
        ranks=torch.cat([chunk.ranks for chunk in scores]),
        top_ids=torch.cat([chunk.top_ids for chunk in scores]),
        top_logprobs=torch.cat([chunk.top_logprobs for chunk in scores]),
    )


def perplexity(logprobs: Sequence[float]) -> float:
    """e to the power of the mean negated log probability. A perplexity of N is that of a model that guesses
    among N equally likely tokens. A perplexity of 1 means that the model was certain of each token.

    Raises ValueError, "at least one log probability is needed", if there are none.
    """
    if not logprobs:
        raise ValueError("perplexity of no tokens: at least one log probability is needed")
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a token for a table of log probabilities.

    A token whose bytes are not UTF-8 is written as in OpenAI's API: `bytes:\\xf0\\x9f`. An id that the
    tokenizer does not know is written `token_id:N`.
    """
    if token_id not in tokenizer:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenScores(Mapping[int, Logprob]):
    """A read-only map from token id to Logprob, for one position of a sequence.

    The first entry is the token at this position. The n likeliest tokens follow, without this token if it is
    among them. A `Logprob` is made when it is read, because a step collects thousands of entries and few of
    them are read.
    """

    __slots__ = ("_ids", "_logprobs", "_rank", "_text_of")

    def __init__(
        self, token_ids: np.ndarray, logprobs: np.ndarray, rank: int, text_of: Callable[[int], str]
    ) -> None:
        """token_ids[1+n] and logprobs[1+n] have the token at this position first, then the n likeliest tokens
        in order, which may include this token again. `rank` is the rank of this token. `text_of` returns
        the text of a token id.
        """
        self._ids, self._logprobs, self._rank, self._text_of = token_ids, logprobs, rank, text_of

    @property
    def token_id(self) -> int:
        """The id of the token at this position."""
        return int(self._ids[0])

    @property
    def logprob(self) -> float:
        """The log probability of the token at this position."""
        return float(self._logprobs[0])

    def top(self, n: int) -> list[tuple[int, float]]:
        """(id, log probability) of the n likeliest tokens, or of all that the engine has scored, if fewer."""
        return list(zip(self._ids[1 : n + 1].tolist(), self._logprobs[1 : n + 1].tolist(), strict=True))

    def to_dict(self, n: int) -> dict[int, Logprob]:
        """The token at this position, then the n likeliest tokens: entries of `self`, made in one pass."""
        ids, logprobs = self._ids[: n + 1].tolist(), self._logprobs[: n + 1].tolist()
        records = {ids[0]: Logprob(logprobs[0], self._rank, self._text_of(ids[0]))}
        rank = 1
        for i in range(1, len(ids)):  # the likeliest tokens, in order
            if i > 1 and logprobs[i] != logprobs[i - 1]:  # equally likely tokens share a rank
                rank = i
            if ids[i] not in records:
                records[ids[i]] = Logprob(logprobs[i], rank, self._text_of(ids[i]))
        return records

    def __getitem__(self, token_id: int) -> Logprob:
        """The score of a token that was scored. Raises KeyError for any other token."""
        indices = (self._ids == token_id).nonzero()[0]
        if not len(indices):
            raise KeyError(token_id)
        i = indices[0]
        logprob = self._logprobs[i]
        if i == 0:
            rank = self._rank
        else:
            rank = int((self._logprobs[1:] > logprob).sum()) + 1
        return Logprob(float(logprob), rank, self._text_of(token_id))

    def __iter__(self) -> Iterator[int]:
        yield from dict.fromkeys(self._ids.tolist())  # each id once, in order

    def __len__(self) -> int:
        return len(set(self._ids.tolist()))

    def __repr__(self) -> str:
        return repr(dict(self))
