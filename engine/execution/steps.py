"""How a step of so many rows is computed, by the model's family. Part 20.

Promises the fastest way there is: few kernels for Llama and Qwen3 (engine/kernels/llama_rows.py), for GPT-2
those of Parts 13 and 17, for any other model its own forward pass. Needs the package triton.
"""

from engine.cache.memory import PageMemory
from engine.execution import quantized_steps, verifying
from engine.execution.graphs import StepOf
from engine.kernels.llama_row import LlamaRow
from engine.kernels.llama_rows import LlamaRows
from engine.models.language_model import LanguageModel
from engine.models.llama import Model as Llama


def steps(model: LanguageModel, memory: PageMemory, max_rows: int) -> StepOf:
    """How a step of so many rows is computed, up to `max_rows`; each row is another sequence's. For
    `DecodeGraphs`.

    Of `memory` it takes `keys` and `values` by layer: [B, P, Hkv, Dh].
    """
    if not LlamaRows.fits(model):
        return quantized_steps.steps(model, memory, max_rows)
    return _llama_steps(model, memory, max_rows, stores_first=False)


def verifying_steps(model: LanguageModel, memory: PageMemory, max_rows: int) -> StepOf:
    """The same for passes with several tokens of a sequence (Part 16): a row sees those above it."""
    if not LlamaRows.fits(model):
        return verifying.verifying_steps(model, memory, max_rows)
    return _llama_steps(model, memory, max_rows, stores_first=True)


def _llama_steps(model: Llama, memory: PageMemory, max_rows: int, stores_first: bool) -> StepOf:
    keys, values = list(memory.keys), list(memory.values)
    many_rows = LlamaRows(model, keys, values, max_rows, stores_first)
    single_row = LlamaRow(model, keys, values) if LlamaRow.fits(model) else many_rows
    return lambda rows: single_row if rows == 1 else many_rows
