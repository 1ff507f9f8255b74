"""Passes with several tokens of a sequence, over fixed buffers: the model's own logits, and its own text."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.cache.memory import PageMemory
from engine.core.ahead import AheadEngine
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState
from engine.execution.graphs import DecodeGraphs, GraphWay, ModelStep
from engine.execution.graphs import fastest_steps as plain_steps
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.scores import logprobs_of
from engine.execution.verifying import VerifyRows, num_rows, verifying_steps
from engine.kernels.single_row import SingleRow
from engine.kernels.verify_attend import MAX_NEW_TOKENS
from engine.models.loader import load_model
from engine.requests.batch import Batch
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scheduler import Queues
from engine.scheduling.scored_rows import scored_rows
from engine.speculation.capability import ProposerInput, Speculation
from engine.speculation.draft_model import DraftModel, DraftSampler
from engine.speculation.lengths import DraftLengths
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.speculation.rejection_sampler import DraftProbs, RejectionSampler
from tests.part01.reference import random_gpt2, save
from tests.part06.fakes import TOKENIZER, assert_idle, run_to_end
from tests.part12.pages import sequence
from tests.part13.test_many_rows import TOLERANCE
from tests.part13.test_paged_attention import DEVICE
from tests.part16.mixed_steps import POLICIES, Policy, kinds_of
from tests.part16.test_speculative_engine import Preemptions

VOCAB, P, MAX_LEN, ROWS = 50, 4, 40, 8
LENGTH = 20  # of an engine's texts, at most


def made(folder, **options):
    options = {"n_head": 3, "n_embd": 48, "n_layer": 1, "n_positions": MAX_LEN} | options
    theirs = random_gpt2(vocab_size=VOCAB, tie_word_embeddings=False, **options)
    return load_model(save(theirs, folder), DEVICE, "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def relu_model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("relu"), activation_function="relu", seed=3)


def prompt(name: str, length: int) -> list[int]:
    return [(ord(name) * 7 + 3 * i) % VOCAB for i in range(length)]


def in_rows(model, memory, rows):
    """As `verifying_steps`, but one row alone as well: its own way is Part 13's, and slow in the
    interpreter.
    """
    many = VerifyRows(model, list(memory.keys), list(memory.values), rows)
    return lambda _: many


def graph_way(model, memory, last, make_steps=verifying_steps, rows: int = ROWS, max_new=MAX_NEW_TOKENS):
    step, width = make_steps(model, memory, rows), -(-MAX_LEN // P)
    return GraphWay(DecodeGraphs(step, last, VOCAB, rows, width, capture=False), VOCAB, max_new)


def memory_of(model, blocks: int = 40) -> PageMemory:
    return PageMemory(model.config, blocks, P, DEVICE)


def last_of(rows: int = ROWS) -> LastTokens:
    return LastTokens(rows, torch.device(DEVICE))


# Each pass: name -> its new tokens (those of the prompt are there), and how many behind them are drafts.
PASSES = [
    {"a": 5, "b": 3},  # a short prompt is rows like any other
    {"a": (2, 3), "c": 6, "b": (4,)},  # two drafts; more tokens than rows
    {"a": (7, 9, 11), "b": (1, 2, 3, 4)},  # a's first pass has guesses that did not stand: written over
    {"c": (5, 6), "a": (8,)},
    {"b": (3,), "c": (4,)},
]


def record(plan, *work) -> Batch:
    """Of the step of these (request, new tokens)."""
    for request, n in work:
        assert plan.reserve(request, request.num_computed_tokens + n)
    return Queues(plan).make_step(work).batch


def played(model, memory: PageMemory, ways: list) -> tuple[list[torch.Tensor], list[int]]:
    """The logits of PASSES, each by the first way that fits; and which way that was."""
    plan = memory.plan(enable_prefix_caching=False)
    requests = {name: sequence(name, prompt(name, n)) for name, n in {"a": 5, "b": 3, "c": 6}.items()}
    for request in requests.values():
        request.num_computed_tokens = plan.admit(request)
    logits, taken = [], []
    for play in PASSES:
        for name, new in play.items():
            if isinstance(new, tuple):
                requests[name].token_ids.append(new[0])
                requests[name].draft_ids = list(new[1:])
        work = [(requests[name], requests[name].num_tokens_to_compute) for name in play]
        batch = record(plan, *work)
        taken.append(next(i for i, way in enumerate(ways) if way.fits(batch)))
        with torch.inference_mode():
            logits.append(ways[taken[-1]](batch).values.clone())
        for request, _ in work:  # the first draft stands, the others do not
            request.token_ids += request.draft_ids[:1]
            request.draft_ids = []
            request.num_computed_tokens = len(request.token_ids)
    return logits, taken


@pytest.mark.parametrize(
    ("name", "plain_rows"), [("model", 0), ("relu_model", 0), ("relu_model", 1), ("relu_model", 4)]
)
def test_every_pass_gives_the_logits_of_the_models_forward_pass(name, plain_rows, request):
    model = request.getfixturevalue(name)
    memory, last = memory_of(model), last_of()
    eager, make = EagerWay(model, memory, upload=last.upload), in_rows if name == "model" else verifying_steps
    ways = [graph_way(model, memory, last, make), eager]
    if plain_rows:
        ways.insert(0, graph_way(model, memory, last, plain_steps, plain_rows, max_new=1))
    found, taken = played(model, memory, ways)
    other = memory_of(model)
    wanted, _ = played(model, other, [EagerWay(model, other)])
    for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert got.shape == want.shape, f"pass {i}: a row for each token whose successor is wanted"
        assert torch.allclose(got, want, atol=TOLERANCE), f"pass {i}: rows see the rows above"
    rows = len(ways) - 2
    plain = 0 if plain_rows > 1 else rows
    assert taken == [rows, rows + 1, rows, rows, plain], "more rows than there are go the usual way"


def test_long_passes_go_the_usual_way(relu_model):
    memory = memory_of(relu_model)
    for tokens, rows, fits in ((ROWS, ROWS, True), (ROWS + 1, ROWS, False), (MAX_NEW_TOKENS + 1, 64, False)):
        request, plan = sequence("a", [i % VOCAB for i in range(tokens)]), memory.plan()
        request.num_computed_tokens = plan.admit(request)
        way = graph_way(relu_model, memory, last_of(rows), rows=rows)
        assert way.fits(record(plan, (request, tokens))) == fits, (
            "no more tokens than the largest graph has rows, nor more of one sequence than see one another"
        )


def test_a_pass_is_computed_by_the_fastest_way_that_fits_the_model(model, relu_model):
    make = verifying_steps(model, memory_of(model), 4)
    assert [type(make(rows)) for rows in (1, 2, 4)] == [SingleRow, VerifyRows, VerifyRows]
    make = verifying_steps(relu_model, memory_of(relu_model), 4)
    assert [type(make(rows)) for rows in (1, 4)] == [ModelStep, ModelStep]


@pytest.mark.parametrize(
    ("seats", "new", "budget", "rows"),
    [(1, 5, 512, 5), (16, 5, 512, 80), (16, 5, 64, 64), (256, 5, 8192, 256), (300, 2, 8192, 300)],
)
def test_the_largest_graph_has_a_row_for_each_sequence_and_for_drafts_as_far_as_it_pays(
    seats, new, budget, rows
):
    assert num_rows(seats, new, budget) == rows


@pytest.fixture(scope="module")
def draft(model, tmp_path_factory):
    """It often says what the target says."""
    made_ = made(tmp_path_factory.mktemp("draft"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made_.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(DEVICE)
            parameter += 0.3 * parameter.std(correction=0) * noise
    return made_


def runner_of(model, memory, how: str, make_steps=in_rows) -> ModelRunner:
    """`how`: "graphs" computes passes of few rows over fixed buffers."""
    last = last_of()
    ways = [EagerWay(model, memory, upload=last.upload)]
    if how == "graphs":
        ways.insert(0, graph_way(model, memory, last, make_steps))
    return ModelRunner(ways, memory, last_tokens=last)


def engine_of(
    model, draft, how: str, blocks: int = 40, max_model_len: int = LENGTH,
    lengths: DraftLengths | None = None, make_steps=in_rows,
) -> LLMEngine:  # fmt: skip
    """`how`: "plain" proposes nothing; "eager" and "graphs" do. With a policy, steps run ahead as well."""
    memory, second, draft_probs = memory_of(model, blocks), memory_of(draft, blocks), DraftProbs()
    plan = memory.plan(enable_prefix_caching=False)
    runner, capabilities = runner_of(model, memory, how, make_steps), []
    runner.scores = [*logprobs_of(TOKENIZER, model.logits)]
    scheduler = ContinuousScheduler(plan, 3, 9, select_rows=scored_rows)
    if how != "plain":
        runner.select = RejectionSampler(draft_probs)
        runner.before.append(lambda batch: second.apply(batch.copies))
        reader = runner_of(draft, second, how, make_steps)
        reader.select = DraftSampler(draft_probs)
        proposer = DraftModel(reader, plan, draft.config.max_positions)
        capabilities.append(Speculation(proposer, scheduler, lengths or DraftLengths(2, ALWAYS_DRAFT)))
    engine_class = AheadEngine if lengths else LLMEngine
    engine = engine_class(
        TOKENIZER, model.config, scheduler, runner, supports=SUPPORTS, max_model_len=max_model_len,
        capabilities=capabilities,
    )  # fmt: skip
    if lengths:
        engine.listeners.add(lengths)
    return engine


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
DRAWN = partial(SamplingParams, temperature=0.8, max_tokens=5, ignore_eos=True, top_p=0.9)
PROMPTS = {"a": 3, "b": 11, "c": 1}


def told(engine: LLMEngine, params) -> dict[str, list[int]]:
    for i, (name, n) in enumerate(PROMPTS.items()):
        engine.add_request(name, prompt(name, n), params[i])
    done = run_to_end(engine)
    assert [output.error for output in done.values() if output.error] == []
    assert_idle(engine)
    return {name: output.outputs[0].token_ids for name, output in done.items()}


def test_greedy_text_is_the_targets_own(model, draft):
    """A prompt comes in chunks, of the drafts some stand, and memory is short."""
    want = told(engine_of(model, draft, "plain"), [GREEDY] * 3)
    engine = engine_of(model, draft, "graphs", blocks=LENGTH // P)
    engine.listeners.add(preemptions := Preemptions())
    assert told(engine, [GREEDY] * 3) == want
    tally = engine.capabilities[0].tally
    assert 0 < tally.accepted < tally.proposed, "drafts that stand, and drafts that do not"
    assert preemptions.count > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_one_ahead_a_row_that_goes_on_finds_its_new_block(relu_model, policy):
    """Each has the last step's token as its next, as a draft model's passes do; but blocks of 4 tokens come
    with the tokens, so no pass may go on with the tables of the last one.
    """
    long = SamplingParams(temperature=0, max_tokens=22, ignore_eos=True)
    params = [long, SamplingParams(temperature=0.8, seed=3, max_tokens=19, ignore_eos=True), long]
    plain = engine_of(relu_model, relu_model, "plain", max_model_len=MAX_LEN)
    want = told(plain, params)
    lengths = Policy(POLICIES[policy], 2)
    engine = engine_of(
        relu_model, relu_model, "graphs", max_model_len=MAX_LEN, lengths=lengths, make_steps=verifying_steps
    )
    kinds = kinds_of(engine)
    assert told(engine, params) == want
    assert ("ahead" in kinds, "drafts" in kinds) == (policy != "always", policy != "never")


@pytest.mark.parametrize("named", [False, True], ids=["", "a seed named"])
def test_drawn_text_is_that_of_passes_without_graphs(model, draft, named, monkeypatch):
    monkeypatch.setattr("engine.core.submission.seed_of", lambda params: params.seed or 5)
    params = [DRAWN(seed=i if named else None) for i in range(3)]
    want = told(engine_of(model, draft, "eager"), params)
    assert told(engine_of(model, draft, "graphs"), params) == want


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"temperature": 0.9}, {"presence_penalty": 0.5}],
    ids=["greedy", "drawn", "penalties are counted on the host"],
)
def test_proposals_are_those_of_passes_without_graphs(relu_model, params):
    """Two go on with one token each, over blocks' ends, until only one is left; then that one goes on."""
    found = []
    for how in ("graphs", "eager"):
        memory, draft_probs = memory_of(relu_model), DraftProbs()
        plan, inputs = memory.plan(), []
        reader = runner_of(relu_model, memory, how, verifying_steps)
        reader.select = DraftSampler(draft_probs)
        proposer = DraftModel(reader, plan, MAX_LEN)
        for name, n, most in (("a", 3, 6), ("b", 2, 3)):
            request = sequence(name, prompt(name, n))
            settings = SamplingParams(**{"temperature": 0} | params)
            request.params = settings
            request.sampling = SamplingState(settings, request.token_ids, [], 7)
            plan.admit(request)
            assert plan.reserve(request, n + 6)
            inputs.append(ProposerInput(request, request.token_ids, most))
        guesses = proposer.propose(inputs)
        drawn = [[draft_probs.get(name, place) is not None for place in range(7)] for name in "ab"]
        found.append((guesses, dict(plan.draft_progress), drawn))
    assert found[0] == found[1]
