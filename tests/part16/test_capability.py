"""What is asked of a proposer, and what is counted: with a proposer that can be watched."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.decoding.params import SamplingParams
from engine.decoding.sampling import NO_TOKEN
from engine.decoding.sampling_state import SamplingState
from engine.requests.request import State
from engine.requests.step import Step, StepResult
from engine.scheduling.batching import make_batch
from engine.speculation.capability import CATCH_UP, NgramProposer, ProposerInput, Speculation, Tally
from engine.speculation.config import SpeculativeConfig
from engine.speculation.lengths import DraftLengths
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.speculation.step_times import StepTimes
from engine.telemetry.speculation import SpeculationMetrics
from tests.part06.fakes import BlockCache

MOST = 4


class Watched:
    """Proposes 70, 71, ... and remembers what it was asked."""

    max_positions = 300

    def __init__(self) -> None:
        self.asked, self.late = [], {}

    def num_unread(self, request, ids):
        return max(1, self.late.get(request.id, 1) - (len(request.token_ids) + 1 - len(ids)))

    def propose(self, inputs):
        self.asked.append([(request.id, len(ids), k) for request, ids, k in inputs])
        return [list(range(70, 70 + item.max_tokens)) for item in inputs]


class Room:
    """A scheduler that lends each request so many tokens."""

    def __init__(self, total=1000) -> None:
        self.total, self.asked, self.trimmed = total, [], []
        self.running, self.waiting = [], []

    def lend(self, request, total):
        self.asked.append((request.id, total))
        return total <= self.total

    def take_back(self, request, total):
        self.trimmed.append((request.id, total))


class Chosen(DraftLengths):
    """DraftLengths that the test chooses; it remembers what it is told."""

    wanted = (MOST,) * 9

    def __init__(self) -> None:
        super().__init__(MOST, ALWAYS_DRAFT)
        self.told, self.late = [], []

    def choose(self, request_ids, caps):
        self.caps = list(caps)
        return [min(k, cap) for k, cap in zip(self.wanted, caps, strict=False)]

    def observe(self, request_id, proposed, accepted):
        self.told.append((request_id, proposed, accepted))

    def observe_proposals(self, late):
        self.late.append(late)


def request(name="a", known=10, drafts=(), limit=100, said=1, stop_ids=(), computed=None):
    sampling = SimpleNamespace(stop_ids=stop_ids, is_adjusted=False, draw=lambda: None, lasting_draw=None)
    return SimpleNamespace(
        id=name, token_ids=list(range(known)), draft_ids=list(drafts), num_prompt_tokens=known - said,
        num_computed_tokens=known - 1 if computed is None else computed, wants_every_row=False,
        output=SimpleNamespace(limit=limit, token_ids=[0] * said),
        sampling=sampling, adapter=None,
        state=State.RUNNING, num_output_placeholders=0, is_scored=False,
    )  # fmt: skip


def made(total=1000, wanted=None) -> Speculation:
    lengths = Chosen()
    if wanted is not None:
        lengths.wanted = wanted
    return Speculation(Watched(), Room(total), lengths)


def step_of(requests, overlapped=False) -> Step:
    work = [(r, len(r.token_ids) + len(r.draft_ids) - r.num_computed_tokens) for r in requests]
    return Step(make_batch(work, BlockCache(99, 8)), tuple(requests), overlapped=overlapped)


def landed(speculation, requests, tokens, **result) -> StepResult:
    return speculation.after_result(step_of(requests), StepResult(tokens, **result))


def test_behind_a_draft_that_was_not_accepted_there_is_nothing():
    speculation = made()
    result = landed(
        speculation, [request(drafts=[1, 2, 3])], [[1, 9, 3, 7]], logprobs=[["x", "y", "z", "w"]],
        counters={"other": 5.0},
    )  # fmt: skip
    assert result.tokens == [[1, 9]]
    assert result.logprobs == [["x", "y"]], "nor log probabilities"
    assert result.counters == {"other": 5.0, "draft_tokens": 3.0, "accepted_tokens": 1.0}
    tally = speculation.tally
    assert (tally.drafts, tally.proposed, tally.accepted, tally.accepted_at) == (1, 3, 1, [1, 0, 0, 0])


def test_proposals_follow_the_tokens_that_stand():
    speculation = made()
    result = landed(speculation, [request(drafts=[1, 2])], [[1, 9, 7]])
    assert speculation.proposer.asked == [[("a", 12, MOST)]]
    assert result.drafts == [[70, 71, 72, 73]]


def test_where_nothing_is_to_be_proposed_nobody_is_asked():
    speculation = made(wanted=(0, 0))
    assert landed(speculation, [request(), request("b")], [[5], [6]]).drafts == [[], []]
    assert speculation.proposer.asked == []
    assert speculation.scheduler.asked == [], "and no memory is taken"
    speculation = made(wanted=(2, 0))
    assert landed(speculation, [request(), request("b")], [[5], [6]]).drafts == [[70, 71], []]
    assert speculation.proposer.asked == [[("a", 11, 2)]], "nor is it asked for who gets none"


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
    speculation = made()
    assert landed(speculation, [request(**fields)], [tokens]).drafts == [[]], why
    assert speculation.proposer.asked == []
    if not tokens:
        assert speculation.tally == Tally([0] * MOST), "who brought no token had nothing proposed"


def test_no_proposal_behind_the_last_possible_token():
    speculation = made()
    landed(speculation, [request(said=1, limit=5)], [[5]])
    assert speculation.proposer.asked == [[("a", 11, 2)]], "of 3 to come the next step gives one anyway"
    assert speculation.lengths.caps == [2]
    landed(speculation, [request()], [[5]])
    assert speculation.lengths.caps == [MOST], "never more than the most"
    speculation = made()
    speculation.proposer.max_positions = 13
    landed(speculation, [request()], [[5]])
    assert speculation.proposer.asked == [[("a", 11, 2)]], "the proposer reads 13 tokens and no more"


def test_everybodys_next_token_first_then_guesses():
    speculation = made()
    landed(speculation, [request(), request("b")], [[5], [6]])
    assert speculation.scheduler.asked == [("a", 11), ("b", 11), ("a", 15), ("b", 15)]
    speculation = made(total=14)
    assert landed(speculation, [request()], [[5]]).drafts == [[]], "no room for all its guesses: none is made"
    speculation = made(total=10)
    landed(speculation, [request()], [[5]])
    assert speculation.scheduler.asked == [("a", 11)], "no room for its next token: none is asked for guesses"


def test_room_of_guesses_that_did_not_stand_goes_back_before_anybody_needs_it():
    speculation = made()
    landed(speculation, [request(), request("b")], [[5], [6]])
    assert speculation.scheduler.trimmed == [], "none was lent before"
    landed(speculation, [request(drafts=[1, 2, 3, 4]), request("b")], [[1, 9, 7, 7, 7], [6]])
    assert speculation.scheduler.trimmed == [("a", 12), ("b", 11)], "what is known stays"
    assert speculation.scheduler.asked[-4:] == [("a", 12), ("b", 11), ("a", 16), ("b", 15)]
    speculation.lengths.wanted = (0, 0)
    landed(speculation, [request(drafts=[1]), request("b")], [[1, 9], [6]])
    landed(speculation, [request(), request("b")], [[5], [6]])
    assert len(speculation.scheduler.trimmed) == 4, "who was lent nothing has nothing to give back"


def test_what_stood_is_told_to_lengths():
    speculation = made(wanted=(0, 0, 0, 0))
    gone = request("gone", drafts=[1])
    gone.state = State.FINISHED
    requests = [request(drafts=[1, 2]), request("b"), request("p", computed=2), gone]
    landed(speculation, requests, [[1, 9, 7], [5], [], [1, 2]])
    assert speculation.lengths.told == [("a", 2, 1), ("b", 0, 0)], (
        "not who reads its prompt, nor who has left: its step was launched once too often"
    )
    assert speculation.lengths.late == [], "nobody proposes"


def test_before_a_step_has_landed_it_is_known_whether_it_must_land_first():
    for drafts, wanted, first in (((), 2, True), ((1,), 0, True), ((), 0, False)):
        speculation = made(wanted=(wanted,))
        assert speculation.must_land_first(step_of([request(drafts=drafts)])) == first
        assert speculation.proposer.asked == speculation.scheduler.asked == [], "to ask changes nothing"
    assert not made().must_land_first(step_of([request(limit=2)])), "behind the last token, none is proposed"


def test_a_step_has_drafts_however_many_prompts_are_read_beside_them():
    drafting, reading = request(drafts=[1]), request("p", known=9, computed=2)
    batch = make_batch([(drafting, 2), (reading, 3)], BlockCache(99, 8))
    assert batch.rows.chosen_counts == (2, 0)
    assert batch.has_drafts, "two rows in a step of two sequences, and yet one of them is behind a draft"


def test_the_token_behind_a_draft_is_drawn_as_if_the_draft_were_output():
    params, output = SamplingParams(frequency_penalty=1.0), [7]
    drafting = request(drafts=[1, 1])
    drafting.sampling = SamplingState(params, [5], output, 0)
    batch = make_batch([(drafting, 3)], BlockCache(99, 8))
    counted = [dict(zip(draw.tokens.tolist(), draw.factors[:, 2], strict=True)) for draw in batch.draws.rows]
    assert [{token: count for token, count in row.items() if count} for row in counted] == [
        {7: 1}, {7: 1, 1: 1}, {7: 1, 1: 2},
    ]  # fmt: skip


def test_a_token_still_on_its_way_is_not_counted_twice_when_memory_goes_back():
    speculation = made()
    landed(speculation, [request()], [[5]])
    ahead = request(known=11)
    ahead.num_output_placeholders = 1
    speculation.after_result(step_of([ahead], overlapped=True), StepResult([[5]]))
    assert speculation.scheduler.trimmed == [("a", 11)], "its placeholder stands for the token that has come"


def test_behind_an_overlapped_step_nothing_is_proposed():
    speculation = made()
    result = speculation.after_result(step_of([request()], overlapped=True), StepResult([[5]]))
    assert result.drafts is None, "its tokens are in the next step already"
    assert speculation.proposer.asked == []


def test_who_is_far_behind_catches_up_by_and_by():
    speculation = made()
    near, far, last = request("near", 20), request("far", 400), request("last", 300)
    speculation.proposer.max_positions = 1000
    speculation.proposer.late = {"near": 9, "far": 390, "last": 200}
    landed(speculation, [near, far, last], [[5], [5], [5]])
    assert CATCH_UP == 256
    # near is 9 - (MOST + 1) = 4 late, which leaves 252; far is 385 late: 133 of its tokens are not read now.
    assert speculation.proposer.asked == [[("near", 21, MOST), ("far", 401 - 133, 0)]]
    assert speculation.lengths.late == [CATCH_UP], "what was to be read first is told to lengths"
    assert ("far", 1, 0) not in speculation.lengths.told, "it was to read, not to propose"


def test_who_is_not_late_is_told_though_others_use_up_what_may_be_read():
    speculation = made()
    speculation.proposer.max_positions = 1000
    speculation.proposer.late = {"far": CATCH_UP + MOST + 1}
    landed(speculation, [request("far", 400), request("near", 20)], [[5], [5]])
    assert speculation.proposer.asked == [[("far", 401, MOST), ("near", 21, MOST)]], (
        "just within reach, and near"
    )


def test_who_found_no_draft_is_told_to_lengths():
    speculation = made(wanted=(2, 0))
    speculation.proposer.propose = lambda inputs: [[] for _ in inputs]
    landed(speculation, [request(), request("b")], [[5], [6]])
    assert speculation.lengths.told == [("a", 1, 0)], "as good as one that did not stand; b was not asked"


def test_who_was_preempted_and_waits_finds_its_acceptance_rate_again():
    speculation = Speculation(Watched(), Room(), DraftLengths(MOST, ALWAYS_DRAFT))
    lengths, room = speculation.lengths, speculation.scheduler
    room.running, room.waiting = [request("runs")], [request("waits")]
    for name in ("runs", "waits", "gone", "gone, too"):
        lengths.observe(name, MOST, 0)
    landed(speculation, room.running, [[5]])
    assert lengths.num_requests == 4, "twice as many as there are: not worth the trouble yet"
    lengths.observe("a third", MOST, 0)
    rate = lengths._rates["waits"]
    landed(speculation, room.running, [[5]])
    assert lengths._rates.keys() == {"runs", "waits"}, "all who have left are forgotten, and nobody else"
    assert lengths._rates["waits"] == rate


def test_lookup_looks_at_each_text_alone():
    asked = []
    proposer = NgramProposer(lambda ids, most: asked.append((ids, most)) or [1] * most)
    assert proposer.num_unread(request(), [1, 2, 3]) == 0, "it has no memory, so it is never behind"
    inputs = [ProposerInput(request(), [1, 2], 2), ProposerInput(request(), [3], 1)]
    assert proposer.propose(inputs) == [[1, 1], [1]]
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
    assert SpeculativeConfig.from_dict({"num_speculative_tokens": 2}).method == "ngram"
    assert SpeculativeConfig.from_dict({"num_speculative_tokens": 16, "model": "x"}).method == "draft_model"
    times = {"sequences": [1], "drafts": [0, 2], "step_seconds": [[1.0, 1.5]]}
    given = SpeculativeConfig.from_dict({"num_speculative_tokens": 2, "step_times": times}).step_times
    assert given == StepTimes((1,), (0, 2), ((1.0, 1.5),)), "a table, in place of one that is measured"


@pytest.mark.parametrize(
    ("given", "longest", "shortest"),
    [
        ({}, 4, 2),
        ({"prompt_lookup_max": 1}, 1, 1),
        ({"prompt_lookup_max": 3}, 3, 2),
        ({"prompt_lookup_min": 6}, 6, 6),
        ({"prompt_lookup_min": 3}, 4, 3),
        ({"prompt_lookup_max": 8, "prompt_lookup_min": None}, 8, 2),
    ],
    ids=str,
)
def test_one_bound_of_the_lookup_may_be_given_alone(given, longest, shortest):
    """Nobody is refused for the default of the other bound, which was never given."""
    config = SpeculativeConfig.from_dict({"num_speculative_tokens": 2} | given)
    assert config.lookup_lengths == (longest, shortest)


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
        (
            {"num_speculative_tokens": 2, "step_times": {"drafts": [0]}},
            "step_times=.* a mapping with sequences",
        ),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        SpeculativeConfig.from_dict(given)


def test_a_table_of_another_kind_is_refused_where_no_dict_is_read():
    with pytest.raises(ValueError, match="step_times=5: a StepTimes is accepted"):
        SpeculativeConfig(2, step_times=5)
