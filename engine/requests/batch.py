"""The record of one step: everything a device must know to compute it, in whole numbers. Part 6.

Frozen, on the host, passed as an argument; it holds no `Request` and no tensor, so a step can be logged, run
again, or sent to another process, which computes the same tokens from it. Several sequences lie end to end on
one flat token axis, without padding. The scheduler writes it (scheduling/scheduler.py); whoever computes
reads it (execution/runner.py).
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
    """Blocks to be copied before a step computes, in the order of their numbers (Part 12)."""

    number: int  # counts the copies of one cache: memory that has made a copy does not make it again
    kind: Literal["fork", "out", "in"]  # within the device's memory, to the host's, from the host's
    source: Ints  # blocks
    target: Ints  # as many blocks


@dataclass(frozen=True, slots=True)
class Rows:
    """Which of the T tokens' successors are wanted: some are to be chosen, others are known and scored."""

    chosen: Ints  # [R]: tokens whose successor is to be chosen, sequence by sequence
    counts: Ints  # [S]: how many of these each has: 0 inside its prompt, 1, or 1 + k where k are drafts (16)
    logprobs: Ints = ()  # [S]: how many likeliest tokens to score beside each chosen one, or UNSCORED; ()
    # where nobody asks. The same for the prompt's tokens, beside the rows that speak of them (Part 10):
    prompt_logprobs: Ints = ()  # [S] or ()
    prompt: Ints = ()  # [N]: tokens whose successor is a known token of the prompt, to be scored
    prompt_ids: Ints = ()  # [N]: these successors
    prompt_counts: Ints = ()  # [S] or (): how many of them each sequence has


@dataclass(frozen=True, slots=True)
class Draws:
    """How the R rows' tokens are chosen (Part 5)."""

    rows: tuple[Draw, ...]  # [R]
    positions: Ints  # [R]: which output token of its request each row gives, counted from 0


@dataclass(frozen=True, slots=True, eq=False)  # two steps are never the same one
class Batch:
    """S sequences, T tokens."""

    ids: tuple[str, ...]  # [S]: whose
    token_ids: Ints  # [T]
    positions: Ints  # [T]
    query_start: Ints  # [S+1]: sequence s owns tokens query_start[s]:query_start[s+1]
    context_lens: Ints  # [S]: tokens in the cache once this step is done
    tables: np.ndarray  # [S, W]: the blocks (or the slot) of each sequence in order; 0 beyond its end
    slots: np.ndarray  # [T]: where each token's keys and values go: block · P + place in it
    copies: tuple[Copy, ...]  # to be made first
    rows: Rows
    draws: Draws
    adapters: Ints  # [S]: the slot of each sequence's adapter, or NO_ADAPTER

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def has_drafts(self) -> bool:
        """Whether some rows verify drafts: then a sequence has more than one (Part 16)."""
        return len(self.rows.chosen) > sum(map(bool, self.rows.counts))

    def num_new_tokens(self, s: int) -> int:
        """Tokens of sequence s in this step."""
        return self.query_start[s + 1] - self.query_start[s]
