"""Decode steps over fixed buffers: the model's own logits, whatever was in the buffers before."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.cache.memory import PageMemory
from engine.core.ahead import AheadEngine
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import NO_TOKEN
from engine.decoding.sampling_state import SamplingState
from engine.execution.graphs import DecodeGraphs, GraphWay, ModelStep, fastest_steps, ladder
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner, choose
from engine.kernels.many_rows import ManyRows
from engine.kernels.single_row import SingleRow
from engine.models.loader import load_model
from engine.requests.batch import PLACEHOLDER, Batch
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scheduler import Queues
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
    """Sequences whose prompts are computed, in a memory of their own, and told token by token what comes."""

    def __init__(self, model, prompts: dict[str, int]) -> None:
        self.memory = PageMemory(model.config, 40, P, DEVICE)
        self.cache = self.memory.plan(enable_prefix_caching=False)
        self.model, self.requests = model, {}
        for name, length in prompts.items():
            ids = [(ord(name) * 7 + 3 * i) % VOCAB for i in range(length)]
            request = self.requests[name] = sequence(name, ids)
            request.sampling = SamplingState(GREEDY, ids, [], 0)
            request.num_computed_tokens = self.cache.admit(request)
        self.eager(self.batch(*prompts))

    def eager(self, batch: Batch) -> torch.Tensor:
        """logits[R, V], by the model's own forward pass."""
        with torch.inference_mode():
            return EagerWay(self.model, self.memory)(batch).values

    def batch(self, *names: str) -> Batch:
        return self.record(*((name, self.requests[name].num_tokens_to_compute) for name in names))

    def record(self, *work: tuple[str, int]) -> Batch:
        """Of the step of these (name, new tokens)."""
        chosen = [(self.requests[name], n) for name, n in work]
        for request, n in chosen:
            assert self.cache.reserve(request, request.num_computed_tokens + n)
        return Queues(self.cache).make_step(chosen).batch

    def tell(self, token_id: int, *names: str) -> Batch:
        """The step in which each of them has one new token."""
        for name in names:
            self.requests[name].token_ids.append(token_id)
            token_id = (token_id + 11) % VOCAB
        return self.batch(*names)


def graph_way(model, memory: PageMemory, last: LastTokens) -> GraphWay:
    rows, width = len(last.chosen), -(-MAX_LEN // P)
    return GraphWay(
        DecodeGraphs(fastest_steps(model, memory, rows), last, VOCAB, rows, width, capture=False), VOCAB
    )


def way_of(told: Told, max_rows: int = 5) -> GraphWay:
    return graph_way(told.model, told.memory, LastTokens(max_rows, torch.device(DEVICE)))


PROMPTS = {"a": 3, "b": 9, "c": 1, "d": MAX_LEN - 5}
PLAY = [("a",), ("b", "d", "c", "a"), ("c", "d", "a"), ("d",), ("c", "b")]


def test_every_step_gives_the_logits_of_the_models_forward_pass(model, wide_tiles):
    """In sizes 1, 4, 4, 1 and 2, larger and smaller by turns."""
    mine, theirs = Told(model, PROMPTS), Told(model, PROMPTS)
    way = way_of(mine)
    for i, names in enumerate(PLAY):
        batch = mine.tell(i, *names)
        assert way.fits(batch)
        with torch.inference_mode():
            got, want = way(batch), theirs.eager(theirs.tell(i, *names))
        assert got.values.shape == want.shape
        assert torch.allclose(got.values, want, atol=TOLERANCE), f"step {i} of {len(names)} sequences"
        assert torch.equal(choose(got, batch), want.argmax(-1)), "the likeliest tokens are chosen"
    assert torch.allclose(mine.memory.memory, theirs.memory.memory, atol=1e-4), "the same keys are stored"


def test_a_model_is_run_by_the_fastest_way_that_fits_it(model):
    make = fastest_steps(model, Told(model, {"a": 1}).memory, max_rows=4)
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
    width = -(-MAX_LEN // P)
    return DecodeGraphs(lambda rows: look, last, VOCAB, max_rows, width, capture=False), look, last


def test_rows_beyond_the_steps_sequences_are_padding_whatever_was_there_before(plain_model):
    told = Told(plain_model, {name: 5 + i for i, name in enumerate("abcdefgh")})
    graphs, look, _ = watched(told)
    sizes = []
    for i, names in enumerate(["abcdefgh", "hgfedcba", "abc", "cba", "fgh", "abcde", "abc"]):
        graphs(told.tell(40 + i, *names))
        token_ids, positions, slots, lens, _ = look.given[-1]
        S, size = len(names), len(lens)
        sizes.append(size)
        assert token_ids[S:] == [0] * (size - S), "a padding row reads token 0"
        assert positions[S:] == [0] * (size - S), "and position 0, which there always is"
        assert slots[S:] == [-1] * (size - S), "stores nothing"
        assert lens[S:] == [0] * (size - S), "and attends to nothing"
    assert sizes == [8, 8, 4, 4, 4, 8, 4], "each step runs in the smallest size that holds it"


def test_a_step_gets_its_sequences_own_numbers(plain_model):
    told = Told(plain_model, {"a": 9, "b": 2, "c": 12})
    graphs, look, _ = watched(told)
    logits = graphs(told.tell(21, "c", "a", "b"))
    token_ids, positions, slots, lens, tables = look.given[-1]
    blocks = [told.cache.allocations[name].table.blocks.tolist() for name in "cab"]
    assert token_ids[:3] == [21, 32, 43]
    assert positions[:3] == [12, 9, 2]
    assert lens[:3] == [13, 10, 3]
    assert slots[:3] == [own[p // P] * P + p % P for own, p in zip(blocks, positions, strict=False)], (
        "a token lies in its sequence's block, at its place in it"
    )
    assert all(row[: len(own)] == own for row, own in zip(tables, blocks, strict=False))
    assert logits.shape == (3, VOCAB), "padding has no logits"
    assert graphs.likeliest[:3].tolist() == [13, 10, 3], "the likeliest tokens"


def test_the_last_steps_numbers_stay_on_the_host_while_the_next_ones_are_written(plain_model):
    """The device may still be reading them."""
    told = Told(plain_model, {"a": 9, "b": 2})
    graphs, _, _ = watched(told)
    written = []
    for i in range(4):
        before = [numbers.clone() for numbers in graphs._host]
        graphs(told.tell(20 + i, "a", "b"))
        written.append([not torch.equal(*pair) for pair in zip(before, graphs._host, strict=True)])
    assert written in ([[True, False], [False, True]] * 2, [[False, True], [True, False]] * 2)


def test_a_placeholder_is_the_token_that_was_chosen_in_the_step_before(plain_model):
    told = Told(plain_model, {"a": 9, "b": 2, "c": 12})
    graphs, look, last = watched(told)
    last.remember(told.tell(21, "c", "b", "a"), torch.tensor([30, NO_TOKEN, 32], device=DEVICE))
    for name, token_id in {"a": PLACEHOLDER, "b": PLACEHOLDER, "c": 25}.items():
        told.requests[name].token_ids.append(token_id)
    graphs(told.batch("a", "b", "c"))
    # Who chose no token reads token 0 until the engine lets it fail.
    assert look.given[-1][0][:3] == [32, 0, 25]


def test_a_step_with_several_tokens_of_one_sequence_goes_another_way(plain_model):
    """Unless the graphs' step lets them see one another (Part 16)."""
    told = Told(plain_model, {"a": 9, "b": 2})
    way = way_of(told, max_rows=8)
    told.requests["a"].token_ids += [4, 5, 6]
    batch = told.tell(8, "a", "b")
    assert not way.fits(batch)
    assert not GraphWay(way.graphs, VOCAB, max_new=3).fits(batch), "4 new tokens of a"
    assert GraphWay(way.graphs, VOCAB, max_new=4).fits(batch)


def test_a_step_of_more_rows_than_there_is_a_graph_for_goes_another_way(plain_model):
    told = Told(plain_model, dict.fromkeys("abc", 3))
    way = way_of(told, max_rows=2)
    assert way.fits(told.tell(5, "a", "b"))
    assert not way.fits(told.tell(5, "a", "b", "c"))


def test_a_step_whose_prompt_rows_are_scored_goes_another_way(plain_model):
    """These rows stop before the output layer (Part 10), which is in the graph."""
    told = Told(plain_model, {"a": 9})
    batch = told.tell(3, "a")
    scored = replace(batch, rows=replace(batch.rows, prompt_rows=(0,), prompt_ids=(5,), prompt_counts=(1,)))
    assert way_of(told).fits(batch)
    assert not way_of(told).fits(scored)


def test_a_row_inside_a_prompt_is_computed_and_nothing_is_chosen_from_it(plain_model):
    """A chunk of one token is a row like any other."""
    mine, theirs = (Told(plain_model, {"a": 9, "b": 2}) for _ in range(2))
    for told in (mine, theirs):
        told.requests["a"].token_ids.append(5)
        told.requests["b"].token_ids += [4, 5, 6]
    batch, work = mine.record(("b", 1), ("a", 1)), theirs.record(("b", 1), ("a", 1))
    way = way_of(mine)
    assert way.fits(batch)
    with torch.inference_mode():
        got, want = way(batch), theirs.eager(work)
    assert got.values.shape == (1, VOCAB)
    assert torch.allclose(got.values, want, atol=TOLERANCE), "a's row, not b's"
    assert got.likeliest.tolist() == want.argmax(-1).tolist()


def test_a_sampled_or_adjusted_row_is_not_chosen_by_the_graph(plain_model):
    told = Told(plain_model, {"a": 9, "b": 2})
    batch = told.tell(3, "a", "b")
    with torch.inference_mode():
        logits = way_of(told)(batch)
    likeliest = logits.values.argmax(-1).tolist()
    assert choose(logits, batch).tolist() == likeliest
    logits = logits._replace(
        likeliest=torch.full_like(logits.likeliest, 49)
    )  # the graph's choice, told apart
    assert choose(logits, batch).tolist() == [49, 49]
    greedy = batch.draws.rows[0]
    sampled = replace(greedy, temperature=1e-5)
    ids, factors = np.array([0]), np.array([[0, 1, 0]], dtype=np.float32)
    adjusted = replace(greedy, is_adjusted=True, tokens=ids, factors=factors)
    for why, draw in {
        "a sampled row is drawn": sampled,
        "penalties are no business of the graph": adjusted,
    }.items():
        other = replace(batch, draws=replace(batch.draws, rows=(greedy, draw)))
        assert choose(logits, other).tolist() == likeliest, why


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

    memory = PageMemory(relu_model.config, 20, P, DEVICE)
    runner = ModelRunner([EagerWay(relu_model, memory)], memory)
    want = told(LLMEngine(TOKENIZER, relu_model.config, scheduler_for(memory.plan()), runner))
    assert all(len(set(tokens)) > 2 for tokens in want.values()), "tokens that tell a mistake"
    memory, last = PageMemory(relu_model.config, 20, P, DEVICE), LastTokens(3, torch.device(DEVICE))
    ways = [graph_way(relu_model, memory, last), EagerWay(relu_model, memory, upload=last.upload)]
    runner = ModelRunner(ways, memory, last_tokens=last)
    assert told(AheadEngine(TOKENIZER, relu_model.config, scheduler_for(memory.plan()), runner)) == want
