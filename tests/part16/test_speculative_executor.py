"""What is asked of a proposer, and what is counted: with a proposer that can be watched."""

import math
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.batch import make_batch
from engine.decoding.sampling import NO_TOKEN
from engine.executor import StepResult
from engine.scheduling.request import State
from engine.speculation.config import SpeculativeConfig
from engine.speculation.executor import CATCH_UP, Lookup, SpeculativeExecutor, Tally
from engine.speculation.lengths import TRIES, Lengths
from engine.speculation.metrics import SpeculationMetrics
from engine.speculation.paired import PairedCache
from engine.speculation.verify import SKIPPED

MOST = 4


class Watched:
    """Proposes 70, 71, ... and remembers what it was asked."""

    max_positions = 300

    def __init__(self) -> None:
        self.asked, self.late = [], {}

    def unread(self, request, ids):
        return max(1, self.late.get(request.id, 1) - (len(request.token_ids) + 1 - len(ids)))

    def propose(self, texts, most):
        self.asked.append([(request.id, len(ids), k) for (request, ids), k in zip(texts, most, strict=True)])
        return [list(range(70, 70 + k)) for k in most]


class Room:
    """A cache that grants each request so many tokens."""

    def __init__(self, total=1000) -> None:
        self.total, self.asked, self.trimmed = total, [], []

    def reserve(self, request, total):
        self.asked.append((request.id, total))
        return total <= self.total

    def trim(self, request, total):
        self.trimmed.append((request.id, total))


class Chosen(Lengths):
    """Lengths that the test chooses."""

    wanted = (MOST,) * 9

    def asks(self, people):
        return True

    def choose(self, request_ids, caps):
        self.caps = list(caps)
        return [min(k, cap) for k, cap in zip(self.wanted, caps, strict=False)]


def request(name="a", known=10, drafts=(), limit=100, said=1, stop_ids=(), computed=None):
    return SimpleNamespace(
        id=name, token_ids=list(range(known)), draft_ids=list(drafts), num_prompt_tokens=known - said,
        num_computed_tokens=known - 1 if computed is None else computed, wants_every_row=False,
        output=SimpleNamespace(limit=limit, token_ids=[0] * said),
        sampling=SimpleNamespace(stop_ids=stop_ids, is_adjusted=False), state=State.RUNNING, num_expected=0,
    )  # fmt: skip


def made(total=1000, wanted=None, clock=None):
    """`clock`: a list whose number is the time."""
    lengths = Chosen(MOST)
    if wanted is not None:
        lengths.wanted = wanted
    return SpeculativeExecutor(None, Room(total), Watched(), lengths, lambda: clock[0] if clock else 0.0)


def landed(executor, requests, tokens, seconds=1.0, **result):
    batch = make_batch(
        [(one, len(one.token_ids) + len(one.draft_ids) - one.num_computed_tokens) for one in requests]
    )
    return executor.landed(batch, StepResult(tokens, **result), seconds)


def test_behind_a_draft_that_was_not_accepted_there_is_nothing():
    executor = made()
    result = landed(
        executor, [request(drafts=[1, 2, 3])], [[1, 9, SKIPPED, SKIPPED]], logprobs=[["x", "y", "z", "w"]],
        counters={"other": 5.0},
    )  # fmt: skip
    assert result.tokens == [[1, 9]]
    assert result.logprobs == [["x", "y"]], "nor log probabilities"
    assert result.counters == {"other": 5.0, "draft_tokens": 3.0, "accepted_tokens": 1.0}
    tally = executor.tally
    assert (tally.drafts, tally.proposed, tally.accepted, tally.accepted_at) == (1, 3, 1, [1, 0, 0, 0])


def test_proposals_follow_the_tokens_that_stand():
    executor = made()
    result = landed(executor, [request(drafts=[1, 2])], [[1, 9, SKIPPED]])
    assert executor.proposer.asked == [[("a", 12, MOST)]]
    assert result.drafts == [[70, 71, 72, 73]]


def test_where_nothing_is_to_be_proposed_nobody_is_asked():
    executor = made(wanted=(0, 0))
    assert landed(executor, [request(), request("b")], [[5], [6]]).drafts == [[], []]
    assert executor.proposer.asked == []
    assert executor.cache.asked == [], "and no memory is taken"
    executor = made(wanted=(2, 0))
    assert landed(executor, [request(), request("b")], [[5], [6]]).drafts == [[70, 71], []]
    assert executor.proposer.asked == [[("a", 11, 2)]], "nor is it asked for who gets none"


@pytest.mark.parametrize(
    ("fields", "tokens", "why"),
    [
        ({"said": 1, "limit": 2}, [5], "this token is its last"),
        ({"stop_ids": (5,)}, [5], "it ends with a stop token"),
        ({"stop_ids": (5,), "drafts": [5]}, [5, 6], "it ends with a stop token, though one more was chosen"),
        ({}, [NO_TOKEN], "its numbers are broken"),
        ({"computed": 2}, [], "its prompt is still being read"),
    ],
)
def test_who_does_not_go_on_gets_no_proposals(fields, tokens, why):
    executor = made()
    assert landed(executor, [request(**fields)], [tokens]).drafts == [[]], why
    assert executor.proposer.asked == []
    if not tokens:
        assert executor.tally == Tally([0] * MOST), "who brought no token had nothing proposed"


def test_no_proposal_behind_the_last_possible_token():
    executor = made()
    landed(executor, [request(said=1, limit=5)], [[5]])
    assert executor.proposer.asked == [[("a", 11, 2)]], "of 3 tokens to come the next step gives one anyway"
    assert executor.lengths.caps == [2]
    landed(executor, [request()], [[5]])
    assert executor.lengths.caps == [MOST], "never more than the most"
    executor = made()
    executor.proposer.max_positions = 13
    landed(executor, [request()], [[5]])
    assert executor.proposer.asked == [[("a", 11, 2)]], "the proposer reads 13 tokens and no more"


def test_everybodys_next_token_first_then_guesses():
    executor = made()
    landed(executor, [request(), request("b")], [[5], [6]])
    assert executor.cache.asked == [("a", 11), ("b", 11), ("a", 15), ("b", 15)]
    executor = made(total=14)
    assert landed(executor, [request()], [[5]]).drafts == [[]], "no room for all its guesses: none is made"
    executor = made(total=10)
    landed(executor, [request()], [[5]])
    assert executor.cache.asked == [("a", 11)], "no room for its next token: none is asked for guesses"


def test_room_of_guesses_that_did_not_stand_goes_back_before_anybody_needs_it():
    executor = made()
    landed(executor, [request(), request("b")], [[5], [6]])
    assert executor.cache.trimmed == [], "none was lent before"
    landed(executor, [request(drafts=[1, 2, 3, 4]), request("b")], [[1, 9, SKIPPED, SKIPPED, SKIPPED], [6]])
    assert executor.cache.trimmed == [("a", 12), ("b", 11)], "what is known stays"
    assert executor.cache.asked[-4:] == [("a", 12), ("b", 11), ("a", 16), ("b", 15)]
    executor.lengths.wanted = (0, 0)
    landed(executor, [request(drafts=[1]), request("b")], [[1, 9], [6]])
    landed(executor, [request(), request("b")], [[5], [6]])
    assert len(executor.cache.trimmed) == 4, "who was lent nothing has nothing to give back"


def test_a_step_is_accounted_for():
    clock = [0.0]
    executor, seen = made(clock=clock), []
    executor.lengths.account = lambda *step: seen.append(step)

    def propose(texts, most):
        clock[0] += 0.5
        return [[70]] * len(texts)

    executor.proposer.propose = propose
    landed(executor, [request(drafts=[1, 2]), request("b")], [[1, 9, SKIPPED], [5]], seconds=3.0)
    assert seen == [(2, 4, 3, 3.0, 0.5)], "two requests, four rows, three tokens, its seconds, the proposals'"
    landed(executor, [request("p", 10, computed=2), request(drafts=[1])], [[5], [1, 2]], seconds=9.0)
    assert seen[1:] == [(2, 3, 3, math.inf, 0.5)], "a prompt was read: its time says nothing"
    landed(executor, [request("p", 10, computed=2)], [[]])
    assert len(seen) == 2, "nobody decoded"
    executor.lengths.wanted = (0, 0)
    landed(executor, [request()], [[5]], seconds=3.0)
    assert seen[2:] == [(1, 1, 1, 3.0, 0.0)], "nobody was asked, so nothing was spent on it"


def test_proposals_that_take_longer_than_ever_are_charged_as_usual_and_a_choice_is_told():
    clock, waits, charged, chosen = [0.0], [1.0] * TRIES + [50.0], [], []
    executor = made(wanted=(2,), clock=clock)
    executor.lengths.account = lambda *step: charged.append(step[-1])
    executor.lengths.chose = chosen.append

    def propose(texts, most):
        clock[0] += waits.pop(0)
        return [[70, 71]]

    executor.proposer.propose = propose
    for _ in range(TRIES + 1):
        landed(executor, [request()], [[5]])
    assert charged[-1] == pytest.approx(1.1), "a moment of somebody else is not what proposing costs"
    executor.lengths.wanted = (0,)
    landed(executor, [request()], [[5]])
    assert chosen == [True] * (TRIES + 1) + [False], "after a choice of none it is asked less"


def test_both_caches_get_the_room_of_guesses_back():
    target, draft = Room(), Room()
    PairedCache(target, draft).trim(request(), 12)
    assert target.trimmed == draft.trimmed == [("a", 12)]


def test_who_is_far_behind_catches_up_by_and_by():
    executor = made()
    executor.lengths.found_nothing = lambda name: pytest.fail(f"{name} was to read, not to propose")
    near, far, last = request("near", 20), request("far", 400), request("last", 300)
    executor.proposer.max_positions = 1000
    executor.proposer.late = {"near": 9, "far": 390, "last": 200}
    landed(executor, [near, far, last], [[5], [5], [5]])
    assert CATCH_UP == 256
    # near is 9 - (MOST + 1) = 4 late, which leaves 252; far is 385 late: 133 of its tokens are not read now.
    assert executor.proposer.asked == [[("near", 21, MOST), ("far", 401 - 133, 0)]]
    assert not executor.lengths.draft._of, "what reading costs is not what proposing costs"


def test_who_is_not_late_is_told_though_others_use_up_what_may_be_read():
    executor = made()
    executor.proposer.max_positions = 1000
    executor.proposer.late = {"far": CATCH_UP + MOST + 1}
    landed(executor, [request("far", 400), request("near", 20)], [[5], [5]])
    assert executor.proposer.asked == [[("far", 401, MOST), ("near", 21, MOST)]], (
        "just within reach, and near"
    )


def test_what_steps_and_passes_take_is_learnt():
    clock = [0.0]
    executor = made(clock=clock)

    def propose(texts, most):
        clock[0] += 0.5
        return [[70, 71]]  # of four that were asked for

    executor.proposer.propose = propose
    for _ in range(TRIES):
        landed(executor, [request(drafts=[1])], [[1, 2]], seconds=3.0)
    assert executor.lengths.step.of(2) == 3.0, "a step of 2 rows"
    assert executor.lengths.draft.of(1) == 0.125, "the proposer's time, by drafts asked for: found or not"
    for _ in range(TRIES):
        landed(executor, [request("p", 10, computed=2), request()], [[], [5]], seconds=9.0)
    assert not executor.lengths.step.knows(9), "a step that reads a prompt says nothing of decoding"
    assert executor.lengths._accepted["a"].value > 0.7, "its draft stood"


def test_who_found_no_draft_is_told_to_lengths():
    executor, seen = made(wanted=(2, 0)), []
    executor.lengths.found_nothing = seen.append
    executor.proposer.propose = lambda texts, most: [[] for _ in texts]
    landed(executor, [request(), request("b")], [[5], [6]])
    assert seen == ["a"], "b was not asked"


def test_a_step_takes_from_submit_to_result_for_all_its_requests():
    clock = [0.0]
    executor, seen = made(wanted=(0, 0), clock=clock), []
    executor.lengths.stepped = lambda *step: seen.append(step)

    class Inner:
        def submit(self, batch):
            clock[0] += 1
            return self

        def result(self):
            clock[0] += 2
            return StepResult([[1, 2], [5]])

    executor.inner = Inner()
    batch = make_batch([(request(drafts=[1]), 2), (request("b"), 1)])
    executor.submit(batch).result()
    assert seen == [(2, 3, 3.0)], "two requests, three rows, three seconds"


def test_lookup_looks_at_each_text_alone():
    asked = []
    proposer = Lookup(lambda ids, most: asked.append((ids, most)) or [1] * most)
    assert proposer.unread(request(), [1, 2, 3]) == 0, "it has no memory, so it is never behind"
    assert proposer.propose([(request(), [1, 2]), (request(), [3])], [2, 1]) == [[1, 1], [1]]
    assert asked == [([1, 2], 2), ([3], 1)]


def test_metrics_have_vllms_names():
    tally = Tally([0] * 2)
    tally.add(2, 1)
    tally.add(2, 2)
    tally.add(0, 0)
    registry = CollectorRegistry()
    registry.register(SpeculationMetrics(tally, "m"))
    text = generate_latest(registry).decode()
    for line in (
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 2.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 4.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 3.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 1.0',
    ):
        assert line in text, line


def test_a_configuration_says_how():
    assert SpeculativeConfig.of({"num_speculative_tokens": 2}).method == "ngram"
    assert SpeculativeConfig.of({"num_speculative_tokens": 16, "model": "x"}).method == "draft_model"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_speculative_tokens": 17}, "num_speculative_tokens=17: 1 to 16"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"num_speculative_tokens": 2, "method": "eagle"}, "accepted are draft_model, ngram"),
        ({"num_speculative_tokens": 2, "method": ""}, "method='': accepted are"),
        ({"num_speculative_tokens": 2, "method": []}, r"method=\[\]: accepted are"),
        ({"num_speculative_tokens": 2, "method": "draft_model"}, "needs a model"),
        ({"num_speculative_tokens": 2, "method": "ngram", "model": "x"}, "no use for model='x'"),
        ({"num_speculative_tokens": 2, "model": 5}, "model=5: a name or a folder"),
        ({"num_speculative_tokens": 2, "model": "x", "prompt_lookup_max": 3}, "prompt_lookup_max=3 needs"),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "is more than"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        SpeculativeConfig.of(given)
