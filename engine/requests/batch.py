"""The record of one step: everything a device must know to compute it, in numbers. Part 6.

Frozen, on the host, passed as an argument; it holds no `Request` and no tensor, so a step can be logged, run
again, or sent to another process, which computes the same tokens from it. Several sequences lie end to end on
one flat token axis, without padding. The scheduler writes it (engine/scheduling/batching.py); an executor
reads it (engine/execution/runner.py).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.decoding.sampling import Draw

Ints = tuple[int, ...]
PLACEHOLDER = -1  # stands for the token sampled last, which may still be on the device (Part 13)
NO_ADAPTER = -1  # the adapter slot of a sequence without an adapter (Part 18)
UNSCORED = -1  # the number of likeliest tokens to score where no log probability is asked for (Part 10)


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks to be copied before a step computes; copies are made in the order of their numbers (Part 12)."""

    number: int  # from 0 on, by cache: a memory makes no copy twice
    kind: Literal["fork", "out", "in"]  # within the device's memory, to the host's, from the host's
    source: Ints  # blocks
    target: Ints  # as many blocks


@dataclass(frozen=True, slots=True)
class Rows:
    """Which of the step's T rows of logits are read. Row t is of the token that comes after token t: it is to
    be chosen, or it is a known token of the prompt, to be scored.
    """

    chosen: Ints  # [R]: rows from which a token is chosen, sequence by sequence
    counts: Ints  # [S]: how many of these each has: 0 inside its prompt, 1, or 1 + k where k are drafts (16)
    # Log probabilities (Part 10); all () where no request of the step asks for any.
    logprobs: Ints = ()  # [S] or (): how many likeliest tokens to score beside each chosen one, or UNSCORED
    prompt_logprobs: Ints = ()  # [S] or (): the same, beside each token of the prompt
    prompt: Ints = ()  # [N]: rows that are scored for a token of the prompt, sequence by sequence
    prompt_ids: Ints = ()  # [N]: these tokens
    prompt_counts: Ints = ()  # [S] or (): how many of these rows each sequence has


@dataclass(frozen=True, slots=True)
class Draws:
    """How the tokens of the R rows `Rows.chosen` are drawn (Part 5)."""

    rows: tuple[Draw, ...]  # [R]
    positions: Ints  # [R]: which output token of its request each row gives, counted from 0


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: no two steps are the same
class Batch:
    """One step: T new tokens of S sequences."""

    ids: tuple[str, ...]  # [S]: the sequences, by their requests' `id`
    token_ids: Ints  # [T]: PLACEHOLDER for a token that is still on the device
    positions: Ints  # [T]: in its sequence
    query_start: Ints  # [S+1]: sequence s owns tokens query_start[s]:query_start[s+1]
    context_lens: Ints  # [S]: tokens in the cache once this step is done
    tables: np.ndarray  # [S, W]: the blocks (or the slot) of each sequence in order; 0 beyond its end
    slots: np.ndarray  # [T]: where each token's keys and values go: block · P + offset in the block
    copies: tuple[Copy, ...]  # made before the step computes
    rows: Rows
    draws: Draws
    adapters: Ints  # [S]: the slot of each sequence's adapter, or NO_ADAPTER

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies drafts: then a sequence has more than one row in `chosen` (Part 16)."""
        return len(self.rows.chosen) > sum(map(bool, self.rows.counts))

    def num_new_tokens(self, s: int) -> int:
        """How many of the T tokens are of sequence s."""
        return self.query_start[s + 1] - self.query_start[s]
