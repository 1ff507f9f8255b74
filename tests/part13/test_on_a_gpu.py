"""Graphs, and one step ahead, on a real GPU: `pytest -m gpu`."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.cache.memory import PageMemory
from engine.core.ahead import AheadEngine
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.graphs import DecodeGraphs, GraphWay, fastest_steps
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner
from engine.kernels.paged_attention import PagedAttention
from engine.kernels.paged_prefill import PagedPrefill
from engine.kernels.prompt_rows import gpt2_prompt_forward
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.wiring.attention_kernel import attention_kernel
from tests.part06.fakes import assert_idle, run_to_end

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
PROMPTS = [
    "Once upon a time, in a", "The", "Tom and Lily went to the park. They saw", "A", "One day, Tim found a",
    "It rained.", "The little cat", "There was a big", "Mom said",
]  # fmt: skip
ROWS, MAX_LEN = 9, 128
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True)
FORKED = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True, n=2)
RULES = SamplingParams(
    temperature=0, max_tokens=30, ignore_eos=True, bad_words=["was", "a big", "Lily"],
    allowed_token_ids=list(range(1, 4000)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def full_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request):
    return load_model("storyteller", device="cuda", dtype=request.param)


def memory_for(model) -> PageMemory:
    dtype = next(model.parameters()).dtype
    kernel = attention_kernel("triton", model.config.head_dim, "cuda", dtype)
    return PageMemory(
        model.config, 100, 16, "cuda", dtype, kernel, decode=PagedAttention, prefill=PagedPrefill
    )


def engine_of(tokenizer, model, how: str) -> LLMEngine:
    """`how`: "plain" knows neither graphs nor a step ahead; "captured", "uncaptured" and "ahead" do."""
    memory, last = memory_for(model), LastTokens(ROWS, torch.device("cuda", 0))
    scheduler = ContinuousScheduler(memory.plan(), ROWS, 64)
    if how == "plain":
        runner = ModelRunner([EagerWay(model, memory)], memory)
        return LLMEngine(tokenizer, model.config, scheduler, runner, max_model_len=MAX_LEN)
    ways = [EagerWay(model, memory, gpt2_prompt_forward(model), last.upload)]
    if how != "ahead":
        V, width = model.config.vocab_size, MAX_LEN // memory.block_size
        graphs = DecodeGraphs(
            fastest_steps(model, memory, ROWS), last, V, ROWS, width, capture=how == "captured"
        )
        assert sorted(graphs._graphs) == ([1, 2, 4, 8, 9] if how == "captured" else [])
        ways.insert(0, GraphWay(graphs, V))
    runner = ModelRunner(ways, memory, last_tokens=last)
    return AheadEngine(tokenizer, model.config, scheduler, runner, max_model_len=MAX_LEN)


def told(engine: LLMEngine, count: int, params: SamplingParams) -> list[list[int]]:
    for prompt in PROMPTS[:count]:
        engine.add_request(prompt, prompt, params)
    done = run_to_end(engine)
    assert_idle(engine)
    assert not any(output.error for output in done.values())
    return [done[prompt].outputs[0].token_ids for prompt in PROMPTS[:count]]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_recorded_step_gives_the_tokens_of_one_that_is_not(tokenizer, model, params):
    """In sizes 1, 2, 4 and 9, larger and smaller by turns, over the same buffers."""
    captured, uncaptured = (engine_of(tokenizer, model, how) for how in ("captured", "uncaptured"))
    for count in (9, 1, 3, 2, 9):
        assert told(captured, count, params) == told(uncaptured, count, params), f"{count} sequences"


@pytest.mark.parametrize("how", ["captured", "ahead"])
def test_in_fp32_the_tokens_are_those_of_the_plain_engine(tokenizer, model, how):
    if next(model.parameters()).dtype != torch.float32:
        pytest.skip("in 16 bits, rounding turns close races")
    for count in (1, 2, 3, 9):
        got = told(engine_of(tokenizer, model, how), count, GREEDY)
        assert got == told(engine_of(tokenizer, model, "plain"), count, GREEDY), f"{count} sequences"


@pytest.mark.parametrize("params", [GREEDY, DRAWN, FORKED, RULES], ids=["greedy", "drawn", "forked", "rules"])
@pytest.mark.parametrize("how", ["captured", "ahead"])
def test_the_host_never_waits_before_the_next_step_is_launched(tokenizer, model, how, params):
    engine = engine_of(tokenizer, model, how)
    launch = engine.launch

    def launching():
        torch.cuda.set_sync_debug_mode("error")
        try:
            step = launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert step is None or step.error is None, step.error
        return step

    engine.launch = launching
    told(engine, 5, params)


def test_penalties_stops_and_scores_beside_each_other(tokenizer, model):
    """Steps that a graph chooses in, and steps that it does not, by turns."""
    params = [
        SamplingParams(temperature=0, max_tokens=25),
        SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.3, min_tokens=3),
        SamplingParams(temperature=0, max_tokens=20, stop=("the",)),
        SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=12),
    ]

    def all_of(how: str) -> dict:
        engine = engine_of(tokenizer, model, how)
        for prompt, asked in zip(PROMPTS, params, strict=False):
            engine.add_request(prompt, prompt, asked)
        done = run_to_end(engine)
        assert_idle(engine)
        return {name: [sample.token_ids for sample in output.outputs] for name, output in done.items()}

    assert all_of("captured") == all_of("uncaptured")
