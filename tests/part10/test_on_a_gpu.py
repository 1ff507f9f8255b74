"""Scores on a GPU: the processor's, and waited for once a step: `pytest -m gpu`."""

import pytest

from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.scores import logprobs_of
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scored_rows import scored_rows
from tests.part08.on_a_gpu import full_precision, on_a_gpu, run_without_waiting  # noqa: F401
from tests.part10.scored import finish

pytestmark = on_a_gpu
TEXTS = ["Once upon a time, in a", "The", "Tom and Lily went to the park. They saw", "A cat"]


def make_engine(tokenizer, device: str, dtype: str = "float32") -> LLMEngine:
    """Continuous batching in small chunks; the first request is scored, the second quiet, and so on."""
    model = load_model("storyteller", device=device, dtype=dtype)
    memory = SlotMemory(model.config, 4, device=device, dtype=next(model.parameters()).dtype)
    scheduler = ContinuousScheduler(memory.plan(), 4, max_num_batched_tokens=8, select_rows=scored_rows)
    scores = logprobs_of(tokenizer, model.logits)
    runner = ModelRunner([EagerWay(model, memory)], memory, scores=scores)
    engine = LLMEngine(tokenizer, model.config, scheduler, runner, supports=SUPPORTS)
    for i, text in enumerate(TEXTS):
        asked = {} if i == 1 else {"logprobs": i, "prompt_logprobs": 5 - i}
        params = SamplingParams(temperature=i % 3 / 2, seed=1, max_tokens=12, ignore_eos=True, **asked)
        engine.add_request(text, text, params)
    return engine


def test_a_gpus_scores_are_the_processors(tokenizer):
    gpu, cpu = (finish(make_engine(tokenizer, device)) for device in ("cuda", "cpu"))
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
    run_without_waiting(make_engine(tokenizer, "cuda", dtype))
