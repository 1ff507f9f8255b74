"""Two ranks on GPUs give the tokens of one: with NCCL on two GPUs, and with gloo where they share one."""

import pytest
import torch

from engine import LLM, SamplingParams
from engine.wiring import many_devices
from tests.partA.test_equal import DRAFT, NGRAM, asked, checkpoint, ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
OPTIONS = {
    "device": "cuda",
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 6,
    "kv_cache_memory_bytes": 2**24,
}
CASES = {
    "llama": ("llama", {}),
    "qwen3, drafts by n-grams": ("qwen3", {"speculative_config": NGRAM}),
    "gpt2, a draft model, not ahead": ("gpt2", {"speculative_config": DRAFT, "async_scheduling": False}),
    "llama, int8": ("llama", {"quantization": "int8"}),
    "qwen3, swapped": ("qwen3", {"kv_cache_memory_bytes": 2**19, "swap_space": 0.1}),
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=3, n=2, max_tokens=24, ignore_eos=True)


@pytest.fixture(params=["nccl", "gloo"])
def places(request, monkeypatch):
    """Where the ranks are."""
    if request.param == "gloo":
        monkeypatch.setattr(many_devices, "_devices", lambda args: ["cuda:0"] * args.tensor_parallel_size)
    elif torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_one_device(case, places, tmp_path):
    family, options = CASES[case]
    folder, texts = checkpoint(family, tmp_path), []
    for size in (1, 2):
        llm = LLM(folder, tensor_parallel_size=size, **OPTIONS | options)
        texts.append([ids(llm.generate(asked(), p, use_tqdm=False)) for p in (GREEDY, SEEDED)])
        llm.shutdown()
    assert texts[1] == texts[0]
