"""The draft model and its cache: what it reads, what it proposes, what it says it drew from."""

import pytest
import torch

from engine.cache.memory import PageMemory
from engine.decoding.greedy import FullForward
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import distribution, draw
from engine.decoding.sampling_state import SamplingState
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner
from engine.models.loader import load_model
from engine.requests.request import Request
from engine.speculation.capability import ProposerInput
from engine.speculation.draft_model import DRAFT_SEED, DraftModel, DraftSampler
from engine.speculation.rejection_sampler import DraftProbs

P, TEXT = 8, [300, 310, 265, 280, 301, 299, 350, 420, 265, 333]


@pytest.fixture(scope="module")
def model():
    return load_model("storyteller-draft")


class Watched(DraftModel):
    """Over a plan that no target computes for; it counts the tokens of each pass."""

    def __init__(self, model) -> None:
        memory = PageMemory(model.config, 40, P)
        last, self.draft_probs = LastTokens(4, torch.device("cpu")), DraftProbs()
        way = EagerWay(model, memory, upload=last.upload)
        runner = ModelRunner([way], memory, [self.watch], DraftSampler(self.draft_probs), last_tokens=last)
        super().__init__(runner, memory.plan(), model.config.max_positions)
        self.passes: list[int] = []
        self.broken = False
        self.fails_from: int | None = None  # the number of the first pass that fails

    def watch(self, batch):
        if self.broken or len(self.passes) == self.fails_from:
            raise MemoryError
        self.passes.append(batch.num_tokens)

    def probs(self, name: str, count: int = 9) -> list:
        """What its first output tokens were drawn from, where that is known."""
        found = (self.draft_probs.get(name, position) for position in range(count))
        return [probs for probs in found if probs is not None]


@pytest.fixture
def draft(model):
    return Watched(model)


def request(draft: DraftModel, ids: list[int], name: str = "a", by: int = 0, **params) -> Request:
    """`by`: the seed that the engine gives to who names none."""
    params = SamplingParams(**({"temperature": 0} | params))
    state = SamplingState(params, ids, [], by if params.seed is None else params.seed)
    made = Request(name, name, list(ids), len(ids), params, None, state)
    assert draft.cache.admit(made) is not None
    assert draft.cache.reserve(made, 64)
    return made


def propose(draft: DraftModel, texts, most) -> list[list[int]]:
    inputs = [ProposerInput(request, ids, n) for (request, ids), n in zip(texts, most, strict=True)]
    return draft.propose(inputs)


def alone(model, ids: list[int], count: int) -> list[int]:
    """The model's own greedy text, everything anew for each token."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(FullForward(model)(ids).argmax()))
    return ids[-count:]


def test_it_proposes_its_own_greedy_text(model, draft):
    one, other = request(draft, TEXT), request(draft, TEXT[3:], "b")
    made = propose(draft, [(one, TEXT), (other, TEXT[3:])], [4, 2])
    assert made == [alone(model, TEXT, 4), alone(model, TEXT[3:], 2)], (
        "its own text, as many as each may have"
    )
    assert draft.passes == [17, 2, 1, 1], "all read in one pass, then a token each; the last is not read"
    assert not draft.probs("a"), "who asks for the likeliest is told of no probabilities"


def test_one_may_read_while_another_is_told_tokens(model, draft):
    one, other = request(draft, TEXT), request(draft, TEXT[3:], "b")
    made = propose(draft, [(one, TEXT), (other, TEXT[3:])], [0, 2])
    assert made == [[], alone(model, TEXT[3:], 2)], "each token comes from the row of its own sequence"


def test_a_proposal_is_chosen_by_the_requests_own_parameters(draft):
    one = request(draft, TEXT, logit_bias={277: 100.0})
    assert propose(draft, [(one, TEXT)], [3]) == [[277, 277, 277]], "bias and penalties, as for the target"
    other = request(draft, TEXT, "b", logit_bias={277: 30.0}, frequency_penalty=2.0)
    (guess,) = propose(draft, [(other, TEXT)], [20])
    assert guess[0] == 277
    assert set(guess) != {277}, "penalties count its own guesses as output"


def test_a_guess_that_stood_is_not_read_again(model, draft):
    one = request(draft, TEXT)
    (guess,) = propose(draft, [(one, TEXT)], [3])
    for stood, late in ((2, 1), (1, 1), (0, 1), (3, 2)):
        known = [*TEXT, *guess[:stood], 7]
        assert draft.num_unread(one, known) == late, (
            "guesses that stood are read, but for the last, which never was"
        )
    assert draft.num_unread(one, [*TEXT, 7, 8]) == 2, "behind a wrong guess nothing was read"
    known = [*TEXT, *guess[:2], 7]
    assert propose(draft, [(one, known)], [2]) == [alone(model, known, 2)], (
        "keys of a wrong guess are written over"
    )
    assert draft.passes[3:] == [1, 1]


def test_who_is_told_nothing_falls_behind_and_catches_up(model, draft):
    one = request(draft, TEXT)
    propose(draft, [(one, TEXT)], [1])
    known = [*TEXT, 290, 291, 292, 293]
    assert draft.num_unread(one, known) == 4
    assert propose(draft, [(one, known[:12])], [0]) == [[]], "with 0 the text is only read"
    assert draft.num_unread(one, known) == 2
    assert propose(draft, [(one, known)], [2]) == [alone(model, known, 2)]
    assert draft.num_unread(one, known) == 1, "at least the last one is read, for what comes behind it"


def test_what_a_token_was_drawn_from_is_told(model, draft):
    one = request(draft, TEXT, temperature=0.9, top_k=20, by=5, repetition_penalty=1.2)
    other = request(draft, TEXT[2:], "b")
    drawn, _ = propose(draft, [(one, TEXT), (other, TEXT[2:])], [3, 3])
    assert not draft.probs("b"), "the likeliest is certain"
    ids = list(TEXT)
    for i, token_id in enumerate(drawn):
        state = SamplingState(one.params, TEXT, ids[len(TEXT) :], 5)
        want = distribution(FullForward(model)(ids)[None], [state], [i])
        torch.testing.assert_close(draft.probs("a")[i], want[0], atol=1e-5, rtol=1e-3)
        assert draw(want, [5 ^ DRAFT_SEED], [i]).item() == token_id, (
            "by a seed that no draw of the target has"
        )
        ids.append(token_id)


def test_who_names_a_seed_gets_the_tokens_that_the_plain_sampler_would_draw(model, draft):
    one = request(draft, TEXT, temperature=0.9, top_k=20, seed=5)
    (drawn,) = propose(draft, [(one, TEXT)], [3])
    ids = list(TEXT)
    for i, token_id in enumerate(drawn):
        want = distribution(FullForward(model)(ids)[None], [one.sampling], [i])
        assert draw(want, [5], [i]).item() == token_id, "by the number that the target will draw by"
        ids.append(token_id)
    assert not draft.probs("a"), "nobody asks what it was drawn from"


def test_what_one_is_proposed_forgets_nothing_of_the_others(draft):
    one, other = (request(draft, TEXT, name, by=1, temperature=1.0) for name in "ab")
    propose(draft, [(one, TEXT), (other, TEXT)], [2, 2])
    propose(draft, [(one, [*TEXT, 5])], [1])
    assert [len(draft.probs(name)) for name in "ab"] == [2, 2], "b's drafts still wait to be verified"


def test_a_pass_that_fails_was_not_read(model, draft):
    one = request(draft, TEXT)
    draft.broken = True
    with pytest.raises(MemoryError):
        propose(draft, [(one, TEXT)], [2])
    assert draft.num_unread(one, TEXT) == len(TEXT)
    draft.broken = False
    assert propose(draft, [(one, TEXT)], [2]) == [alone(model, TEXT, 2)]


def test_a_beginning_that_is_shared_is_read_as_far_as_it_was_read(model, draft):
    one = request(draft, TEXT)
    (guess,) = propose(draft, [(one, TEXT)], [8])
    wrong = [*TEXT, *[token_id + 1 for token_id in guess]]
    one.token_ids, one.num_computed_tokens = wrong, len(wrong) - 1
    draft.cache.commit(one, len(wrong) - 1)  # the target has read it all; the draft TEXT, and its guesses
    draft.cache.release(one)
    again = request(draft, wrong, "b")
    assert draft.cache.allocations["b"].num_committed == 2 * P, "the target finds two blocks"
    num_unread = draft.num_unread(again, wrong)
    assert num_unread == len(wrong) - P, "the draft one: keys of guesses are not to be shared"
    assert propose(draft, [(again, wrong)], [2]) == [alone(model, wrong, 2)]


def admitted(draft: DraftModel, name: str, parent: Request | None = None) -> Request:
    params = SamplingParams()
    made = Request(
        name, name, list(TEXT), 10, params, None, SamplingState(params, TEXT, [], 1), parent=parent
    )
    assert draft.cache.admit(made) is not None
    return made


def test_what_the_target_has_is_not_what_the_draft_has(draft):
    one = request(draft, TEXT)
    draft.cache.commit(one, len(TEXT))  # the target has its prompt; the draft was never asked
    again = admitted(draft, "b")
    assert draft.cache.allocations["b"].num_committed == P, "one full block, which the target has read"
    assert draft.num_unread(again, TEXT) == len(TEXT), "and the draft has not"
    child = admitted(draft, "c", parent=one)
    assert draft.num_unread(child, TEXT) == len(TEXT), "nor does a sample wait for what the draft has read"


def test_preempted_is_forgotten(draft):
    one = request(draft, TEXT)
    propose(draft, [(one, TEXT)], [3])
    draft.cache.preempt(one)
    assert not draft.cache.draft_progress
    draft.cache.admit(one)
    assert draft.num_unread(one, TEXT) >= 2, "what it had read is gone with its memory"
    draft.cache.release(one)
    assert draft.cache.usage().num_sequences == 0


def test_where_the_target_is_swapped_the_draft_is_swapped_with_it(model):
    """Its keys lie beside the target's, and every copy of blocks is made in both memories."""
    draft = Watched(model)
    memory = draft.runner.memory = PageMemory(model.config, 40, P, num_swap_blocks=40)
    draft.runner.ways[0].memory = memory
    draft.cache = memory.plan(preemption_mode="swap")
    one = request(draft, TEXT)
    propose(draft, [(one, TEXT)], [1])
    draft.cache.commit(one, len(TEXT))
    draft.cache.preempt(one)
    assert draft.cache.admit(one) == len(TEXT)
    assert draft.cache.reserve(one, 64)
    memory.apply(draft.cache.take_copies())
    known = [*TEXT, 7]
    assert draft.num_unread(one, known) == 1
    assert propose(draft, [(one, known)], [3]) == [alone(model, known, 3)]


@pytest.mark.parametrize("num_passes", [1, 2])
def test_after_a_pass_that_fails_only_what_still_stands_counts_as_read(model, draft, num_passes):
    """The step that failed is rolled back. Its tokens were wrong, and the next step gives others."""
    one = request(draft, TEXT)
    (guess,) = propose(draft, [(one, TEXT)], [4])
    draft.fails_from = len(draft.passes) + num_passes
    with pytest.raises(MemoryError):
        propose(draft, [(one, [*TEXT, guess[0], guess[1] + 1])], [4])
    draft.fails_from = None
    known = [*TEXT, *guess[:3], 7]
    assert draft.num_unread(one, known) == 3, "of its guesses, only the first is still in place"
    assert propose(draft, [(one, known)], [3]) == [alone(model, known, 3)]
