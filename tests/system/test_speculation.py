"""Speculation through `LLM` and `ruvon serve`."""

import itertools
import json
import re
from collections import Counter

import httpx
import pytest
import torch
from transformers import GPT2LMHeadModel

from engine import LLM, SamplingParams
from engine.ahead import AheadEngine
from engine.checkpoint import CheckpointError
from engine.decoding.sampling import SamplingState, distribution
from engine.speculation.lengths import Lengths
from tests.part16.mixed_steps import kinds_of
from tests.system.attack import Process

PROMPTS = ["Once upon a time", "The dog saw the cat. The dog saw the", "Lily"]
GREEDY = SamplingParams(temperature=0, max_tokens=30)
MODEL = {"model": "storyteller-draft", "num_speculative_tokens": 4}
FOUR = (5, 300, 1000, 2500)  # tokens
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture
def always(monkeypatch):
    """As many proposals as may be, whether they pay on this machine just now or not."""
    monkeypatch.setattr(Lengths, "choose", lambda self, ids, caps: [min(self.most, cap) for cap in caps])
    monkeypatch.setattr(Lengths, "asks", lambda self, people: True)


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return [output.outputs[0].text for output in LLM("storyteller").generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("config", [MODEL, NGRAM], ids=["model", "ngram"])
@pytest.mark.parametrize("kv_cache", ["paged", "slots"])
def test_greedy_text_is_the_same_with_and_without(always, plain, config, kv_cache):
    llm = LLM("storyteller", speculative_config=config, kv_cache=kv_cache)
    assert [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)] == plain
    again = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]  # prefixes are cached now
    assert again == plain
    assert llm.engine.executor.tally.proposed > 0
    assert not llm.engine.executor.lengths._accepted, "who has finished is forgotten"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"num_speculative_tokens": 17}, "1 to 16"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({}, "needs num_speculative_tokens"),
        ({"num_speculative_tokens": 2, "draft": "x"}, "'draft' is unknown"),
        ({"num_speculative_tokens": 2, "method": "eagle"}, "method='eagle'"),
        ({"num_speculative_tokens": 2, "method": "draft_model"}, "needs a model"),
        (NGRAM | {"model": "storyteller-draft"}, "no use for model"),
        (NGRAM | {"prompt_lookup_min": 5}, "prompt_lookup_min=5"),
        ([1], "a mapping"),
        (MODEL | {"model": ""}, "model=''"),
        (MODEL | {"model": "nowhere"}, "nowhere"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_name(config, words):
    with pytest.raises((ValueError, CheckpointError), match=re.escape(words)):
        LLM("storyteller", speculative_config=config)


@pytest.mark.parametrize("config", [MODEL | {"num_speculative_tokens": 2}, NGRAM], ids=["model", "ngram"])
def test_sampled_text_has_the_targets_distribution(always, tiny_gpt2, config, monkeypatch):
    """Chi-squared over the first three tokens, of which all but the first may have been drafts. A bias leaves
    four tokens to choose from. The expected shares are Hugging Face's logits under Part 5's knobs.
    """
    knobs = {"temperature": 1.3, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": dict.fromkeys(FOUR, 40)}
    # Nobody names a seed (that would give the plain sampler's text), and the engine's are these.
    seeds = itertools.count()
    monkeypatch.setattr("engine.llm_engine.new_seed", lambda params: next(seeds))
    params = [SamplingParams(**knobs, max_tokens=4)] * 800
    llm = LLM(tiny_gpt2, tokenizer="storyteller-draft", max_num_seqs=200, speculative_config=config)
    prompt = [*FOUR, 9, *FOUR[:3]]
    said = [out.outputs[0].token_ids[:3] for out in llm.generate([prompt] * len(params), params)]
    tally = llm.engine.executor.tally
    assert 0.1 < tally.accepted / tally.proposed < 0.95, "drafts stand, and drafts fall"

    share = {(): 1.0}  # of each beginning
    theirs = GPT2LMHeadModel.from_pretrained(tiny_gpt2).eval()
    for length in range(3):
        texts = [text for text in share if len(text) == length]
        with torch.no_grad():
            logits = theirs(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1]
        states = [SamplingState(params[0], prompt, text, 0) for text in texts]
        for text, row in zip(texts, distribution(logits, states).tolist(), strict=True):
            share |= {(*text, token): share[text] * row[token] for token in FOUR}
    counts = Counter(map(tuple, said))
    likely = {text: p * len(params) for text, p in share.items() if len(text) == 3 and p > 0}
    assert set(counts) <= set(likely), "a token outside of top-p was said"
    chi = sum((counts[text] - n) ** 2 / n for text, n in likely.items())
    freedom = len(likely) - 1
    assert freedom > 10
    # Wilson and Hilferty: passed by chance once in 10,000 times.
    critical = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi < critical, f"{chi:.0f} of at most {critical:.0f}: not the target's distribution"


@pytest.mark.parametrize("config", [MODEL, NGRAM], ids=["model", "ngram"])
def test_text_for_a_seed_is_the_one_without_drafts(config):
    """As many proposals as pay just now on this machine, and after other requests: never mind."""
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=7 + i, n=2, max_tokens=40) for i in range(3)]

    def told(llm: LLM) -> list[str]:
        return [sample.text for output in llm.generate(PROMPTS, params) for sample in output.outputs]

    want, llm = told(LLM("storyteller")), LLM("storyteller", speculative_config=config)
    assert [told(llm), told(llm)] == [want, want]


def test_target_and_draft_share_the_memory_and_the_dtype():
    budget = 100_000_000
    llm = LLM("storyteller", dtype="bfloat16", speculative_config=MODEL, kv_cache_memory_bytes=budget)
    executor = llm.engine.executor
    models = executor.inner.forward.model, executor.proposer.forward.model
    assert [next(model.parameters()).dtype for model in models] == [torch.bfloat16] * 2
    token = sum(model.config.kv_bytes_per_token(2) for model in models)
    for cache in (executor.cache.target, executor.cache.draft):
        assert cache.usage().tokens_total == budget // (16 * token) * 16, "each has room for the same tokens"
    llm = LLM("storyteller", speculative_config=MODEL, gpu_memory_utilization=0.5, max_num_seqs=1)
    caches = llm.engine.executor.cache.target, llm.engine.executor.cache.draft
    assert {cache.usage().tokens_total for cache in caches} == {1024}, "a share is for both"


@pytest.mark.parametrize("more", [-1, 1])
def test_a_draft_with_another_vocabulary_is_refused(tiny_gpt2, tmp_path, more):
    raw = json.loads((tiny_gpt2 / "config.json").read_text()) | {"vocab_size": 4096 + more}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = {"model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=f"has {4096 + more} tokens, and .* 4096: they must share"):
        LLM(tiny_gpt2, speculative_config=config, load_format="dummy")


@pytest.mark.parametrize("config", [MODEL, NGRAM], ids=["model", "ngram"])
def test_one_step_ahead_and_speculation_take_turns(config, plain):
    """Some steps with drafts, some ahead, as pays just now: the text is the same."""
    llm = LLM("storyteller", speculative_config=config, async_scheduling=True)
    executor, kinds = llm.engine.executor, kinds_of(llm.engine)
    for _ in range(2):
        assert [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)] == plain
    assert isinstance(llm.engine, AheadEngine)
    assert "ahead" in kinds
    assert executor.lengths.flow.knows(1) or executor.lengths.flow.knows(len(PROMPTS)), "what one costs"


def test_the_server_speculates_and_says_how_well(tmp_path, plain):
    given = '{"model": "storyteller-draft", "num_speculative_tokens": 3}'
    server = Process(tmp_path, "", "--speculative-config", given)
    try:
        with server.client() as client:
            body = {"model": "storyteller", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 30}
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == plain[0]
            metrics = httpx.Response(200, content=client.get("/metrics").content).text
    finally:
        server.end()
    counts = dict(re.findall(r"^vllm:spec_decode_(\w+)_total\{[^p}]*\} (\S+)$", metrics, re.MULTILINE))
    assert 0 <= float(counts["num_accepted_tokens"]) <= float(counts["num_draft_tokens"])
    assert float(counts["num_drafts"]) >= 1, "after three plain steps a first draft is tried"
    assert len(re.findall(r"num_accepted_tokens_per_pos_total\{", metrics)) == 3
