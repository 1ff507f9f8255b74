"""Passes that verify, and passes that propose, as CUDA graphs. Part 16.

A pass of n + 1 tokens of a sequence is n + 1 rows of a decode step: each row has its own token, place and
length, and all the same block table. So Part 13's graphs serve, if a row sees the rows above it, which are
stored in the same pass. `ModelStep` stores all rows before any attends; for GPT-2 so does `VerifyRows`.

Promises the logits of `ModelForward` up to rounding. A pass of more than so many rows, or with a long piece
of somebody's prompt, goes the usual way.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.ahead import AheadForward, LastTokens
from engine.batch import Batch
from engine.cache.paged import PagedCache
from engine.device import on_device
from engine.graphs import DecodeGraphs, ModelStep, Step
from engine.kernels.many_rows import ManyRows
from engine.kernels.single_row import SingleRow
from engine.kernels.verify_attend import MOST_NEW, VerifyAttend
from engine.speculation.config import MOST_TOKENS

MOST_ROWS = 256  # of a pass that is a graph, if there are no more sequences than that

MakeSteps = Callable[[nn.Module, PagedCache, int], Callable[[int], Step]]


def num_rows(max_num_seqs: int, new: int, max_num_batched_tokens: int) -> int:
    """Rows of the largest graph, for sequences with up to `new` tokens each: one token of each is there."""
    return min(max_num_batched_tokens, max(max_num_seqs, min(MOST_ROWS, max_num_seqs * new)))


class VerifyRows(ManyRows):
    """GPT-2's forward pass of S ≤ max_rows tokens, of which several may be one sequence's."""

    def __init__(self, model: nn.Module, keys: list[Tensor], values: list[Tensor], max_rows: int) -> None:
        super().__init__(model, keys, values, max_rows)
        config = self.config
        self.attend = VerifyAttend(config.num_heads, config.head_dim, self.x.device, max_rows)


def steps(model: nn.Module, cache: PagedCache, max_rows: int) -> Callable[[int], Step]:
    """How a pass of so many rows is computed: by the fastest way that fits the model, and in which rows of a
    sequence see one another. One row has no neighbours.
    """
    memory = list(cache.keys), list(cache.values)
    if not SingleRow.fits(model):
        step = ModelStep(model, *memory)
        return lambda rows: step
    one, many = SingleRow(model, *memory), VerifyRows(model, *memory, max_rows)
    return lambda rows: one if rows == 1 else many


class RowsForward(AheadForward):
    """Batch -> logits[R, V], by a graph if it has few tokens, whosever they are."""

    def __init__(
        self, model: nn.Module, cache: PagedCache, max_rows: int, max_model_len: int, capture: bool,
        make_steps: MakeSteps = steps,
    ) -> None:  # fmt: skip
        """`make_steps`: how a pass is computed, by its rows; a later part knows more models."""
        device = next(model.parameters()).device
        super().__init__(model, cache, LastTokens(max_rows, device))
        self._V = model.config.vocab_size
        width = cache.num_blocks_for(max_model_len)
        step = make_steps(model, cache, max_rows)
        chain = MOST_TOKENS + 1  # passes of a draft model that follow one another before the host waits
        self.graphs = DecodeGraphs(step, self.last, self._V, max_rows, width, capture, in_flight=chain)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        T = batch.num_tokens
        most_new = max(map(batch.num_new_tokens, range(len(batch.requests))))
        if self.graphs.sizes[-1] < T or most_new > MOST_NEW:
            return super().__call__(batch)
        logits = self.graphs(batch, self.cache)[:, : self._V]  # [T, V]
        rows = [row for own in batch.logit_rows for row in own]
        return logits if len(rows) == T else logits[on_device(self.device, rows)[0]]
