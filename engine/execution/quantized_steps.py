"""The decode steps of models whose weights may be quantized, for CUDA graphs (Part 13). Part 17.

A single row of a quantized GPT-2 is computed by a chain of few kernels; other steps are those of Part 13.
Needs the package triton.
"""

from engine.cache.memory import PageMemory
from engine.execution import graphs
from engine.models.language_model import LanguageModel
from engine.quantization.single_row import QuantizedSingleRow


def fastest_steps(model: LanguageModel, memory: PageMemory, max_rows: int) -> graphs.StepOf:
    """A function that gives the step for a number of rows from 1 to `max_rows`. For `DecodeGraphs`.

    The steps read and write `keys` and `values` of `memory`, which have [B, P, Hkv, Dh] for each layer.
    """
    many_rows = graphs.fastest_steps(model, memory, max_rows)
    if not QuantizedSingleRow.fits(model):
        return many_rows
    single_row = QuantizedSingleRow(model, list(memory.keys), list(memory.values))
    return lambda rows: single_row if rows == 1 else many_rows(rows)
