"""The record of one step: all numbers that a device needs to compute the step. Part 6.

A `Batch` lies in the host's memory. It holds no `Request` and no tensor, so a step can be logged, computed
again, or sent to another process, which computes the same tokens. The sequences lie end to end on one flat
token axis, without padding. The scheduler writes the record (engine/scheduling/batching.py), and an executor
reads it (engine/execution/runner.py) and changes nothing in it.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.decoding.sampling_state import Draw

Ints = tuple[int, ...]
PLACEHOLDER = -1  # the token id of the token sampled last, while the id is still on the device (Part 13)
NO_ADAPTER = -1  # the adapter slot of a sequence without an adapter (Part 18)
UNSCORED = -1  # the number of tokens to score for a sequence that requests no log probabilities (Part 10)


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks to copy before a step computes (Part 12). Copies are made in the order of their numbers."""

    number: int  # counted by the cache from 0 on, so that a memory makes no copy twice
    kind: Literal["fork", "out", "in"]  # within the device's memory, to the host's memory, from the host's
    source: Ints  # indices of blocks
    target: Ints  # indices of as many blocks as `source` has


@dataclass(frozen=True, slots=True)
class Rows:
    """Which of the step's T rows of logits are read.

    Row t predicts the token after token t. This token is to be chosen, or it is a known token of the prompt
    that is to be scored.
    """

    chosen: Ints  # [R]: rows from which a token is chosen, sequence by sequence
    # [S]: how many rows of `chosen` each sequence has: 0 inside its prompt, else 1 + its drafts (Part 16).
    chosen_counts: Ints
    # Log probabilities (Part 10). The fields are () if no request of the step asks for any.
    logprobs: Ints = ()  # [S] or (): how many likeliest tokens to score beside a chosen token, or UNSCORED
    prompt_logprobs: Ints = ()  # [S] or (): how many to score beside a token of the prompt, or UNSCORED
    prompt_rows: Ints = ()  # [N]: rows in which a token of the prompt is scored, sequence by sequence
    prompt_ids: Ints = ()  # [N]: the token that is scored in each of `prompt_rows`
    prompt_counts: Ints = ()  # [S] or (): how many of `prompt_rows` each sequence has


@dataclass(frozen=True, slots=True)
class Draws:
    """How the tokens of the R rows `Rows.chosen` are drawn (Part 5)."""

    rows: tuple[Draw, ...]  # [R]
    positions: Ints  # [R]: the index of each row's token in its request's output, from 0


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: no two steps are the same
class Batch:
    """One step: T new tokens of S sequences."""

    ids: tuple[str, ...]  # [S]: `Request.id` of each sequence
    token_ids: Ints  # [T]: PLACEHOLDER for a token that is still on the device
    positions: Ints  # [T]: the position of each token in its sequence, from 0
    query_start: Ints  # [S+1]: sequence s owns tokens query_start[s]:query_start[s+1]
    context_lens: Ints  # [S]: the tokens of each sequence in the cache after this step
    tables: np.ndarray  # [S, W]: the blocks (or the slot) of each sequence, in order; 0 past its last block
    slots: np.ndarray  # [T]: where each token's keys and values go: block · tokens per block + offset
    copies: tuple[Copy, ...]  # made before the step computes
    rows: Rows
    draws: Draws
    adapters: Ints  # [S]: the slot of each sequence's adapter, or NO_ADAPTER

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens that the step computes."""
        return len(self.token_ids)

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies drafts (Part 16). Only a sequence with drafts has several rows in
        `chosen`.
        """
        return max(self.rows.chosen_counts, default=0) > 1

    def num_new_tokens(self, s: int) -> int:
        """How many of the T tokens belong to sequence s."""
        return self.query_start[s + 1] - self.query_start[s]
