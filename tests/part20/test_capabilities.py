"""What Parts 3 to 16 brought works on Llama and Qwen3 as it is: none of it knows an architecture.

Kernels, caches, graphs and one step ahead, in pairs: tests/system/test_pairwise.py.
"""

import json

import pytest
import torch

from benchmarks.part20_models import random_model
from engine import LLM, SamplingParams, run_prefill
from engine.cache.single import CachedForward
from engine.models.loader import load_model
from engine.speculation.measuring import ALWAYS_DRAFT
from tests.part01 import reference

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9], [3, 1, 4, 1, 5, 9, 2, 6]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**21}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request, tmp_path_factory):
    """A folder, Hugging Face's model, and what that says to each prompt."""
    theirs = random_model(request.param, seed=3)
    folder = reference.save(theirs, tmp_path_factory.mktemp(request.param), tokenizer=True)
    told = [reference.generate(theirs, ids, max_new_tokens=12, eos_token_id=None) for ids in PROMPTS]
    return folder, theirs, told


def asked(**options) -> list[dict]:
    return [{"prompt_token_ids": ids} | options for ids in PROMPTS]


def test_a_cache_of_one_sequence(model):
    folder, _, told = model
    forward, ids = CachedForward(load_model(folder)), list(PROMPTS[0])
    for _ in range(12):
        ids.append(int(forward(ids).argmax()))
    assert ids[len(PROMPTS[0]) :] == told[0]


def test_prompts_packed_into_one_pass(model):
    folder, theirs, _ = model
    got = run_prefill(load_model(folder), PROMPTS)
    for row, ids in zip(got, PROMPTS, strict=True):
        torch.testing.assert_close(row, reference.logits(theirs, ids)[-1], atol=5e-5, rtol=0)


def test_log_probabilities_of_output_and_prompt(model):
    folder, theirs, told = model
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    outputs = LLM(folder, **OPTIONS).generate(asked(), params)
    for ids, tokens, output in zip(PROMPTS, told, outputs, strict=True):
        want = reference.logits(theirs, ids + tokens[:4]).log_softmax(-1)
        found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for place, scores in enumerate(found):
            id = (ids + tokens)[place + 1]
            assert scores[id].logprob == pytest.approx(float(want[place, id]), abs=1e-4)


@pytest.mark.parametrize("how", ["ngram", "a draft of the same family"])
def test_speculation_changes_no_token(model, how, tmp_path):
    folder, _, told = model
    config = {"method": "ngram", "num_speculative_tokens": 3, "step_times": ALWAYS_DRAFT.as_dict()}
    if how != "ngram":
        draft = random_model(
            json.loads((folder / "config.json").read_text())["model_type"], num_hidden_layers=1
        )
        config = config | {"method": None, "model": str(reference.save(draft, tmp_path))}
    llm = LLM(folder, speculative_config=config, **OPTIONS)
    assert [output.outputs[0].token_ids for output in llm.generate(asked(), GREEDY)] == told
    assert llm.engine.capabilities[0].tally.proposed > 0


def test_n_samples_of_one_prompt_share_its_pages(model):
    folder, _, _ = model
    llm = LLM(folder, block_size=4, **OPTIONS)
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate(asked()[:1], params)
    alone = [
        llm.generate(asked()[:1], SamplingParams(temperature=1.0, seed=7 + i, max_tokens=8, ignore_eos=True))[
            0
        ]
        for i in range(3)
    ]
    assert [one.token_ids for one in output.outputs] == [one.outputs[0].token_ids for one in alone]
    assert llm.engine.scheduler.cache.hit_tokens > 0


def test_random_weights_of_a_shape_need_no_file_of_weights(model, tmp_path):
    folder, _, _ = model
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    llm = LLM(tmp_path, load_format="dummy", **OPTIONS)
    (output, *_) = llm.generate(asked(), GREEDY)
    assert len(output.outputs[0].token_ids) == 12
    weights = dict(load_model(tmp_path, load_format="dummy").named_parameters())
    assert set(weights) == set(dict(load_model(folder).named_parameters()))
    assert all(weight.isfinite().all() for weight in weights.values())
