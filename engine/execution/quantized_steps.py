"""How a step of so many rows is computed, where weights may be codes. Part 17.

Promises Part 13's steps, and one row of a quantized GPT-2 by a chain of few kernels. Needs triton.
"""

from engine.cache.memory import PageMemory
from engine.execution import graphs
from engine.models.language_model import LanguageModel
from engine.quantization.single_row import QuantizedSingleRow


def steps(model: LanguageModel, memory: PageMemory, max_rows: int) -> graphs.StepOf:
    """How a step of so many rows is computed, up to `max_rows`. For `DecodeGraphs`.

    Of `memory` it takes `keys` and `values` by layer: [B, P, Hkv, Dh].
    """
    many_rows = graphs.steps(model, memory, max_rows)
    if not QuantizedSingleRow.fits(model):
        return many_rows
    single_row = QuantizedSingleRow(model, list(memory.keys), list(memory.values))
    return lambda rows: single_row if rows == 1 else many_rows(rows)
