"""Scores on a GPU: the processor's, and waited for once a step: `pytest -m gpu`."""

import pytest
import torch

from engine.cache.slots import SlotCache
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.executor import ModelForward
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scoring import ScoringExecutor
from tests.part10.scored import finish

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TEXTS = ["Once upon a time, in a", "The", "Tom and Lily went to the park. They saw", "A cat"]


def make_engine(tokenizer, device: str, dtype: str = "float32") -> LLMEngine:
    """Continuous batching in small chunks; the first request is scored, the second quiet, and so on."""
    model = load_model("storyteller", device=device, dtype=dtype)
    cache = SlotCache(model.config, 4, device=device, dtype=next(model.parameters()).dtype)
    scheduler = ContinuousScheduler(cache, max_num_seqs=4, max_num_batched_tokens=8)
    executor = ScoringExecutor(ModelForward(model, cache), tokenizer)
    engine = LLMEngine(tokenizer, model.config, scheduler, executor, supports=SUPPORTS)
    for i, text in enumerate(TEXTS):
        asked = {} if i == 1 else {"logprobs": i, "prompt_logprobs": 5 - i}
        params = SamplingParams(temperature=i % 3 / 2, seed=1, max_tokens=12, ignore_eos=True, **asked)
        engine.add_request(text, text, params)
    return engine


def test_a_gpus_scores_are_the_processors(tokenizer):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    gpu, cpu = (finish(make_engine(tokenizer, device)) for device in ("cuda", "cpu"))
    torch.set_float32_matmul_precision(before)
    for text in TEXTS:
        (mine,), (theirs,) = gpu[text].outputs, cpu[text].outputs
        assert mine.token_ids == theirs.token_ids
        for found, right in (
            (mine.logprobs or [], theirs.logprobs or []),
            ((gpu[text].prompt_logprobs or [])[1:], (cpu[text].prompt_logprobs or [])[1:]),
        ):
            assert len(found) == len(right)
            for own, other in zip(found, right, strict=True):
                assert own.logprob == pytest.approx(other.logprob, abs=1e-3)
                assert [p for _, p in own.top(9)] == pytest.approx([p for _, p in other.top(9)], abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_scores_waits_for_the_gpu_once(tokenizer, dtype):
    """Launching raises if anything in it waits."""
    engine = make_engine(tokenizer, "cuda", dtype)
    while engine.has_unfinished_requests():
        torch.cuda.set_sync_debug_mode("error")
        try:
            flight = engine.launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert flight.pending.__class__.__name__ in ("Pending", "ScoredPending"), flight.pending
        for output in engine.land(flight):
            assert output.error is None
