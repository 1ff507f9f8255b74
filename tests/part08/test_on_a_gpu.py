"""The same engine with its model and its cache on a GPU: `pytest -m gpu`."""

import pytest
import torch

from engine.cache.slots import SlotCache
from engine.decoding.params import SamplingParams
from engine.executor import Executor, ModelForward
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from tests.part06.fakes import assert_idle, run_to_end

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
STORIES = {"Once upon a time, in a": 40, "The": 25, "Tom and Lily went to the park. They saw": 60, "A": 3}


def told(tokenizer, device: str, temperature: float) -> dict[str, list[int]]:
    """Each prompt's tokens, all served together, the longest prompt in chunks."""
    model = load_model("storyteller", device=device, dtype="float32")
    cache = SlotCache(model.config, 3, device=device)
    scheduler = ContinuousScheduler(cache, max_num_seqs=3, max_num_batched_tokens=8)
    engine = LLMEngine(tokenizer, model.config, scheduler, Executor(ModelForward(model, cache)))
    for prompt, length in STORIES.items():
        params = SamplingParams(temperature=temperature, seed=1, top_p=0.9, max_tokens=length)
        engine.add_request(prompt, prompt, params)
    outputs = run_to_end(engine)
    assert_idle(engine)
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


@pytest.fixture(autouse=True)
def full_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_gpu_tells_the_processors_stories(tokenizer, temperature):
    assert told(tokenizer, "cuda", temperature) == told(tokenizer, "cpu", temperature)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(seed=1, top_k=20, top_p=0.9, min_p=0.01, max_tokens=12, ignore_eos=True),
        SamplingParams(seed=1, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=9, max_tokens=12),
    ],
    ids=["greedy", "fences", "penalties"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_waits_for_the_gpu_once_when_its_tokens_are_read(tokenizer, params, dtype):
    """Launching a step of chunks, of decoding, or of both raises if anything in it waits."""
    model = load_model("storyteller", device="cuda", dtype=dtype)
    cache = SlotCache(model.config, 4, device="cuda", dtype=next(model.parameters()).dtype)
    scheduler = ContinuousScheduler(cache, max_num_seqs=4, max_num_batched_tokens=8)
    engine = LLMEngine(tokenizer, model.config, scheduler, Executor(ModelForward(model, cache)))
    for prompt in STORIES:
        engine.add_request(prompt, prompt, params)
    while engine.has_unfinished_requests():
        torch.cuda.set_sync_debug_mode("error")
        try:
            flight = engine.launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert flight.pending.__class__.__name__ == "Pending", flight.pending
        for output in engine.land(flight):
            assert output.error is None
