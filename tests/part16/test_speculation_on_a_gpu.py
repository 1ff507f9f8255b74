"""Verification and proposals in CUDA graphs, on a real GPU: `pytest -m gpu`."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.core.ahead import AheadEngine
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.execution.graphs import DecodeGraphs, GraphWay, fastest_steps
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.scores import logprobs_of
from engine.execution.verifying import num_rows, verifying_steps
from engine.kernels.prompt_rows import gpt2_prompt_forward
from engine.kernels.verify_attend import MAX_NEW_TOKENS
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scored_rows import scored_rows
from engine.speculation.capability import Speculation
from engine.speculation.config import MAX_DRAFTS
from engine.speculation.draft_model import DraftModel, DraftSampler
from engine.speculation.lengths import DraftLengths
from engine.speculation.measuring import ALWAYS_DRAFT, measure
from engine.speculation.rejection_sampler import DraftProbs, RejectionSampler
from tests.part06.fakes import assert_idle
from tests.part13.test_on_a_gpu import MAX_LEN, PROMPTS, full_precision, memory_for  # noqa: F401
from tests.part13.test_on_a_gpu import engine_of as plain_engine
from tests.part13.test_on_a_gpu import told as told_by
from tests.part16.mixed_steps import POLICIES, Policy, kinds_of

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
    monkeypatch.setattr("engine.core.submission.seed_of", lambda params: params.seed or 5)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def models(request):
    return [
        load_model(name, device="cuda", dtype=request.param) for name in ("storyteller", "storyteller-draft")
    ]


def runner_of(model, memory, how: str, longest: int, new: int, in_flight: int) -> ModelRunner:
    """`how`: "captured", "uncaptured", or "eager": kernel by kernel, the model's own forward pass."""
    last = LastTokens(ROWS, torch.device("cuda", 0))
    if how == "eager":
        return ModelRunner([EagerWay(model, memory, upload=last.upload)], memory, last_tokens=last)
    V, width, rows = model.config.vocab_size, -(-longest // memory.block_size), num_rows(ROWS, new, 64)
    options = {"capture": how == "captured", "in_flight": in_flight}
    plain = DecodeGraphs(fastest_steps(model, memory, ROWS), last, V, ROWS, width, **options)
    verifying = DecodeGraphs(verifying_steps(model, memory, rows), last, V, rows, width, **options)
    assert bool(plain._graphs) == bool(verifying._graphs) == (how == "captured")
    ways = [GraphWay(plain, V), GraphWay(verifying, V, max_new=MAX_NEW_TOKENS)]
    return ModelRunner(
        [*ways, EagerWay(model, memory, gpt2_prompt_forward(model), last.upload)], memory, last_tokens=last
    )


def engine_of(
    tokenizer,
    models,
    how: str,
    lengths: DraftLengths | None = None,
    longest: int = MAX_LEN,
    engine_class=None,
) -> LLMEngine:
    """By default as many drafts as may be, and no step ahead; with a policy, steps run ahead as well."""
    target, draft = models
    memory, second, draft_probs = memory_for(target), memory_for(draft), DraftProbs()
    runner = runner_of(target, memory, how, longest, DRAFTS + 1, in_flight=2)
    reader = runner_of(draft, second, how, longest, 2, in_flight=MAX_DRAFTS + 1)
    runner.select, reader.select = RejectionSampler(draft_probs, runner.select), DraftSampler(draft_probs)
    runner.scores = [*logprobs_of(tokenizer, target.logits)]
    runner.before.append(lambda batch: second.apply(batch.copies))
    scheduler = ContinuousScheduler(memory.plan(), ROWS, 64, select_rows=scored_rows)
    proposer = DraftModel(reader, scheduler.cache, draft.config.max_positions)
    speculation = Speculation(proposer, scheduler, lengths or DraftLengths(DRAFTS, ALWAYS_DRAFT))
    engine = (engine_class or (AheadEngine if lengths else LLMEngine))(
        tokenizer, target.config, scheduler, runner, supports=SUPPORTS, max_model_len=longest,
        capabilities=[speculation],
    )  # fmt: skip
    if isinstance(lengths, Policy):
        engine.listeners.add(lengths)
    return engine


@pytest.mark.parametrize("params", [GREEDY, DRAWN, NAMED], ids=["greedy", "drawn", "a seed named"])
def test_recorded_passes_give_the_tokens_of_passes_that_are_not(tokenizer, models, params):
    """In many sizes, larger and smaller by turns, over the same buffers."""
    captured, uncaptured = (engine_of(tokenizer, models, how) for how in ("captured", "uncaptured"))
    for count in (9, 1, 3, 2, 9):
        got = told_by(captured, count, params)
        assert got == told_by(uncaptured, count, params), f"{count} sequences"
    tally = captured.capabilities[0].tally
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
LONG_NAMED = SamplingParams(temperature=0.8, seed=7, max_tokens=200, ignore_eos=True)


@pytest.mark.parametrize("params", [LONG, LONG_NAMED], ids=["greedy", "a seed named"])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_ahead_and_with_drafts_by_turns_the_tokens_are_the_targets_own(tokenizer, models, policy, params):
    """A row that goes on with its own token gets new blocks meanwhile; nine of them, and one is preempted."""
    if next(models[0].parameters()).dtype != torch.float32:
        pytest.skip("in 16 bits, rounding turns close races")
    target = models[0]
    for count in (1, 3, 9):
        memory = memory_for(target)
        runner, scheduler = (
            ModelRunner([EagerWay(target, memory)], memory),
            ContinuousScheduler(memory.plan(), ROWS, 64),
        )
        plain = LLMEngine(tokenizer, target.config, scheduler, runner, max_model_len=LONGEST)
        engine = engine_of(tokenizer, models, "captured", Policy(POLICIES[policy], DRAFTS), LONGEST)
        kinds = kinds_of(engine)
        assert told_by(engine, count, params) == told_by(plain, count, params), f"{count} sequences"
        assert ("ahead" in kinds, "drafts" in kinds) == (policy != "always", policy != "never")


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_host_never_waits_before_a_step_ahead_is_launched(tokenizer, models, params):
    engine = engine_of(tokenizer, models, "captured", Policy(POLICIES["never"], DRAFTS))
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
    told_by(engine, 5, params)


def test_penalties_stops_and_scores_beside_drafts(tokenizer, models):
    params = [
        SamplingParams(temperature=0, max_tokens=25, logprobs=2),
        SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.3, min_tokens=3),
        SamplingParams(temperature=0, max_tokens=20, stop=("the",)),
        SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=12),
    ]

    def all_of(how: str, policy: str | None = None) -> dict:
        lengths = policy and Policy(POLICIES[policy], DRAFTS)
        engine = engine_of(tokenizer, models, how, lengths)
        for prompt, asked in zip(PROMPTS, params, strict=False):
            engine.add_request(prompt, prompt, asked)
        ended = {}
        while engine.has_unfinished_requests():
            ended |= {out.request_id: out for out in engine.step() if out.finished}
        assert [out.error for out in ended.values() if out.error] == []
        return {name: [sample.token_ids for sample in out.outputs] for name, out in ended.items()}

    assert all_of("captured") == all_of("uncaptured")
    for policy in POLICIES:
        assert all_of("captured", policy) == all_of("uncaptured", policy)


@pytest.mark.parametrize("engine_class", [LLMEngine, AheadEngine])
def test_what_steps_cost_is_measured(tokenizer, models, engine_class):
    """By an engine as it will run, in its graphs: no step costs nothing, and nobody is left in it."""
    engine = engine_of(tokenizer, models, "captured", engine_class=engine_class)
    table = measure(engine, engine.capabilities[0], ROWS, 64)
    assert (table.sequences[0], table.sequences[-1], table.drafts) == (1, ROWS, (0, 1, 2, DRAFTS))
    assert all(1e-5 < seconds < 1 for row in table.step_seconds for seconds in row), table
    assert_idle(engine)
