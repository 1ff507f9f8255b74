"""Verification and proposals in CUDA graphs, on a real GPU: `pytest -m gpu`."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.executor import Executor, ModelForward
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scoring import ScoringExecutor
from engine.speculation.ahead import AheadSpeculativeEngine, AheadSpeculativeExecutor, RememberingExecutor
from engine.speculation.draft_model import DraftModel
from engine.speculation.executor import SpeculativeExecutor
from engine.speculation.graphs import RowsForward, num_rows
from engine.speculation.paired import PairedCache
from engine.speculation.verify import Verifier
from tests.part13.test_on_a_gpu import MAX_LEN, PROMPTS, cache_for, full_precision  # noqa: F401
from tests.part13.test_on_a_gpu import engine_of as plain_engine
from tests.part13.test_on_a_gpu import told as told_by
from tests.part16.mixed_steps import POLICIES, Policy, kinds_of
from tests.part16.test_speculative_engine import Always

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ROWS, DRAFTS = 9, 3
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=30, ignore_eos=True)
NAMED = SamplingParams(temperature=0.8, seed=5, top_p=0.9, max_tokens=30, ignore_eos=True)


@pytest.fixture(autouse=True)
def seeds_that_come_again(monkeypatch):
    """What the engine draws for who names none."""
    monkeypatch.setattr("engine.llm_engine.new_seed", lambda params: params.seed or 5)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def models(request):
    return [
        load_model(name, device="cuda", dtype=request.param) for name in ("storyteller", "storyteller-draft")
    ]


def engine_of(tokenizer, models, how: str, policy: str | None = None, longest: int = MAX_LEN) -> LLMEngine:
    """`how`: "captured", "uncaptured", or "eager": kernel by kernel, the models' own forward passes.
    `policy`: when to propose; else steps run ahead.
    """
    target, draft = models
    cache = PairedCache(cache_for(target), cache_for(draft))
    forward, reading = ModelForward(target, cache.target), None
    if how != "eager":
        rows = num_rows(ROWS, DRAFTS + 1, 64), num_rows(ROWS, 2, 64)
        forward = RowsForward(target, cache.target, rows[0], longest, how == "captured")
        reading = RowsForward(draft, cache.draft, rows[1], longest, how == "captured", chains=True)
        assert bool(forward.graphs._graphs) == bool(reading.graphs._graphs) == (how == "captured")
    proposer = DraftModel(draft, cache, reading)
    scheduler = ContinuousScheduler(cache, ROWS, 64)
    options = {"supports": SUPPORTS, "max_model_len": longest}
    if policy is None:
        inner = ScoringExecutor(forward, tokenizer, Verifier(proposer.probs))
        executor = SpeculativeExecutor(inner, cache, proposer, Always(DRAFTS))
        return LLMEngine(tokenizer, target.config, scheduler, executor, **options)
    verifier = Verifier(proposer.probs, forward.choose)
    inner = RememberingExecutor(forward, tokenizer, forward.last, sampler=verifier)
    executor = AheadSpeculativeExecutor(inner, cache, proposer, Policy(POLICIES[policy], DRAFTS))
    return AheadSpeculativeEngine(tokenizer, target.config, scheduler, executor, **options)


@pytest.mark.parametrize("params", [GREEDY, DRAWN, NAMED], ids=["greedy", "drawn", "a seed named"])
def test_recorded_passes_give_the_tokens_of_passes_that_are_not(tokenizer, models, params):
    """In many sizes, larger and smaller by turns, over the same buffers."""
    captured, uncaptured = (engine_of(tokenizer, models, how) for how in ("captured", "uncaptured"))
    for count in (9, 1, 3, 2, 9):
        got = told_by(captured, count, params)
        assert got == told_by(uncaptured, count, params), f"{count} sequences"
    tally = captured.executor.tally
    assert 0 < tally.accepted < tally.proposed, "drafts that stand, and drafts that do not"


@pytest.mark.parametrize("params", [GREEDY, DRAWN, NAMED], ids=["greedy", "drawn", "a seed named"])
def test_in_fp32_the_tokens_are_those_of_passes_kernel_by_kernel(tokenizer, models, params):
    if next(models[0].parameters()).dtype != torch.float32:
        pytest.skip("in 16 bits, rounding turns close races")
    engines = [engine_of(tokenizer, models, how) for how in ("captured", "eager")]
    for count in (1, 2, 9):
        got, want = (told_by(engine, count, params) for engine in engines)
        assert got == want, f"{count} sequences"
        if params is not DRAWN:
            assert got == told_by(plain_engine(tokenizer, models[0], "plain"), count, params), (
                "the target's own"
            )


LONGEST = 240  # tokens
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)  # a dozen blocks
# With seeds 5 and 6 a draw is so close that the rounding of Part 13's graphs alone turns it.
LONG_NAMED = SamplingParams(temperature=0.8, seed=7, max_tokens=200, ignore_eos=True)


@pytest.mark.parametrize("params", [LONG, LONG_NAMED], ids=["greedy", "a seed named"])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_ahead_and_with_drafts_by_turns_the_tokens_are_the_targets_own(tokenizer, models, policy, params):
    """A row that goes on with its own token gets new blocks meanwhile; nine of them, and one is preempted."""
    if next(models[0].parameters()).dtype != torch.float32:
        pytest.skip("in 16 bits, rounding turns close races")
    target = models[0]
    for count in (1, 3, 9):
        cache = cache_for(target)
        executor, scheduler = Executor(ModelForward(target, cache)), ContinuousScheduler(cache, ROWS, 64)
        plain = LLMEngine(tokenizer, target.config, scheduler, executor, max_model_len=LONGEST)
        engine = engine_of(tokenizer, models, "captured", policy, LONGEST)
        kinds = kinds_of(engine)
        assert told_by(engine, count, params) == told_by(plain, count, params), f"{count} sequences"
        assert ("ahead" in kinds, "drafts" in kinds) == (policy != "always", policy != "never")


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_host_never_waits_before_a_step_ahead_is_launched(tokenizer, models, params):
    engine = engine_of(tokenizer, models, "captured", "never")
    launch = engine.launch

    def launching():
        torch.cuda.set_sync_debug_mode("error")
        try:
            flight = launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert flight is None or hasattr(flight.pending, "batch"), flight.pending
        return flight

    engine.launch = launching
    told_by(engine, 5, params)


def test_penalties_stops_and_scores_beside_drafts(tokenizer, models):
    params = [
        SamplingParams(temperature=0, max_tokens=25, logprobs=2),
        SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.3, min_tokens=3),
        SamplingParams(temperature=0, max_tokens=20, stop=("the",)),
        SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=12),
    ]

    def all_of(*how: str) -> dict:
        engine = engine_of(tokenizer, models, *how)
        for prompt, own in zip(PROMPTS, params, strict=False):
            engine.add_request(prompt, prompt, own)
        ended = {}
        while engine.has_unfinished_requests():
            ended |= {out.request_id: out for out in engine.step() if out.finished}
        assert [out.error for out in ended.values() if out.error] == []
        return {name: [sample.token_ids for sample in out.outputs] for name, out in ended.items()}

    assert all_of("captured") == all_of("uncaptured")
    for policy in POLICIES:
        assert all_of("captured", policy) == all_of("uncaptured", policy)
