"""Every pair of options that change how a step is computed, and not what: the same greedy tokens, of each
architecture.
"""

import random
from functools import partial
from itertools import combinations, product

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from benchmarks.part20_models import random_model
from engine import LLM, SamplingParams
from engine.cache.paged import PagedCache
from engine.core.ahead import AheadEngine
from engine.execution.graphs import GraphWay
from engine.models.config import ModelConfig
from tests.part01 import reference

GPU = torch.cuda.is_available()
FACTORS = {
    "kv_cache": ("slots", "paged"),
    "prompts": ("whole", "chunks"),
    "prefix_cache": (True, False),
    "preempted": ("recompute", "swap"),
    "attention": ("eager", "sdpa", "tiled", "triton"),
    "graphs": (False, True),  # without a GPU: the steps that graphs would record
    "async_scheduling": (True, False),
}
Combination = tuple  # a value of each factor
VOCAB, MAX_LEN, P, SEATS = 60, 24, 4, 3


def is_valid(combination: Combination) -> bool:
    """Slots have no prefix cache, and never preempt; graphs are made where our kernels read pages."""
    chosen = dict(zip(FACTORS, combination, strict=True))
    paged_only = chosen["prefix_cache"] or chosen["preempted"] == "swap" or chosen["graphs"]
    return (chosen["kv_cache"] == "paged" or not paged_only) and (
        chosen["attention"] == "triton" or not chosen["graphs"]
    )


def pairs_of(combination: Combination) -> set[tuple]:
    return set(combinations(zip(FACTORS, combination, strict=True), 2))


def covering_set(seed: int) -> list[Combination]:
    """Valid combinations in which each pair of values that can stand together does: always the one that adds
    the most pairs, and of these one whose steps are not interpreted.
    """
    valid = [combination for combination in product(*FACTORS.values()) if is_valid(combination)]
    random.Random(seed).shuffle(valid)
    missing, chosen = set().union(*map(pairs_of, valid)), []
    while missing:
        best = max(valid, key=lambda one: (len(pairs_of(one) & missing), "triton" not in one))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


COVERING = covering_set(seed=0)
one_by_one = partial(pytest.mark.parametrize, "combination", ids=lambda one: "-".join(map(str, one)))


def test_the_set_covers_every_pair_that_can_stand_together():
    covered = set().union(*map(pairs_of, COVERING))
    assert all(map(is_valid, COVERING))
    paged_only = {("prefix_cache", True), ("preempted", "swap"), ("graphs", True)}
    impossible = {(("kv_cache", "slots"), value) for value in paged_only}
    impossible |= {(("attention", name), ("graphs", True)) for name in ("eager", "sdpa", "tiled")}
    every = set()
    for (a, many), (b, others) in combinations(FACTORS.items(), 2):
        every |= {((a, x), (b, y)) for x, y in product(many, others)}
    assert every - covered == impossible
    assert len(COVERING) < 15, "a covering set is small"


SAME = [7, 3, 9, 27, 5, 5, 41, 8]  # two blocks that two prompts begin with
PROMPTS = [[2, 4, 6], [*SAME, 11], [*SAME, 12, 13, 14, 15], [50, 40, 30, 20, 10]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def made(family: str):
    """A random model of 32 numbers a token, by Hugging Face. A head tied to the embedding would repeat what
    it reads. Four query heads share two key heads, where the architecture has that.
    """
    if family == "gpt2":
        shape = {"vocab_size": VOCAB, "n_embd": 32, "n_head": 2, "n_positions": MAX_LEN}
        return reference.random_gpt2(**shape, tie_word_embeddings=False)
    # Heads of 16 numbers are the narrowest that `LlamaRows` takes: Qwen3's steps are its.
    head_dim = 16 if family == "qwen3" else 8
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "head_dim": head_dim}
    return random_model(family, seed=24, **shape, num_hidden_layers=1, max_position_embeddings=MAX_LEN)


@pytest.fixture(scope="module", params=["gpt2", "llama", "qwen3"])
def checkpoint(request, tmp_path_factory) -> tuple:
    """A folder, and what Hugging Face says to each prompt."""
    theirs = made(request.param)
    folder = reference.save(theirs, tmp_path_factory.mktemp(request.param), tokenizer=True)
    told = [greedy(theirs, prompt) for prompt in PROMPTS]
    assert all(len(set(tokens)) > 3 for tokens in told), "they tell a mistake"
    return folder, told


@torch.inference_mode()
def greedy(theirs, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(GREEDY.max_tokens):
        ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


class Watched:
    """An `LLM` put together as a combination says, and what happens in it."""

    def __init__(self, folder, combination: Combination, device: str) -> None:
        chosen = dict(zip(FACTORS, combination, strict=True))
        paged = chosen["kv_cache"] == "paged"
        options = {name: chosen[name] for name in ("kv_cache", "attention", "async_scheduling")}
        if paged:
            options |= {"block_size": P, "enable_prefix_caching": chosen["prefix_cache"]}
            options |= {"preemption_mode": chosen["preempted"]}
            options |= {"swap_space": 0.001} if chosen["preempted"] == "swap" else {}
        token_bytes = ModelConfig.from_pretrained(folder).kv_bytes_per_token(4)  # fp32
        self.llm = LLM(
            folder, device=device, dtype="float32", max_model_len=MAX_LEN, max_num_seqs=SEATS,
            enforce_eager=not chosen["graphs"],
            max_num_batched_tokens=5 if chosen["prompts"] == "chunks" else 64,
            kv_cache_memory_bytes=MAX_LEN * token_bytes * (1 if paged else SEATS), **options,
        )  # fmt: skip
        self.paged, self.seen, self.chunks = paged, set(), 0
        scheduler = self.llm.engine.scheduler
        self.cache, schedule = scheduler.cache, scheduler.schedule

        def scheduling():
            step = schedule()
            if step:
                self.seen |= set(step.requests)
                self.chunks += not all(step.batch.rows.chosen_counts)
            return step

        scheduler.schedule = scheduling


def assert_same_tokens(checkpoint, combination: Combination, device: str) -> None:
    folder, want = checkpoint
    watched = Watched(folder, combination, device)
    chosen = dict(zip(FACTORS, combination, strict=True))
    outputs = watched.llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == want
    # What was to be tried did happen.
    paged, engine = watched.paged, watched.llm.engine
    assert isinstance(watched.cache, PagedCache) == paged
    assert (sum(request.num_preemptions for request in watched.seen) > 0) == paged
    assert not paged or (watched.cache.num_swapped > 0) == (chosen["preempted"] == "swap")
    assert not paged or (watched.cache.hit_tokens > 0) == chosen["prefix_cache"]
    assert (watched.chunks > 0) == (chosen["prompts"] == "chunks")
    assert isinstance(engine, AheadEngine) == chosen["async_scheduling"]
    way = engine.executor.ways[0]
    assert isinstance(way, GraphWay) == chosen["graphs"]
    if chosen["graphs"]:
        assert bool(way.graphs._graphs) == (device == "cuda"), "a GPU's steps are recorded"
    assert watched.cache.usage().num_sequences == 0


@pytest.mark.skipif(GPU, reason="Triton's kernels are interpreted where there is no GPU")
@one_by_one(argvalues=COVERING)
def test_the_same_tokens_on_a_cpu(checkpoint, combination):
    assert_same_tokens(checkpoint, combination, "cpu")


@pytest.fixture
def no_tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
@one_by_one(argvalues=COVERING)
def test_the_same_tokens_on_a_gpu(checkpoint, combination, no_tf32):
    assert_same_tokens(checkpoint, combination, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("kv_cache", ["paged", "slots"])
def test_in_bf16_each_token_is_among_the_likeliest_of_fp32(kv_cache):
    """Rounding may turn a close race; it makes no unlikely token win."""
    options = {"device": "cuda", "dtype": "bfloat16", "kv_cache_memory_bytes": 2**26}
    llm = LLM("storyteller", kv_cache=kv_cache, max_num_seqs=4, **options)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = llm.generate(["Once upon a time", "The cat", "One day, Tim found a", "It rained."], params)
    theirs = reference.load("storyteller").float()
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]  # [T, V]
        ranks = (logits > logits.gather(1, torch.tensor(tokens)[:, None])).sum(1)
        assert ranks.max() < 3, "each is one of the three likeliest, given those before it"
        assert (ranks == 0).float().mean() > 0.9
