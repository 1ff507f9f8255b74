"""The kernels on a real GPU: `pytest -m gpu`."""

import pytest
import torch

from engine.attention.flash import sdpa_attention, takes_packed
from engine.attention.kernels import attention_kernel
from engine.cache.slots import SlotCache
from engine.decoding.params import SamplingParams
from engine.executor import Executor, ModelForward
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from tests.part06.fakes import run_to_end
from tests.part09.sequences import furthest, random_qkv, reference

pytestmark = [
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


@pytest.mark.parametrize("name", ["eager", "tiled", "sdpa", "triton"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 0.005), (torch.bfloat16, 0.04)]
)
@pytest.mark.parametrize("Dh", [32, 48, 64, 80, 96, 128])
@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 4), (6, 2)])
def test_long_packed_sequences(name, dtype, tolerance, Dh, Hq, Hkv):
    lengths = [(700, 700), (1, 900), (64, 65), (130, 400), (1, 1)]
    q, k, v, spans = random_qkv(lengths, Hq, Hkv, Dh, dtype=dtype, device="cuda")
    got = attention_kernel(name, Dh, "cuda", dtype)(q, k, v, spans)
    assert furthest(got, reference(q, k, v, spans)) <= tolerance


def test_the_packed_call_is_the_one_taken_in_16_bits():
    q, k, v, spans = random_qkv([(30, 30), (5, 90)], Dh=64, dtype=torch.bfloat16, device="cuda")
    assert takes_packed(q, k)
    assert furthest(sdpa_attention(q, k, v, spans), reference(q, k, v, spans)) <= 0.04


def told(tokenizer, device: str, name: str) -> dict[str, list[int]]:
    """Each prompt's tokens, all served together, the longest prompt in chunks."""
    model = load_model("storyteller", device=device, dtype="float32")
    cache = SlotCache(model.config, 3, device=device, kernel=attention_kernel(name, 64, device))
    scheduler = ContinuousScheduler(cache, max_num_seqs=3, max_num_batched_tokens=8)
    engine = LLMEngine(tokenizer, model.config, scheduler, Executor(ModelForward(model, cache)))
    for prompt, length in STORIES.items():
        engine.add_request(prompt, prompt, SamplingParams(temperature=0, max_tokens=length))
    return {name: output.outputs[0].token_ids for name, output in run_to_end(engine).items()}


@pytest.mark.parametrize("name", ["eager", "tiled", "sdpa", "triton"])
def test_a_gpu_tells_the_processors_stories(tokenizer, name):
    assert told(tokenizer, "cuda", name) == told(tokenizer, "cpu", "eager")


@pytest.mark.parametrize("name", ["sdpa", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_kernel_waits_for_the_gpu(tokenizer, name, dtype):
    model = load_model("storyteller", device="cuda", dtype=dtype)
    dtype = next(model.parameters()).dtype
    cache = SlotCache(
        model.config, 4, device="cuda", dtype=dtype, kernel=attention_kernel(name, 64, "cuda", dtype)
    )
    scheduler = ContinuousScheduler(cache, max_num_seqs=4, max_num_batched_tokens=8)
    engine = LLMEngine(tokenizer, model.config, scheduler, Executor(ModelForward(model, cache)))
    for prompt in STORIES:
        engine.add_request(prompt, prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    while engine.has_unfinished_requests():
        torch.cuda.set_sync_debug_mode("error")
        try:
            flight = engine.launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert flight.pending.__class__.__name__ == "Pending", flight.pending
        for output in engine.land(flight):
            assert output.error is None


def test_memory_does_not_grow_with_the_square_of_the_length():
    def peak(name: str, length: int) -> int:
        q, k, v, spans = random_qkv([(length, length)], 4, 4, 64, dtype=torch.bfloat16, device="cuda")
        kernel = attention_kernel(name, 64, "cuda", torch.bfloat16)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kernel(q, k, v, spans)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    for name in ("tiled", "sdpa", "triton"):
        assert peak(name, 4096) < 3 * peak(name, 2048), (
            f"{name}: twice the length, more than three times the memory"
        )
    assert peak("eager", 4096) > 3 * peak("eager", 2048)
