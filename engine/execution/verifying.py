"""Passes in which a sequence has several new tokens, as rows of a CUDA graph. Part 16.

A pass over n + 1 tokens of a sequence is n + 1 rows of a decode step: each row has its own token, position
and length, and all rows have the same block table. Part 13's graphs can compute such a pass if each row
attends to the earlier rows of its sequence in the same pass. `ModelStep` does so, since it stores the keys
and values of all rows before any row attends. GPT-2's kernel stores and attends at once, so `VerifyRows` has
another kernel, which also reads the new keys and values of earlier rows.

The target model's passes without drafts keep Part 13's graphs, since rows that see one another take longer.
"""

from torch import Tensor

from engine.cache.memory import PageMemory
from engine.execution.graphs import StepOf, fastest_steps
from engine.kernels.many_rows import ManyRows
from engine.kernels.verify_attend import VerifyAttend
from engine.models.gpt2 import Model as GPT2
from engine.models.language_model import LanguageModel

MAX_GRAPH_ROWS = 256  # rows of the largest graph, unless there are more sequences than that


def num_rows(max_num_seqs: int, max_new_tokens: int, max_num_batched_tokens: int) -> int:
    """The number of rows of the largest graph, for sequences with up to `max_new_tokens` new tokens each: at
    least one row for each sequence, and no more rows than a step may have tokens.
    """
    rows = min(MAX_GRAPH_ROWS, max_num_seqs * max_new_tokens)  # enough for most steps
    rows = max(rows, max_num_seqs)
    return min(rows, max_num_batched_tokens)


class VerifyRows(ManyRows):
    """GPT-2's forward pass of R ≤ max_rows rows, of which several may belong to one sequence: a row sees the
    earlier ones of its sequence.
    """

    def __init__(self, model: GPT2, keys: list[Tensor], values: list[Tensor], max_rows: int) -> None:
        super().__init__(model, keys, values, max_rows)
        config = self.config
        self.attend = VerifyAttend(config.num_heads, config.head_dim, self.x.device, max_rows)


def verifying_steps(model: LanguageModel, memory: PageMemory, max_rows: int) -> StepOf:
    """As `fastest_steps` in graphs.py, for passes in which a row sees the earlier rows of its sequence."""
    return fastest_steps(model, memory, max_rows, many_rows_class=VerifyRows)
