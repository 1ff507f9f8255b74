"""Passes with several tokens of a sequence, over fixed buffers: the model's own logits, and its own text."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.cache.paged import PagedCache
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SamplingState
from engine.executor import ModelForward
from engine.graphs import GraphForward, ModelStep
from engine.graphs import steps as plain_steps
from engine.kernels.single_row import SingleRow
from engine.kernels.verify_attend import MOST_NEW
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scheduler import take
from engine.scoring import ScoringExecutor
from engine.speculation.ahead import AheadSpeculativeEngine, AheadSpeculativeExecutor, RememberingExecutor
from engine.speculation.draft_model import DraftModel
from engine.speculation.executor import SpeculativeExecutor
from engine.speculation.graphs import PassGraphs, RowsForward, VerifyRows, num_rows, steps
from engine.speculation.paired import PairedCache
from engine.speculation.verify import Verifier
from tests.part01.reference import random_gpt2, save
from tests.part06.fakes import TOKENIZER, assert_idle, run_to_end
from tests.part12.pages import sequence
from tests.part13.test_many_rows import TOLERANCE
from tests.part13.test_paged_attention import DEVICE
from tests.part16.mixed_steps import POLICIES, Policy, kinds_of
from tests.part16.test_speculative_engine import Always, Preemptions

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


def in_rows(model, cache, rows):
    """As `steps`, but one row alone as well: its own way is Part 13's, and slow in the interpreter."""
    many = VerifyRows(model, list(cache.keys), list(cache.values), rows)
    return lambda _: many


def rows_forward(model, cache, make_steps=steps, rows: int = ROWS, **options) -> RowsForward:
    return RowsForward(model, cache, rows, MAX_LEN, capture=False, make_steps=make_steps, **options)


def cache_of(model, blocks: int = 40, **kernels) -> PagedCache:
    return PagedCache(model.config, blocks, P, DEVICE, enable_prefix_caching=False, **kernels)


# Each pass: name -> its new tokens (those of the prompt are there), and how many behind them are drafts.
PASSES = [
    {"a": 5, "b": 3},  # a short prompt is rows like any other
    {"a": (2, 3), "c": 6, "b": (4,)},  # two drafts; more tokens than rows
    {"a": (7, 9, 11), "b": (1, 2, 3, 4)},  # a's first pass has guesses that did not stand: written over
    {"c": (5, 6), "a": (8,)},
    {"b": (3,), "c": (4,)},
]


def plain_passes(forward: RowsForward) -> list[int]:
    """The tokens of each pass from now on that is computed by the graphs for plain ones."""
    seen, graphs = [], forward.plain

    class Seen:
        sizes = graphs.sizes

        def __call__(self, batch, cache):
            seen.append(batch.num_tokens)
            return graphs(batch, cache)

    forward.plain = Seen()
    return seen


@pytest.mark.parametrize(
    ("name", "plain_rows"), [("model", 0), ("relu_model", 0), ("relu_model", 1), ("relu_model", 4)]
)
def test_every_pass_gives_the_logits_of_the_models_forward_pass(name, plain_rows, request):
    model = request.getfixturevalue(name)
    caches = cache_of(model), cache_of(model)
    plain = {"make_plain": plain_steps, "plain_rows": plain_rows} if plain_rows else {}
    mine = rows_forward(model, caches[0], in_rows if name == "model" else steps, **plain)
    seen = plain_passes(mine) if plain else []
    both = [(caches[0], mine), (caches[1], ModelForward(model, caches[1]))]
    prompts = {"a": 5, "b": 3, "c": 6}
    found = []
    for cache, forward in both:
        found.append([])
        requests = {x: sequence(x, prompt(x, n)) for x, n in prompts.items()}
        for one in requests.values():
            one.num_computed_tokens = cache.begin(one)
        for play in PASSES:
            work = []
            for x, new in play.items():
                one = requests[x]
                if isinstance(new, tuple):
                    one.token_ids.append(new[0])
                    one.draft_ids = list(new[1:])
                n = one.num_tokens_to_compute
                assert cache.reserve(one, one.num_computed_tokens + n)
                work.append((one, n))
            found[-1].append(forward(take(work)).clone())
            for one, _ in work:  # the first draft stands, the others do not
                one.token_ids += one.draft_ids[:1]
                one.draft_ids = []
                one.num_computed_tokens = len(one.token_ids)
    for i, (got, want) in enumerate(zip(*found, strict=True)):
        assert got.shape == want.shape, f"pass {i}: a row for each token whose successor is wanted"
        assert torch.allclose(got, want, atol=TOLERANCE), f"pass {i}: rows see the rows above"
    assert seen == [2] * (plain_rows > 1), "the last pass has one new token of each; others are as small"


def one_pass(model, tokens: int, rows: int) -> RowsForward:
    """A pass of so many tokens of one prompt, which no graph may take."""
    cache = cache_of(model)
    forward = rows_forward(model, cache, rows=rows)
    one = sequence("a", [i % VOCAB for i in range(tokens)])
    one.num_computed_tokens = cache.begin(one)
    assert cache.reserve(one, tokens)
    forward.graphs.__class__ = type("Refusing", (type(forward.graphs),), {"__call__": None})
    return forward(take([(one, tokens)]))


def test_long_passes_go_the_usual_way(relu_model):
    assert len(one_pass(relu_model, ROWS + 1, ROWS)) == 1, "more tokens than the largest graph has rows"
    assert len(one_pass(relu_model, MOST_NEW + 1, 64)) == 1, "more of one sequence than see one another"


def test_a_pass_is_computed_by_the_fastest_way_that_fits_the_model(model, relu_model):
    make = steps(model, cache_of(model), 4)
    assert [type(make(rows)) for rows in (1, 2, 4)] == [SingleRow, VerifyRows, VerifyRows]
    make = steps(relu_model, cache_of(relu_model), 4)
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


def engine_of(model, draft, how: str, blocks: int = 40, max_model_len: int = LENGTH) -> LLMEngine:
    """`how`: "plain" proposes nothing; "eager" and "graphs" do."""
    if how == "plain":
        cache = cache_of(model, blocks)
        executor = ScoringExecutor(ModelForward(model, cache), TOKENIZER)
    else:
        cache = PairedCache(cache_of(model, blocks), cache_of(draft, blocks))
        forward, reading = ModelForward(model, cache.target), None
        if how == "graphs":
            forward = rows_forward(model, cache.target, in_rows)
            reading = rows_forward(draft, cache.draft, in_rows, chains=True)
        proposer = DraftModel(draft, cache, reading)
        inner = ScoringExecutor(forward, TOKENIZER, Verifier(proposer.probs))
        executor = SpeculativeExecutor(inner, cache, proposer, Always(2))
    scheduler = ContinuousScheduler(cache, 3, 9)
    return LLMEngine(
        TOKENIZER, model.config, scheduler, executor, supports=SUPPORTS, max_model_len=max_model_len
    )


def ahead_of(model, draft, policy: str) -> AheadSpeculativeEngine:
    """Steps ahead, and drafts when `policy` says so, in the steps that graphs would record."""
    cache = PairedCache(cache_of(model), cache_of(draft))
    forward = rows_forward(model, cache.target)
    proposer = DraftModel(draft, cache, rows_forward(draft, cache.draft, chains=True))
    verifier = Verifier(proposer.probs, forward.choose)
    inner = RememberingExecutor(forward, TOKENIZER, forward.last, sampler=verifier)
    executor = AheadSpeculativeExecutor(inner, cache, proposer, Policy(POLICIES[policy], 2))
    scheduler = ContinuousScheduler(cache, 3, 9)
    return AheadSpeculativeEngine(
        TOKENIZER, model.config, scheduler, executor, supports=SUPPORTS, max_model_len=MAX_LEN
    )


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
    tally = engine.executor.tally
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
    engine = ahead_of(relu_model, relu_model, policy)
    kinds = kinds_of(engine)
    assert told(engine, params) == want
    assert ("ahead" in kinds, "drafts" in kinds) == (policy != "always", policy != "never")
    chosen = engine.executor.inner.forward.choose
    assert chosen.__func__ is GraphForward.choose, "the graph's own choice is taken where it can be"


@pytest.mark.parametrize("named", [False, True], ids=["", "a seed named"])
def test_drawn_text_is_that_of_passes_without_graphs(model, draft, named, monkeypatch):
    monkeypatch.setattr("engine.llm_engine.new_seed", lambda params: params.seed or 5)
    params = [DRAWN(seed=i if named else None) for i in range(3)]
    want = told(engine_of(model, draft, "eager"), params)
    assert told(engine_of(model, draft, "graphs"), params) == want


@pytest.mark.parametrize(
    ("params", "again"),
    [({"temperature": 0}, [2, 1, 1]), ({"temperature": 0.9}, [2, 1, 1]), ({"presence_penalty": 0.5}, [])],
    ids=["greedy", "drawn", "penalties are counted on the host"],
)
def test_proposals_are_those_of_passes_that_the_host_waits_for(relu_model, monkeypatch, params, again):
    """Two go on with one token each, over blocks' ends, until only one is left; then that one goes on."""
    calls = []
    monkeypatch.setattr(
        PassGraphs, "again", lambda self, rows, run=PassGraphs.again: calls.append(rows) or run(self, rows)
    )
    found = []
    for how in ("graphs", "eager"):
        cache = PairedCache(cache_of(relu_model), cache_of(relu_model))
        reading = rows_forward(relu_model, cache.draft, chains=True) if how == "graphs" else None
        proposer, texts = DraftModel(relu_model, cache, reading), []
        for name, n in {"a": 3, "b": 2}.items():
            one = sequence(name, prompt(name, n))
            settings = SamplingParams(**{"temperature": 0} | params)
            one.params, one.sampling = settings, SamplingState(settings, one.token_ids, [], 7)
            cache.begin(one)
            assert cache.reserve(one, n + 6)
            texts.append((one, one.token_ids))
        made_ = proposer.propose(texts, [6, 3])
        found.append((made_, dict(cache.read), dict(cache.guessed), sorted(proposer.probs)))
    assert found[0] == found[1]
    assert calls == again, "rows of passes whose numbers the host did not write"
