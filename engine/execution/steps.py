"""The fastest decode steps for each family of models, for CUDA graphs (Part 13). Part 20.

Llama and Qwen3 have chains of few kernels (engine/kernels/llama_rows.py), GPT-2 has those of Parts 13 and 17,
and any other model runs its own forward pass. Needs the package triton.
"""

from engine.cache.memory import PageMemory
from engine.execution import quantized_steps, verifying
from engine.execution.graphs import StepOf
from engine.kernels.llama_row import LlamaRow
from engine.kernels.llama_rows import LlamaRows, SumParts
from engine.models.language_model import LanguageModel
from engine.models.llama import Model as Llama


def fastest_steps(
    model: LanguageModel, memory: PageMemory, max_rows: int, sum_parts: SumParts | None = None
) -> StepOf:
    """A function that gives the step for a number of rows from 1 to `max_rows`, each of another sequence. For
    `DecodeGraphs`.

    The steps read and write `keys` and `values` of `memory`, which have [B, P, Hkv, Dh] for each layer.
    `sum_parts`: None if the model is whole; for a rank's part (Extension A), the sum over the ranks.
    """
    if not LlamaRows.fits(model, is_part=sum_parts is not None):
        return quantized_steps.fastest_steps(model, memory, max_rows)
    return _llama_steps(model, memory, max_rows, sum_parts, stores_first=False)


def verifying_steps(
    model: LanguageModel, memory: PageMemory, max_rows: int, sum_parts: SumParts | None = None
) -> StepOf:
    """As `fastest_steps`, for passes in which a row sees the earlier rows of its sequence (Part 16)."""
    if not LlamaRows.fits(model, is_part=sum_parts is not None):
        return verifying.verifying_steps(model, memory, max_rows)
    return _llama_steps(model, memory, max_rows, sum_parts, stores_first=True)


def _llama_steps(
    model: Llama, memory: PageMemory, max_rows: int, sum_parts: SumParts | None, stores_first: bool
) -> StepOf:
    """The steps of a Llama or a Qwen3. With `stores_first`, the keys and values of all rows are stored before
    any row attends, so a row sees the earlier rows of its sequence.
    """
    keys, values = list(memory.keys), list(memory.values)
    many_rows = LlamaRows(model, keys, values, max_rows, stores_first, sum_parts)
    if sum_parts is not None or not LlamaRow.fits(model):  # LlamaRow adds a product to the residual at once
        return lambda rows: many_rows
    single_row = LlamaRow(model, keys, values)
    return lambda rows: single_row if rows == 1 else many_rows
