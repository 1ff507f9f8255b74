"""Ranks compute each step the same way: in the rows of a graph, though none is recorded here, or in the
model's own pass.
"""

import pytest

pytest.importorskip("triton", reason="needs the package triton")

from benchmarks.part20_models import random_model
from engine import LLM, SamplingParams
from engine.execution.graphs import GraphWay
from tests.part01 import reference
from tests.partA.test_equal import NGRAM, asked, ids

OPTIONS = {
    "device": "cpu", "dtype": "float32", "attention": "triton", "max_num_seqs": 2,
    "max_num_batched_tokens": 12, "kv_cache_memory_bytes": 2**19, "max_model_len": 48,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 5, 6, 7], [3]]
CASES = {
    "llama, drafts": ("llama", {"speculative_config": NGRAM}),
    "qwen3, ahead": ("qwen3", {"async_scheduling": True}),
    "gpt2, ahead": ("gpt2", {"async_scheduling": True}),
}


def checkpoint(family: str, folder):
    if family == "gpt2":
        shape = {"n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 4096, "n_positions": 64}
        return reference.save(reference.random_gpt2(**shape), folder, tokenizer=True)
    heads = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return reference.save(random_model(family, **heads), folder, tokenizer=True)


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_one_device(case, tmp_path, orders_are_read):
    """Greedy; and seeded, with scores of the prompt, which no graph computes: the other rank is told so."""
    family, options = CASES[case]
    folder, seen, used = checkpoint(family, tmp_path), [], set()
    for size in (1, 2):
        llm = LLM(folder, **OPTIONS | options, tensor_parallel_size=size)
        runner = llm.engine.executor if size == 1 else llm.engine.executor.runner
        submit = runner.way_number

        def way_number(batch, submit=submit):
            used.add(number := submit(batch))
            return number

        runner.way_number = way_number
        answers = []
        for params in (
            SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
            SamplingParams(temperature=1, seed=4, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
        ):
            answers.append(ids(llm.generate(asked(PROMPTS), params, use_tqdm=False)))
        ways = list(runner.ways)
        seen.append(answers)
        llm.shutdown()
    assert seen[1] == seen[0]
    assert used == set(range(len(ways))), "a way is not tried"
    assert isinstance(ways[0], GraphWay)
