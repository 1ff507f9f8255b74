"""Ranks compute each step the same way: in the rows of a graph, though none is recorded here, or in the
model's own pass.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from benchmarks.part20_models import random_model
from engine import LLM, SamplingParams
from engine.cache.memory import PageMemory
from engine.execution.graphs import GraphWay
from engine.execution.steps import fastest_steps, verifying_steps
from engine.kernels.llama_prompts import LlamaPrompts
from engine.kernels.llama_rows import LlamaRows
from engine.kernels.single_row import SingleRow
from engine.layers.packed_linear import Transposed
from engine.models.loader import load_model
from engine.parallel.layers import sum_over_ranks
from engine.parallel.shards import Shards
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
def test_tokens_of_one_device(case, tmp_path, orders_are_read, forked_ranks):
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


class Turns:
    """The groups of two ranks in one process, whose passes run by turns: Triton's interpreter is for one."""

    def __init__(self) -> None:
        self.turn, self.met = threading.Lock(), threading.Barrier(2, timeout=120)
        self.terms: list = [None, None]

    def run(self, passes) -> list:
        """What each pass returns. A pass is called with its rank's sum."""
        with ThreadPoolExecutor(2) as pool:
            return [told.result() for told in [pool.submit(self._run, *item) for item in enumerate(passes)]]

    def _run(self, rank: int, compute):
        with self.turn, torch.inference_mode():
            return compute(partial(self.sum, rank))

    def sum(self, rank: int, x):
        self.terms[rank] = x.clone()
        self.turn.release()
        self.met.wait()
        total = self.terms[0] + self.terms[1]
        self.met.wait()
        self.turn.acquire()
        return x.copy_(total)


@pytest.fixture(params=["llama", "qwen3"])
def models(request, tmp_path):
    """A whole model, and the two ranks' parts of it, with layers that are not packed."""
    heads = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    folder = reference.save(random_model(request.param, vocab_size=96, **heads), tmp_path)
    whole, parts = load_model(folder, "cpu", "float32"), []
    for rank in range(2):
        part = load_model(folder, "cpu", "float32", sharding=Shards(rank, 2))
        parts.append(sum_over_ranks(part, SimpleNamespace(rank=rank, all_reduce_sum=None)))
    return whole, parts


@pytest.mark.parametrize("make", [fastest_steps, verifying_steps])
def test_the_kernels_of_a_decode_step_sum_behind_both_layers(models, make):
    """Logits are rank 0's alone; each rank stores the keys of its own head."""
    whole, parts = models
    inputs = [torch.tensor(row, dtype=torch.int32) for row in ([5, 60], [0, 0], [16, 32])]
    tables, lens = torch.tensor([[1], [2]], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)

    def decode(model, sum_parts):
        memory = PageMemory(model.config, 4, 16, device=torch.device("cpu"), dtype=torch.float32)
        step = make(model, memory, 2, sum_parts)(2)
        assert isinstance(step, LlamaRows)
        return step(*inputs, tables, lens).clone(), torch.stack(list(memory.keys))

    with torch.inference_mode():
        logits, keys = decode(whole, None)
    (first, first_keys), (second, second_keys) = Turns().run([partial(decode, part) for part in parts])
    torch.testing.assert_close(first, logits)
    assert second.shape == (2, 0)
    torch.testing.assert_close(torch.cat([first_keys, second_keys], -2), keys)


def test_the_kernels_of_a_prompt_sum_behind_both_layers(models):
    whole, parts = models
    token_ids, positions = torch.tensor([5, 60, 7]), torch.arange(3)

    def attend(layer, q, k, v):
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def prompt(model, sum_parts):
        return LlamaPrompts(model, sum_parts)(token_ids, positions, attend)

    with torch.inference_mode():
        want = whole(token_ids, positions, attend)
    for told in Turns().run([partial(prompt, part) for part in parts]):
        torch.testing.assert_close(told, want)


def test_kernels_that_know_no_sum_do_not_take_a_part(models, tmp_path):
    """They would compute with one rank's terms, and nobody would see it."""
    _, (part, _) = models
    assert LlamaRows.fits(part, is_part=True)
    assert not LlamaRows.fits(part)
    for packed in ("blocks.1.mlp.down.inner", "head"):  # a copy of the layer as pack_linears leaves it
        changed = copy.deepcopy(part)
        changed.set_submodule(packed, Transposed(changed.get_submodule(packed)))
        assert not LlamaRows.fits(changed, is_part=True)
    gpt2 = reference.save(reference.random_gpt2(n_embd=64, n_head=4), tmp_path / "gpt2")
    whole, cut = (load_model(gpt2, "cpu", "float32", sharding=s) for s in (None, Shards(0, 2)))
    assert SingleRow.fits(whole)
    assert not SingleRow.fits(sum_over_ranks(cut, SimpleNamespace(rank=0, all_reduce_sum=None)))
