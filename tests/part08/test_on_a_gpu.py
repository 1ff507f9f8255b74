"""The same engine with its model and its cache on a GPU: `pytest -m gpu`."""

import pytest

from engine.decoding.params import SamplingParams
from tests.part08.on_a_gpu import (
    STORIES,
    full_precision,  # noqa: F401
    on_a_gpu,
    run_without_waiting,
    storyteller_engine,
    told,
)

pytestmark = on_a_gpu


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_gpu_tells_the_processors_stories(tokenizer, temperature):
    assert told(tokenizer, "cuda", temperature=temperature) == told(tokenizer, "cpu", temperature=temperature)


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
    """Steps of chunks, of decoding, and of both."""
    engine = storyteller_engine(tokenizer, "cuda", dtype, seats=4)
    for prompt in STORIES:
        engine.add_request(prompt, prompt, params)
    run_without_waiting(engine)
