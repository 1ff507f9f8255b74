"""The kernels on a real GPU: `pytest -m gpu`."""

import pytest
import torch

from engine.attention.flash import sdpa_attention, supports_varlen
from engine.decoding.params import SamplingParams
from engine.wiring.attention_kernel import attention_kernel
from tests.part08.on_a_gpu import (
    STORIES,
    full_precision,  # noqa: F401
    on_a_gpu,
    run_without_waiting,
    storyteller_engine,
    told,
)
from tests.part09.sequences import furthest, random_qkv, reference

pytestmark = on_a_gpu


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
    assert supports_varlen(q, k)
    assert furthest(sdpa_attention(q, k, v, spans), reference(q, k, v, spans)) <= 0.04


@pytest.mark.parametrize("name", ["eager", "tiled", "sdpa", "triton"])
def test_a_gpu_tells_the_processors_stories(tokenizer, name):
    assert told(tokenizer, "cuda", attention_kernel(name, 64, "cuda")) == told(tokenizer, "cpu")


@pytest.mark.parametrize("name", ["sdpa", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_kernel_waits_for_the_gpu(tokenizer, name, dtype):
    kernel = attention_kernel(name, 64, "cuda", getattr(torch, dtype))
    engine = storyteller_engine(tokenizer, "cuda", dtype, seats=4, kernel=kernel)
    for prompt in STORIES:
        engine.add_request(prompt, prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    run_without_waiting(engine)


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
