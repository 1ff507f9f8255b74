"""Passes in which a sequence has several new tokens, as rows of a CUDA graph. Part 16.

A pass of n + 1 tokens of a sequence is n + 1 rows of a decode step: each row has its own token, place and
length, and all the same block table. So Part 13's graphs serve, if a row sees the rows above it, which are
stored in the same pass. `ModelStep` stores all rows before any attends; for GPT-2 so does `VerifyRows`.

A target's passes without drafts keep graphs of their own, those of Part 13: what lets rows see one another
takes time.
"""

from collections.abc import Callable

from torch import Tensor

from engine.cache.memory import PageMemory
from engine.execution.graphs import ModelStep, Step
from engine.kernels.many_rows import ManyRows
from engine.kernels.single_row import SingleRow
from engine.kernels.verify_attend import VerifyAttend
from engine.models.gpt2 import Model as GPT2
from engine.models.language_model import LanguageModel

MOST_ROWS = 256  # of a pass that is a graph, if there are no more sequences than that


def num_rows(max_num_seqs: int, new: int, max_num_batched_tokens: int) -> int:
    """Rows of the largest graph, for sequences with up to `new` tokens each: one token of each is there."""
    return min(max_num_batched_tokens, max(max_num_seqs, min(MOST_ROWS, max_num_seqs * new)))


class VerifyRows(ManyRows):
    """GPT-2's forward pass of S ≤ max_rows tokens, of which several may be one sequence's."""

    def __init__(self, model: GPT2, keys: list[Tensor], values: list[Tensor], max_rows: int) -> None:
        super().__init__(model, keys, values, max_rows)
        config = self.config
        self.attend = VerifyAttend(config.num_heads, config.head_dim, self.x.device, max_rows)


def verifying_steps(model: LanguageModel, memory: PageMemory, max_rows: int) -> Callable[[int], Step]:
    """How a pass of so many rows is computed: by the fastest way that fits the model, and in which rows of a
    sequence see one another. One row has no neighbours.
    """
    pages = list(memory.keys), list(memory.values)
    if not SingleRow.fits(model):
        step = ModelStep(model, *pages)
        return lambda rows: step
    one, many = SingleRow(model, *pages), VerifyRows(model, *pages, max_rows)
    return lambda rows: one if rows == 1 else many
