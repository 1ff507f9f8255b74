"""What tests on a GPU share: when they run, in which precision, and engines whose steps wait for nothing."""

import pytest
import torch

from engine.attention.dense import dense_attention
from engine.attention.interface import VarlenKernel
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from tests.part06.fakes import assert_idle, run_to_end

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
STORIES = {"Once upon a time, in a": 40, "The": 25, "Tom and Lily went to the park. They saw": 60, "A": 3}


@pytest.fixture(autouse=True)
def full_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def storyteller_engine(
    tokenizer, device: str, dtype: str = "float32", seats: int = 3, kernel: VarlenKernel = dense_attention
) -> LLMEngine:
    """Continuous batching of `seats` requests, in steps of 8 tokens: longer prompts come in chunks."""
    model = load_model("storyteller", device=device, dtype=dtype)
    memory = SlotMemory(model.config, seats, device=device, dtype=getattr(torch, dtype), kernel=kernel)
    scheduler = ContinuousScheduler(memory.plan(), max_num_seqs=seats, max_num_batched_tokens=8)
    return LLMEngine(tokenizer, model.config, scheduler, ModelRunner([EagerWay(model, memory)], memory))


def told(
    tokenizer, device: str, kernel: VarlenKernel = dense_attention, temperature: float = 0
) -> dict[str, list[int]]:
    """Each story's tokens, all served together."""
    engine = storyteller_engine(tokenizer, device, kernel=kernel)
    for prompt, length in STORIES.items():
        params = SamplingParams(temperature=temperature, seed=1, top_p=0.9, max_tokens=length)
        engine.add_request(prompt, prompt, params)
    outputs = run_to_end(engine)
    assert_idle(engine)
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


def run_without_waiting(engine: LLMEngine) -> None:
    """To the end, where launching a step raises if anything in it waits for the GPU."""
    while engine.has_unfinished_requests():
        torch.cuda.set_sync_debug_mode("error")
        try:
            step = engine.launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert step.error is None
        for output in engine.land(step):
            assert output.error is None
