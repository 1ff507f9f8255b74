"""The chain for one quantized row, in a real graph: `pytest -m gpu`."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.execution.graphs import DecodeGraphs, ModelStep
from engine.execution.last_tokens import LastTokens
from engine.execution.quantized_steps import fastest_steps
from engine.models.loader import load_model
from engine.quantization.quantize import pack_quantized, quantize
from engine.quantization.single_row import QuantizedSingleRow
from tests.part13.test_on_a_gpu import memory_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize(("dtype", "error"), [("float32", 2e-3), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_a_recorded_step_gives_the_logits_of_the_models_own_forward_pass(method, dtype, error):
    """‖logits - those‖ / ‖those‖, over 40 tokens, each with the one before in its cache."""
    model = load_model("storyteller", "cuda", dtype, transform=lambda m: pack_quantized(quantize(m, method)))
    sides = []
    for make in (fastest_steps, lambda m, memory, rows: lambda _: ModelStep(m, memory.keys, memory.values)):
        memory, last = memory_for(model), LastTokens(1, torch.device("cuda", 0))
        graphs = DecodeGraphs(make(model, memory, 1), last, model.config.vocab_size, 1, 8, capture=True)
        numbers = graphs._views(graphs._device_numbers, 1)
        replay, logits = graphs._graphs[1]
        found = []
        for position in range(40):
            given, source, at, slot, length, table = numbers
            given.fill_(11 * position + 5), source.fill_(-1), at.fill_(position)
            slot.fill_(16 + position), length.fill_(position + 1)
            table.copy_(torch.arange(1, 9, device="cuda", dtype=torch.int32)[None])
            replay()
            found.append(logits[0, : model.config.vocab_size].float().clone())
        sides.append(torch.stack(found))
    assert isinstance(fastest_steps(model, memory, 1)(1), QuantizedSingleRow)
    got, want = sides
    assert float((got - want).norm() / want.norm()) < error
