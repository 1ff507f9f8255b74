"""The sizes of a device's memory and tables, and the check that a step's record stays within them. Part 20.

A record from a file may have any numbers. One that passes `wire.py` and `Bounds` reads and writes no memory
but its device's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.decoding.sampling_state import Draw
from engine.requests.batch import NO_ADAPTER, PLACEHOLDER, UNSCORED, Batch


@dataclass(frozen=True, slots=True)
class Bounds:
    """The sizes of a device's memory and tables. A record beyond these bounds would read other memory."""

    vocab_size: int
    max_positions: int  # tokens of the longest sequence
    num_blocks: int  # or slots
    block_size: int  # tokens
    num_swap_blocks: int
    num_adapters: int
    num_seqs: int  # sequences in a step
    num_tokens: int | None  # tokens in a step; None for no other limit than that of the sequences
    has_last_tokens: bool  # whether records may have placeholders for tokens of the step before

    def check(self, batch: Batch) -> None:
        """Raise ValueError if a number of the record is out of bounds. The message names the field, or
        what is counted.
        """
        rows, V = batch.rows, self.vocab_size
        _within("sequences", [len(batch.ids)], self.num_seqs + 1)
        if self.num_tokens is not None:
            _within("tokens", [batch.num_tokens], self.num_tokens + 1)
        _within("context_lens", batch.context_lens, self.max_positions + 1)
        _within("token_ids", batch.token_ids, V, start=PLACEHOLDER if self.has_last_tokens else 0)
        _within("rows.prompt_ids", rows.prompt_ids, V)
        _within("rows.logprobs", rows.logprobs + rows.prompt_logprobs, V, start=UNSCORED)
        for row in batch.draws.rows:
            self._check_draw(row)
        _within("adapters", batch.adapters, self.num_adapters, start=NO_ADAPTER)
        _within("tables", batch.tables, self.num_blocks)
        for copy in batch.copies:
            num_sources = self.num_swap_blocks if copy.kind == "in" else self.num_blocks
            num_targets = self.num_swap_blocks if copy.kind == "out" else self.num_blocks
            _within("copies", copy.source, num_sources)
            _within("copies", copy.target, num_targets)
        self._check_places(batch)

    def _check_draw(self, row: Draw) -> None:
        """Raise ValueError if a token, or the length of the mask, is out of bounds."""
        V = self.vocab_size
        _within("draws.stop_ids", row.stop_ids, V)
        _within("draws.bad_ids", row.bad_ids, V)
        if row.mask is not None:
            num_words = -(-V // 32)  # of 32 bits, rounded up: the mask has a bit for each token
            _within("draws.mask", [len(row.mask)], num_words + 1)
        if row.tokens is not None:
            _within("draws.tokens", row.tokens, V)

    def _check_places(self, batch: Batch) -> None:
        """Raise ValueError if the tables have more or fewer blocks than the tokens need, or if the slot of a
        new token is not in its block.
        """
        tables, P = batch.tables, self.block_size
        longest, S = max(batch.context_lens), len(batch.ids)
        width = -(-longest // P)  # blocks, rounded up
        if tables.shape[1] != width:
            raise ValueError(f"tables: {tables.shape[1]} blocks each, for up to {longest} tokens")
        sequence = np.repeat(np.arange(S), np.diff(batch.query_start))  # [T]: the sequence of each token
        block, offset = np.divmod(batch.positions, P)  # [T] each
        if (batch.slots != tables[sequence, block] * P + offset).any():
            raise ValueError("slots: the slots of the new tokens in their blocks are expected")


def _within(name: str, values: Sequence[int] | np.ndarray, end: int, start: int = 0) -> None:
    """Raise ValueError if a value is not in range(start, end)."""
    numbers = np.asarray(values, dtype=np.int64)
    outside = numbers[(numbers < start) | (numbers >= end)]
    if outside.size:
        raise ValueError(f"{name}: {outside[0]}, where {start} to {end - 1} are expected")
