"""Two ranks on GPUs give the tokens of one: with NCCL on two GPUs, and with gloo where they share one."""

import subprocess
import sys

import pytest
import torch

from engine import LLM, SamplingParams
from engine.wiring import many_devices
from tests.partA.test_equal import DRAFT, NGRAM, asked, checkpoint, ids
from tests.partA.test_failing import ENVIRONMENT, ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
OPTIONS = {
    "device": "cuda",
    "dtype": "float32",
    "max_num_batched_tokens": 32,
    "max_num_seqs": 6,
    "kv_cache_memory_bytes": 2**24,
}
CASES = {
    "llama": ("llama", {}),  # with biases: the model's own forward pass
    "qwen3, drafts by n-grams": ("qwen3", {"speculative_config": NGRAM}),
    "gpt2, a draft model, not ahead": ("gpt2", {"speculative_config": DRAFT, "async_scheduling": False}),
    "llama, int8": ("llama", {"quantization": "int8"}),
    "qwen3, swapped": ("qwen3", {"kv_cache_memory_bytes": 2**19, "swap_space": 0.1}),
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=3, n=2, max_tokens=24, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=1)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def tokens(folder, size: int, **options) -> list:
    """Of requests of each kind; the engine is shut down."""
    llm = LLM(folder, tensor_parallel_size=size, **OPTIONS | options)
    told = [ids(llm.generate(asked(), p, use_tqdm=False)) for p in (GREEDY, SEEDED, SCORED)]
    if size > 1 and not options.get("enforce_eager"):
        assert llm.engine.executor.runner.ways[0].graphs._graphs, "no graph was recorded"
    llm.shutdown()
    return told


@two_gpus
@pytest.mark.parametrize("how", ["eager", "graphs"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_of_one_device(case, how, tmp_path):
    """The same way on both sides: a step ahead unless the case says otherwise."""
    family, options = CASES[case]
    options, folder = options | {"enforce_eager": how == "eager"}, checkpoint(family, tmp_path)
    assert tokens(folder, 2, **options) == tokens(folder, 1, **options)


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_one_device_where_ranks_share_it(case, monkeypatch, tmp_path):
    """Sums go by gloo, through the host, which no graph records."""
    monkeypatch.setattr(many_devices, "_device_names", lambda args: ["cuda:0"] * args.tensor_parallel_size)
    family, options = CASES[case]
    options, folder = options | {"enforce_eager": True}, checkpoint(family, tmp_path)
    assert tokens(folder, 2, **options) == tokens(folder, 1, **options)


KILLED = """
import os, signal, sys, time
from engine import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM("storyteller", tensor_parallel_size=2, enforce_eager=sys.argv[1] == "eager")
    stream = llm.stream("Once", SamplingParams(temperature=0, max_tokens=900, ignore_eos=True))
    next(stream)
    os.kill(llm.engine.executor.workers.workers[0].process.pid, signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in stream:
            pass
    except BaseException as error:
        print(type(error).__name__, time.monotonic() - start < 10, error, flush=True)
    llm.shutdown()
    print("shut down", time.monotonic() - start < 40, flush=True)
"""


@two_gpus
@pytest.mark.parametrize("how", ["eager", "graphs"])
def test_a_rank_that_is_killed_in_a_step(how):
    """The device of rank 0 waits in a sum for ever. Its process does not."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, how],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.startswith("RankLost True rank 1 (process"), (done.stdout, done.stderr[-2000:])
    assert "shut down True" in done.stdout, (done.stdout, done.stderr[-2000:])
