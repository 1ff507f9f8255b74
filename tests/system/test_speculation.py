"""Speculation through `LLM` and `ruvon serve`."""

import re

import httpx
import pytest

from engine import LLM, SamplingParams
from engine.checkpoint import CheckpointError
from engine.speculation.lengths import Lengths
from tests.system.attack import Process

PROMPTS = ["Once upon a time", "The dog saw the cat. The dog saw the", "Lily"]
GREEDY = SamplingParams(temperature=0, max_tokens=30)
MODEL = {"model": "storyteller-draft", "num_speculative_tokens": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return [output.outputs[0].text for output in LLM("storyteller").generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("config", [MODEL, NGRAM], ids=["model", "ngram"])
@pytest.mark.parametrize("kv_cache", ["paged", "slots"])
def test_greedy_text_is_the_same_with_and_without(monkeypatch, plain, config, kv_cache):
    """As many proposals as may be, whether they pay on this machine just now or not."""
    monkeypatch.setattr(Lengths, "choose", lambda self, ids, caps: [min(self.most, cap) for cap in caps])
    llm = LLM("storyteller", speculative_config=config, kv_cache=kv_cache)
    assert [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)] == plain
    again = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]  # prefixes are cached now
    assert again == plain
    assert llm.engine.executor.tally.proposed > 0


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
        (MODEL | {"model": "nowhere"}, "nowhere"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_name(config, words):
    with pytest.raises((ValueError, CheckpointError), match=re.escape(words)):
        LLM("storyteller", speculative_config=config)


def test_one_step_ahead_and_speculation_exclude_each_other():
    with pytest.raises(ValueError, match="async_scheduling"):
        LLM("storyteller", speculative_config=NGRAM, async_scheduling=True)


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
