"""Decode steps over fixed buffers: the model's own logits, whatever was in the buffers before."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.ahead import AheadEngine, AheadExecutor, LastTokens
from engine.batch import Batch
from engine.cache.paged import PagedCache
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import NO_TOKEN
from engine.executor import Executor, ModelForward
from engine.graphs import DecodeGraphs, GraphForward, ModelStep, ladder, steps
from engine.kernels.many_rows import ManyRows
from engine.kernels.single_row import SingleRow
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.request import PLACEHOLDER
from engine.scheduling.scheduler import take
from tests.part01.reference import random_gpt2, save
from tests.part06.fakes import TOKENIZER, assert_idle, run_to_end
from tests.part12.pages import sequence
from tests.part13.test_many_rows import TOLERANCE
from tests.part13.test_paged_attention import DEVICE

VOCAB, P, MAX_LEN = 50, 4, 30
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=4, ignore_eos=True)
MODELS = {
    "fits": {},
    "another activation": {"activation_function": "relu", "seed": 3},  # no parrot
    "odd heads": {"n_head": 1},  # 48 wide: no power of two
    "narrow heads": {"n_head": 6},  # 8 wide: a GPU's product takes 16 at least
}


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9]),
     (24, [1, 2, 4, 8, 16, 24]), (30, [1, 2, 4, 8, 16, 24, 30])],
)  # fmt: skip
def test_the_ladder_is_vllms_and_ends_with_the_most_there_may_be(most, sizes):
    assert ladder(most) == sizes


def made(tmp_path_factory, name: str):
    options = {"n_head": 3, "n_embd": 48, "n_layer": 1, "n_positions": MAX_LEN} | MODELS[name]
    theirs = random_gpt2(vocab_size=VOCAB, tie_word_embeddings=False, **options)
    return load_model(save(theirs, tmp_path_factory.mktemp("gpt2")), DEVICE, "float32")


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return made(tmp_path_factory, request.param)


class Told:
    """Sequences whose prompts are computed, in a cache of their own, and told token by token what comes."""

    def __init__(self, model, prompts: dict[str, int]) -> None:
        self.cache = PagedCache(model.config, 40, P, DEVICE, enable_prefix_caching=False)
        self.model, self.requests = model, {}
        for name, length in prompts.items():
            ids = [(ord(name) * 7 + 3 * i) % VOCAB for i in range(length)]
            request = self.requests[name] = sequence(name, ids)
            request.sampling.temperature = 0
            request.num_computed_tokens = self.cache.begin(request)
        ModelForward(model, self.cache)(self.batch(*prompts))

    def batch(self, *names: str) -> Batch:
        work = [(self.requests[name], self.requests[name].num_tokens_to_compute) for name in names]
        for request, n in work:
            assert self.cache.reserve(request, request.num_computed_tokens + n)
        return take(work)

    def tell(self, token_id: int, *names: str) -> Batch:
        """The step in which each of them has one new token."""
        for name in names:
            self.requests[name].token_ids.append(token_id)
            token_id = (token_id + 11) % VOCAB
        return self.batch(*names)


def graph_forward(told: Told, max_rows: int = 5) -> GraphForward:
    last = LastTokens(max_rows, torch.device(DEVICE))
    return GraphForward(told.model, told.cache, last, MAX_LEN, capture=False)


PROMPTS = {"a": 3, "b": 9, "c": 1, "d": MAX_LEN - 5}
PLAY = [("a",), ("b", "d", "c", "a"), ("c", "d", "a"), ("d",), ("c", "b")]


def test_every_step_gives_the_logits_of_the_models_forward_pass(model, wide_tiles):
    """In sizes 1, 4, 4, 1 and 2, larger and smaller by turns."""
    mine, theirs = Told(model, PROMPTS), Told(model, PROMPTS)
    forward, plain = graph_forward(mine), ModelForward(model, theirs.cache)
    for i, names in enumerate(PLAY):
        batch = mine.tell(i, *names)
        got, want = forward(batch), plain(theirs.tell(i, *names))
        assert got.shape == want.shape
        assert torch.allclose(got, want, atol=TOLERANCE), f"step {i} of {len(names)} sequences"
        assert torch.equal(forward.choose(got, batch), want.argmax(-1)), "the likeliest tokens are chosen"
    assert torch.allclose(mine.cache.memory, theirs.cache.memory, atol=1e-4), "the same keys are stored"


def test_a_model_is_run_by_the_fastest_way_that_fits_it(model):
    make = steps(model, Told(model, {"a": 1}).cache, max_rows=4)
    fits = model.config.activation == "gelu_new" and model.config.head_dim == 16
    assert [type(make(rows)) for rows in (1, 2, 4)] == (
        [SingleRow, ManyRows, ManyRows] if fits else [ModelStep] * 3
    )


class Looking:
    """A step that computes nothing, and writes down what it is given."""

    def __init__(self) -> None:
        self.given: list[list] = []

    def __call__(self, token_ids, positions, slots, tables, lens) -> torch.Tensor:
        self.given.append([x.tolist() for x in (token_ids, positions, slots, lens, tables)])
        return torch.nn.functional.one_hot(positions.long() + 1, VOCAB).float()  # chosen: position + 1


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    return made(tmp_path_factory, "fits")


@pytest.fixture(scope="module")
def relu_model(tmp_path_factory):
    return made(tmp_path_factory, "another activation")


def watched(told: Told, max_rows: int = 8) -> tuple[DecodeGraphs, Looking, LastTokens]:
    last, look = LastTokens(max_rows, torch.device(DEVICE)), Looking()
    width = told.cache.num_blocks_for(MAX_LEN)
    return DecodeGraphs(lambda rows: look, last, VOCAB, max_rows, width, capture=False), look, last


def test_rows_beyond_the_steps_sequences_are_nobodys_whatever_was_there_before(plain_model):
    told = Told(plain_model, {name: 5 + i for i, name in enumerate("abcdefgh")})
    graphs, look, _ = watched(told)
    sizes = []
    for i, names in enumerate(["abcdefgh", "hgfedcba", "abc", "cba", "fgh", "abcde", "abc"]):
        graphs(told.tell(40 + i, *names), told.cache)
        token_ids, positions, slots, lens, _ = look.given[-1]
        S, size = len(names), len(lens)
        sizes.append(size)
        assert token_ids[S:] == [0] * (size - S), "a row of nobody reads token 0"
        assert positions[S:] == [0] * (size - S), "and position 0, which there always is"
        assert slots[S:] == [-1] * (size - S), "stores nothing"
        assert lens[S:] == [0] * (size - S), "and attends to nothing"
    assert sizes == [8, 8, 4, 4, 4, 8, 4], "each step runs in the smallest size that holds it"


def test_a_step_gets_its_sequences_own_numbers(plain_model):
    told = Told(plain_model, {"a": 9, "b": 2, "c": 12})
    graphs, look, last = watched(told)
    logits = graphs(told.tell(21, "c", "a", "b"), told.cache)
    token_ids, positions, slots, lens, tables = look.given[-1]
    blocks = [told.cache.held[name].table.blocks.tolist() for name in "cab"]
    assert token_ids[:3] == [21, 32, 43]
    assert positions[:3] == [12, 9, 2]
    assert lens[:3] == [13, 10, 3]
    assert slots[:3] == [own[p // P] * P + p % P for own, p in zip(blocks, positions, strict=False)], (
        "a token lies in its sequence's block, at its place in it"
    )
    assert all(row[: len(own)] == own for row, own in zip(tables, blocks, strict=False))
    assert logits.shape == (3, VOCAB), "nobody's rows have no logits"
    assert last.chosen[:3].tolist() == [13, 10, 3], "the likeliest tokens"


def test_the_last_steps_numbers_stay_on_the_host_while_the_next_ones_are_written(plain_model):
    """The device may still be reading them."""
    told = Told(plain_model, {"a": 9, "b": 2})
    graphs, _, _ = watched(told)
    written = []
    for i in range(4):
        before = [numbers.clone() for numbers in graphs._host]
        graphs(told.tell(20 + i, "a", "b"), told.cache)
        written.append([not torch.equal(*pair) for pair in zip(before, graphs._host, strict=True)])
    assert written in ([[True, False], [False, True]] * 2, [[False, True], [True, False]] * 2)


def test_a_placeholder_is_the_token_that_was_chosen_in_the_step_before(plain_model):
    told = Told(plain_model, {"a": 9, "b": 2, "c": 12})
    graphs, look, last = watched(told)
    last.chosen[:3] = torch.tensor([30, NO_TOKEN, 32])
    batch = told.tell(21, "c", "b", "a")
    last.remember(batch, last.chosen[:3])
    for name, token_id in {"a": PLACEHOLDER, "b": PLACEHOLDER, "c": 25}.items():
        told.requests[name].token_ids.append(token_id)
    graphs(told.batch("a", "b", "c"), told.cache)
    # Who chose no token reads token 0 until the engine lets it fail.
    assert look.given[-1][0][:3] == [32, 0, 25]


def test_a_step_with_several_tokens_of_somebody_goes_the_usual_way(plain_model):
    mine, theirs = Told(plain_model, {"a": 9, "b": 2}), Told(plain_model, {"a": 9, "b": 2})
    forward, plain = graph_forward(mine), ModelForward(plain_model, theirs.cache)
    forward.graphs = None
    for told in (mine, theirs):
        told.requests["a"].token_ids += [4, 5, 6]
    batch = mine.tell(8, "a", "b")
    got = forward(batch)
    assert torch.allclose(got, plain(theirs.tell(8, "a", "b")), atol=1e-5)
    assert torch.equal(forward.choose(got, batch), got.argmax(-1)), "chosen from these logits"


def test_a_step_with_somebody_whose_prompt_is_not_complete_goes_the_usual_way(plain_model):
    """A chunk of one token looks like a decode step, but nothing is chosen from it."""
    told = Told(plain_model, {"a": 9, "b": 2})
    forward = graph_forward(told)
    forward.graphs = None
    a, b = told.requests.values()
    a.token_ids.append(5)
    b.token_ids += [4, 5, 6]
    assert told.cache.reserve(a, 10)
    assert told.cache.reserve(b, 3)
    assert len(forward(take([(a, 1), (b, 1)]))) == 1


def test_a_sampled_or_adjusted_row_is_not_chosen_by_the_graph(plain_model):
    told = Told(plain_model, {"a": 9, "b": 2})
    forward = graph_forward(told)
    batch = told.tell(3, "a", "b")
    logits = forward(batch)
    likeliest = logits.argmax(-1).tolist()
    assert forward.choose(logits, batch).tolist() == likeliest
    forward.last.chosen.fill_(49)  # the graph's choice, told apart
    assert forward.choose(logits, batch).tolist() == [49, 49]
    assert forward.choose(logits.clone(), batch).tolist() == likeliest, "other logits: another choice"
    batch.requests[0].sampling.temperature = 1e-5
    assert forward.choose(logits, batch).tolist() == likeliest, "a sampled row is drawn"
    batch.requests[0].sampling.temperature = 0
    batch.requests[1].sampling.is_adjusted = True
    assert forward.choose(logits, batch).tolist() == likeliest, "a penalty is no business of the graph"


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_one_step_ahead_gives_the_tokens_of_one_step_at_a_time(relu_model, params):
    """The next step's tokens are chosen in the place where the last one's were: those have been read."""
    prompts = {name: [(ord(name) * 7 + 3 * i) % VOCAB for i in range(n)] for name, n in PROMPTS.items()}
    scheduler_for = partial(ContinuousScheduler, max_num_seqs=3, max_num_batched_tokens=8)

    def told(engine: LLMEngine) -> dict[str, list[int]]:
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, params)
        done = run_to_end(engine)
        assert [output.error for output in done.values() if output.error] == []
        assert_idle(engine)
        return {name: output.outputs[0].token_ids for name, output in done.items()}

    cache = PagedCache(relu_model.config, 20, P, DEVICE)
    executor = Executor(ModelForward(relu_model, cache))
    want = told(LLMEngine(TOKENIZER, relu_model.config, scheduler_for(cache), executor))
    assert all(len(set(tokens)) > 2 for tokens in want.values()), "tokens that tell a mistake"
    cache, last = PagedCache(relu_model.config, 20, P, DEVICE), LastTokens(3, torch.device(DEVICE))
    forward = GraphForward(relu_model, cache, last, MAX_LEN, capture=False)
    executor = AheadExecutor(forward, TOKENIZER, last, sampler=forward.choose)
    assert told(AheadEngine(TOKENIZER, relu_model.config, scheduler_for(cache), executor)) == want
