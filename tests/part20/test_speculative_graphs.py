"""Passes with several tokens of a sequence in few kernels, for Llama and Qwen3, and through `LLM`."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from benchmarks.part20_models import random_model
from engine import LLM, SamplingParams
from engine.execution import verifying
from engine.execution.graphs import GraphWay
from engine.execution.steps import verifying_steps
from engine.kernels.llama_rows import LlamaRows
from tests.part01.reference import generate, save
from tests.part13.test_paged_attention import DEVICE
from tests.part16.test_speculative_graphs import made, memory_of

ALWAYS_DRAFT = {"sequences": [1], "drafts": [0, 1], "step_seconds": [[1.0, 1.0]]}  # as many drafts as may be
PROMPTS = [[5, 6, 7, 5, 6, 7, 9], [3]]
OPTIONS = {
    "device": DEVICE, "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 6,
    "kv_cache_memory_bytes": 2**19, "attention": "triton", "max_model_len": 32,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_speculation_in_graphs_changes_no_token(family, tmp_path):
    """The longer prompt comes in chunks; the draft is the target with noise, so some of its tokens stand."""
    heads = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    theirs = random_model(family, seed=3, num_hidden_layers=1, **heads)
    draft = copy.deepcopy(theirs)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    config = {
        "model": str(save(draft, tmp_path / "draft")),
        "num_speculative_tokens": 2,
        "step_times": ALWAYS_DRAFT,
    }
    llm = LLM(save(theirs, tmp_path / "target", tokenizer=True), speculative_config=config, **OPTIONS)
    speculation, *_ = llm.engine.capabilities
    for runner in (llm.engine.executor, speculation.proposer.runner):
        plain, drafts, _ = runner.ways
        assert isinstance(plain, GraphWay)
        assert isinstance(drafts.graphs.step_of(2), LlamaRows)
    asked = [{"prompt_token_ids": ids} for ids in PROMPTS]
    told = llm.generate(asked, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    want = [generate(theirs, ids, max_new_tokens=4, eos_token_id=None) for ids in PROMPTS]
    assert [output.outputs[0].token_ids for output in told] == want
    assert 0 < speculation.tally.accepted < speculation.tally.proposed


@pytest.mark.parametrize("option", [{"enforce_eager": True}, {"kv_cache": "slots"}, {"attention": "sdpa"}])
def test_passes_without_graphs(tiny_gpt2, option):
    config = {"method": "ngram", "num_speculative_tokens": 2, "step_times": ALWAYS_DRAFT}
    llm = LLM(tiny_gpt2, speculative_config=config, **OPTIONS | option)
    assert not any(isinstance(way, GraphWay) for way in llm.engine.executor.ways)


def test_graphs_have_rows_for_drafts(tiny_gpt2):
    config = {"method": "ngram", "num_speculative_tokens": 3, "step_times": ALWAYS_DRAFT}
    llm = LLM(tiny_gpt2, speculative_config=config, **OPTIONS | {"max_num_batched_tokens": 100})
    plain, drafts, _ = llm.engine.executor.ways
    assert (plain.graphs.sizes[-1], drafts.graphs.sizes[-1]) == (2, 2 * (3 + 1))


def test_other_models_are_run_as_in_part_16(tmp_path):
    other = made(tmp_path, activation_function="relu")
    ways = [make(other, memory_of(other), 4)(2) for make in (verifying_steps, verifying.verifying_steps)]
    assert type(ways[0]) is type(ways[1])
