"""Speculation through `LLM` and `ruvon serve`."""

import itertools
import json
import re
import time
from collections import Counter

import httpx
import pytest
import torch
from transformers import GPT2LMHeadModel

from engine import LLM, SamplingParams
from engine.core.ahead import AheadEngine
from engine.decoding.bad_words import bad_words_of
from engine.decoding.sampling import distribution
from engine.decoding.sampling_state import SamplingState, allowed_mask
from engine.models.checkpoint import CheckpointError
from engine.requests.listeners import Listener
from engine.speculation.capability import Speculation
from engine.speculation.step_times import StepTimes
from engine.wiring.compose import build_engine
from engine.wiring.engine_args import EngineArgs
from tests.part06.fakes import assert_idle
from tests.part16.mixed_steps import kinds_of
from tests.system.attack import Process

PROMPTS = ["Once upon a time", "The dog saw the cat. The dog saw the", "Lily"]
GREEDY = SamplingParams(temperature=0, max_tokens=30)
MODEL = {"model": "storyteller-draft", "num_speculative_tokens": 4}
FOUR = (5, 300, 1000, 2500)  # tokens
# "##" is [5, 5], "im#" is [300, 5], and "#imange" is [5, 300, 1000].
RULES = {"allowed_token_ids": FOUR, "bad_words": ["##", "im#", "#imange"]}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
ALWAYS_DRAFT = {
    "step_times": {"sequences": [1], "drafts": [0, 1], "step_seconds": [[1.0, 1.0]]}
}  # as many drafts as may be
# Drafts pay only where nearly all of them stand: at first that is hoped for.
SOME = {
    "step_times": {
        "sequences": [1, 3],
        "drafts": [0, 1, 4],
        "step_seconds": [[1.0, 2.0, 3.9], [1.4, 2.8, 5.5]],
    }
}


def speculation_of(llm: LLM) -> Speculation:
    speculation, *_ = llm.engine.capabilities
    return speculation


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return [output.outputs[0].text for output in LLM("storyteller").generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("config", [MODEL, NGRAM], ids=["model", "ngram"])
@pytest.mark.parametrize("kv_cache", ["paged", "slots"])
def test_greedy_text_is_the_same_with_and_without(plain, config, kv_cache):
    llm = LLM("storyteller", speculative_config=config | ALWAYS_DRAFT, kv_cache=kv_cache)
    assert [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)] == plain
    again = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]  # prefixes are cached now
    assert again == plain
    assert speculation_of(llm).tally.proposed > 0


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
        (NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min=5"),
        ([1], "a mapping"),
        (MODEL | {"model": ""}, "model=''"),
        (MODEL | {"model": "nowhere"}, "nowhere"),
        (MODEL | {"step_times": {"drafts": [0]}}, "step_times={'drafts': [0]}: a mapping with sequences"),
        (
            MODEL | {"step_times": ALWAYS_DRAFT["step_times"] | {"step_seconds": [[1, -1]]}},
            "1 rows of 2 positive numbers of seconds",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_name(config, words):
    with pytest.raises((ValueError, CheckpointError), match=re.escape(words)):
        LLM("storyteller", speculative_config=config)


@pytest.mark.parametrize("config", [MODEL | {"num_speculative_tokens": 2}, NGRAM], ids=["model", "ngram"])
@pytest.mark.parametrize("only_four", [{"logit_bias": dict.fromkeys(FOUR, 40)}, RULES], ids=["bias", "rules"])
def test_sampled_text_has_the_targets_distribution(tiny_gpt2, config, only_four, monkeypatch):
    """Chi-squared over the first three tokens, of which all but the first may have been drafts. A bias leaves
    four tokens to choose from, or `allowed_token_ids` does, and bad words of two tokens forbid some of their
    pairs. The expected shares are Hugging Face's logits under Part 5's knobs.
    """
    knobs = {"temperature": 1.3, "top_p": 0.9, "presence_penalty": 0.5} | only_four
    # Nobody names a seed (that would give the plain sampler's text), and the engine's are these.
    seeds = itertools.count()
    monkeypatch.setattr("engine.core.submission.seed_of", lambda params: next(seeds))
    params = [SamplingParams(**knobs, max_tokens=4)] * 800
    llm = LLM(
        tiny_gpt2, tokenizer="storyteller-draft", max_num_seqs=200, speculative_config=config | ALWAYS_DRAFT
    )
    prompt = [*FOUR, 9, *FOUR[:3]]
    said = [out.outputs[0].token_ids[:3] for out in llm.generate([prompt] * len(params), params)]
    tally = speculation_of(llm).tally
    assert 0.1 < tally.accepted / tally.proposed < 0.95, "drafts stand, and drafts fall"

    share = {(): 1.0}  # of each beginning
    theirs = GPT2LMHeadModel.from_pretrained(tiny_gpt2).eval()
    for length in range(3):
        texts = [text for text in share if len(text) == length]
        with torch.no_grad():
            logits = theirs(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1]
        words = bad_words_of(params[0], llm.tokenizer, llm.config.vocab_size)
        mask = allowed_mask(params[0].allowed_token_ids)
        states = [SamplingState(params[0], prompt, text, 0, bad_words=words, mask=mask) for text in texts]
        for text, row in zip(texts, distribution(logits, states).tolist(), strict=True):
            share |= {(*text, token): share[text] * row[token] for token in FOUR}
    counts = Counter(map(tuple, said))
    if only_four is RULES:
        pairs = {pair for text in counts for pair in itertools.pairwise(text)}
        assert {(5, 1000), (300, 300), (1000, 5)} <= pairs
        assert not {(5, 5), (300, 5)} & pairs, "words of two tokens"
        assert counts[5, 300, 300]
        assert not counts[5, 300, 1000], "a word of three"
    likely = {text: p * len(params) for text, p in share.items() if len(text) == 3 and p > 0}
    assert set(counts) <= set(likely), "a token outside of top-p was said"
    chi = sum((counts[text] - n) ** 2 / n for text, n in likely.items())
    freedom = len(likely) - 1
    assert freedom >= 10
    # Wilson and Hilferty: passed by chance once in 10,000 times.
    critical = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi < critical, f"{chi:.0f} of at most {critical:.0f}: not the target's distribution"


@pytest.mark.parametrize("config", [MODEL, NGRAM], ids=["model", "ngram"])
def test_text_for_a_seed_is_the_one_without_drafts(config):
    """As many proposals as pay on this machine, and after other requests: never mind."""
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=7 + i, n=2, max_tokens=40) for i in range(3)]

    def told(llm: LLM) -> list[str]:
        return [sample.text for output in llm.generate(PROMPTS, params) for sample in output.outputs]

    want, llm = told(LLM("storyteller")), LLM("storyteller", speculative_config=config)
    assert [told(llm), told(llm)] == [want, want]


def test_target_and_draft_share_the_memory_and_the_dtype():
    budget = 100_000_000
    llm = LLM(
        "storyteller", dtype="bfloat16", speculative_config=MODEL | ALWAYS_DRAFT, kv_cache_memory_bytes=budget
    )
    runners = llm.engine.executor, speculation_of(llm).proposer.runner
    models = [runner.ways[-1].model for runner in runners]
    assert [next(model.parameters()).dtype for model in models] == [torch.bfloat16] * 2
    token = sum(model.config.kv_bytes_per_token(2) for model in models)
    blocks = budget // (16 * token)
    assert [runner.ways[-1].memory.num_blocks for runner in runners] == [blocks] * 2, (
        "room for the same tokens"
    )
    assert llm.engine.scheduler.cache.usage().tokens_total == blocks * 16, "by one plan"
    config = MODEL | ALWAYS_DRAFT
    llm = LLM("storyteller", speculative_config=config, gpu_memory_utilization=0.5, max_num_seqs=1)
    runners = llm.engine.executor, speculation_of(llm).proposer.runner
    assert {runner.memory.num_blocks * 16 for runner in runners} == {1024}, "a share is for both"


@pytest.mark.parametrize("more", [-1, 1])
def test_a_draft_with_another_vocabulary_is_refused(tiny_gpt2, tmp_path, more):
    raw = json.loads((tiny_gpt2 / "config.json").read_text()) | {"vocab_size": 4096 + more}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = {"model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=f"has {4096 + more} tokens, and .* 4096: they must share"):
        LLM(tiny_gpt2, speculative_config=config, load_format="dummy")


@pytest.mark.parametrize("config", [MODEL, NGRAM], ids=["model", "ngram"])
def test_one_step_ahead_and_speculation_take_turns(config, plain):
    """Some steps with drafts, some ahead, as pays by the table: the text is the same."""
    prompts, want = PROMPTS, plain
    if config is NGRAM:  # which has drafts where a text repeats itself
        prompts = ["Mom said no. Dad said no. Mom said no. Dad said no. Mom said no."]
        want = [output.outputs[0].text for output in LLM("storyteller").generate(prompts, GREEDY)]
    llm = LLM("storyteller", speculative_config=config | SOME, async_scheduling=True)
    kinds = kinds_of(llm.engine)
    for _ in range(2):
        assert [output.outputs[0].text for output in llm.generate(prompts, GREEDY)] == want
    assert isinstance(llm.engine, AheadEngine)
    assert {"ahead", "drafts"} <= set(kinds)


class Recorded(Listener):
    """Which tokens of whom each step had."""

    def __init__(self) -> None:
        self.steps = []

    def on_step(self, record):
        self.steps.append((record.number, record.request_ids, record.tokens_computed, record.counters))


@pytest.mark.parametrize("config", [MODEL, NGRAM], ids=["model", "ngram"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_with_a_table_of_step_times_two_runs_have_the_same_steps(config, ahead):
    """It reads no clock: the same requests give the same lengths."""
    if config is NGRAM:  # which has drafts, or has none, by the text
        prompts, times = ["Mom said no. Dad said no. Mom said no. Dad said no. Mom said no."], ALWAYS_DRAFT
    else:
        prompts, times = PROMPTS, SOME
    runs = []
    for _ in range(2):
        llm = LLM("storyteller", speculative_config=config | times, async_scheduling=ahead)
        llm.engine.listeners.add(recorded := Recorded())
        llm.generate(prompts, GREEDY)
        runs.append(recorded.steps)
    assert runs[0] == runs[1]
    assert any(counters["draft_tokens"] for *_, counters in runs[0]), "drafts"
    assert any(not counters["draft_tokens"] for *_, counters in runs[0]), "and steps without"


@pytest.mark.parametrize("kv_cache", ["paged", "slots"])
@pytest.mark.parametrize("config", [MODEL, NGRAM], ids=["model", "ngram"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_what_was_measured_leaves_no_trace(config, kv_cache, ahead):
    start = time.thread_time()  # of this thread's own work, whoever else is busy
    args = EngineArgs(
        model="storyteller", speculative_config=config, kv_cache=kv_cache, async_scheduling=ahead
    )
    engine = build_engine(args, [recorded := Recorded()])
    assert time.thread_time() - start < 20, "it is bounded in time"
    speculation, *_ = engine.capabilities
    table = speculation.lengths.times
    assert StepTimes.from_dict(json.loads(json.dumps(table.as_dict()))) == table, (
        "it is shown as plain numbers"
    )
    assert 0 < table.seconds(1, 0) <= table.seconds(1, speculation.lengths.max_drafts) < 10, "seconds"
    assert_idle(engine)
    assert (speculation.tally.proposed, speculation.lengths.num_requests) == (0, 0)
    assert (recorded.steps, engine._num_steps) == ([], 0), "nobody heard of it"
    cache = engine.scheduler.cache
    assert cache.draft_progress == {}
    if kv_cache == "paged":
        assert (cache.queried_tokens, cache.hit_tokens, len(cache.prefixes)) == (0, 0, 0), "nothing is found"


def test_the_server_speculates_and_says_how_well(tmp_path, plain):
    given = {
        "model": "storyteller-draft",
        "num_speculative_tokens": 3,
    } | ALWAYS_DRAFT  # measured times could say none
    server = Process(tmp_path, "", "--speculative-config", json.dumps(given))
    try:
        with server.client() as client:
            body = {"model": "storyteller", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 30}
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == plain[0]
            metrics = httpx.Response(200, content=client.get("/metrics").content).text
    finally:
        server.end()
    counts = dict(re.findall(r"^vllm:spec_decode_(\w+)_total\{[^p}]*\} (\S+)$", metrics, re.MULTILINE))
    assert 0 <= float(counts["num_accepted_tokens"]) <= float(counts["num_draft_tokens"])
    assert float(counts["num_drafts"]) >= 1, "what was never tried looks good"
    assert len(re.findall(r"num_accepted_tokens_per_pos_total\{", metrics)) == 3
