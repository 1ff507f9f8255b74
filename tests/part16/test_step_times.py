"""How long steps with drafts take: a table, given or measured."""

import json
import re
from types import SimpleNamespace

import pytest

from engine.core.ahead import AheadEngine
from engine.core.llm_engine import LLMEngine
from engine.execution.runner import ModelRunner
from engine.speculation import measuring
from engine.speculation.capability import ProposerInput
from engine.speculation.lengths import DraftLengths
from engine.speculation.measuring import ALWAYS_DRAFT, FullProposer, measure
from engine.speculation.step_times import StepTimes
from tests.part06.fakes import BlockCache, assert_idle
from tests.part16.machines import Machine
from tests.part16.mixed_steps import mixing, speculation_of

GIVEN = {"sequences": [1, 4], "drafts": [0, 1, 3], "step_seconds": [[1.0, 2.0, 2.2], [1.6, 3.2, 4.4]]}


def test_between_measured_sizes_times_are_interpolated_linearly():
    table = StepTimes.from_dict(GIVEN)
    assert table.seconds(1, 0) == 1.0
    assert table.seconds(4, 3) == 4.4
    assert table.seconds(1, 2) == pytest.approx(2.1)
    assert table.seconds(2, 0) == pytest.approx(1.2)
    assert table.seconds(2, 2) == pytest.approx(2.1 + (3.8 - 2.1) / 3)
    assert table.seconds(7, 5) == pytest.approx((5.6 - 2.4) * 2 + 2.4), "beyond it the last segment goes on"
    assert table.seconds(1, 1) / table.seconds(1, 0) == 2, "a slow second row is seen"


def test_no_step_takes_less_than_the_smallest():
    assert StepTimes((1, 2), (0,), ((1.0,), (0.5,))).seconds(9, 0) == 1.0, (
        "times that fall with more sequences are an error of measuring"
    )


def test_to_read_a_text_takes_its_time_for_each_token():
    assert StepTimes.from_dict(GIVEN | {"read_seconds": 0.5}).seconds_to_read(4) == 2.0
    assert StepTimes.from_dict(GIVEN).seconds_to_read(4) == 0.0


def test_a_table_is_plain_numbers_and_back():
    table = StepTimes.from_dict(GIVEN | {"read_seconds": 0.5})
    assert StepTimes.from_dict(json.loads(json.dumps(table.as_dict()))) == table


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sequences": [2, 4]}, "step_times: sequences=(2, 4): whole numbers from 1 upwards"),
        ({"drafts": [0, 3, 1]}, "step_times: drafts=(0, 3, 1): whole numbers from 0 upwards"),
        ({"drafts": [0, 1, True]}, "step_times: drafts="),
        ({"drafts": []}, "step_times: drafts=()"),
        ({"drafts": 3}, "step_times: drafts=3: a list"),
        ({"step_seconds": [[1.0, 2.0, 2.2]]}, "2 rows of 3 positive numbers of seconds"),
        ({"step_seconds": [[1.0, 2.0, 2.2], 3]}, "2 rows of 3 positive"),
        ({"step_seconds": [[1.0, 2.0, 0], [1.0, 2.0, 3.0]]}, "2 rows of 3 positive"),
        ({"step_seconds": [["a", 2.0, 1], [1.0, 2.0, 3.0]]}, "2 rows of 3 positive"),
        ({"read_seconds": -1}, "step_times: read_seconds=-1"),
        ({"seconds": 1}, "step_times: 'seconds' is unknown"),
    ],
    ids=str,
)
def test_what_makes_no_table_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        StepTimes.from_dict(GIVEN | change)


def test_what_is_no_mapping_is_refused():
    for given in (None, [1], {"sequences": [1]}):
        with pytest.raises(
            ValueError,
            match="a mapping with sequences, drafts, step_seconds, read_seconds and single_draft_seconds",
        ):
            StepTimes.from_dict(given)


# What is measured, by a clock that stands still but for what a simulated machine takes.

MACHINE = Machine(lambda rows: 0.001 if rows == 1 else 0.0015 + 0.00001 * rows, draft=0.0002, read=0.0)
SLOW = Machine(lambda rows: 1.0 + 0.1 * rows, draft=0.1, read=0.0)


def trial(
    monkeypatch, machine: Machine, engine_class=LLMEngine, blocks=200, budget=64, most=4, seats=8, **options
):
    """An engine of the fake model with `most` drafts at most, and what steps of 1 to `seats` seats take."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    class Timed(ModelRunner):
        def submit(self, batch):
            clock.now += machine.step(batch.num_tokens)
            return super().submit(batch)

    engine = mixing(
        BlockCache(blocks, 32), DraftLengths(most, ALWAYS_DRAFT), seats=seats, budget=budget,
        runner_class=Timed, engine_class=engine_class, **options,
    )  # fmt: skip
    proposer = speculation_of(engine).proposer
    propose, read = proposer.propose, dict[str, int]()

    def timed(inputs):
        unread = sum(len(ids) - read.get(request.id, 0) for request, ids, _ in inputs)
        read.update({request.id: len(ids) for request, ids, _ in inputs})
        most = max(item.max_tokens for item in inputs)
        clock.now += machine.draft * most + machine.seconds_to_read(unread)
        return propose(inputs)

    proposer.propose = timed
    return engine, measure(engine, speculation_of(engine), seats, budget)


@pytest.mark.parametrize("engine_class", [LLMEngine, AheadEngine])
def test_what_is_measured_is_what_the_engines_steps_take(monkeypatch, engine_class):
    engine, table = trial(monkeypatch, MACHINE, engine_class)
    assert (table.sequences, table.drafts) == ((1, 2, 8), (0, 1, 2, 4))
    for S in table.sequences:
        for k in table.drafts:
            assert table.seconds(S, k) == pytest.approx(MACHINE.seconds(S, k)), f"{S} with {k} drafts each"
    assert table.read_seconds == 0.0
    assert_idle(engine)


def test_what_a_proposer_has_to_read_first_is_measured(monkeypatch):
    reading = Machine(MACHINE.step, MACHINE.draft, read=0.00004)
    _, table = trial(monkeypatch, reading)
    assert table.read_seconds == pytest.approx(reading.read, rel=0.1)


def test_where_steps_are_slow_two_crowds_are_enough(monkeypatch):
    _, table = trial(monkeypatch, SLOW)
    assert table.sequences == (1, 8), "one sequence, and as many as there are seats"
    assert table.seconds(4, 2) == pytest.approx(SLOW.seconds(4, 2), rel=0.1), "between: interpolated"


def test_where_there_is_no_room_fewer_are_measured(monkeypatch):
    _, table = trial(monkeypatch, MACHINE, blocks=13)
    assert table.sequences == (1, 2)
    engine, table = trial(monkeypatch, MACHINE, max_model_len=24)
    assert table.drafts == (0, 1, 2), "whose steps fit into so few tokens"
    assert_idle(engine)
    assert trial(monkeypatch, MACHINE, max_model_len=12)[1] == ALWAYS_DRAFT, (
        "nothing can be seen: nothing is known"
    )


def test_a_step_that_is_measured_has_all_its_drafts():
    inner = SimpleNamespace(max_positions=9, num_unread=lambda *_: 5, propose=lambda inputs: [[7], []])
    full = FullProposer(inner)
    inputs = [ProposerInput(None, [], 3), ProposerInput(None, [], 2)]
    assert full.propose(inputs) == [[7, 0, 0], [0, 0]], "found or not"
    assert (full.max_positions, full.num_unread(None, [])) == (9, 5)


@pytest.mark.parametrize("engine_class", [LLMEngine, AheadEngine])
@pytest.mark.parametrize("seats", [1, 8])
def test_dummy_requests_are_begun_anew_before_the_first_of_them_ends(monkeypatch, engine_class, seats):
    """There is just room to measure a draft once. Four of eight prompts fit into a step, so the first request
    has some of its tokens when the last one has its first.
    """
    shortest = measuring.PROMPT_TOKENS + measuring._num_tokens(1)
    small = {"most": 1, "seats": seats, "budget": 2 * seats, "max_model_len": shortest}
    if seats == 1:
        small["budget"] = measuring.PROMPT_TOKENS
    _, table = trial(monkeypatch, MACHINE, engine_class, **small)
    assert (table.sequences, table.drafts) == (tuple(S for S in (1, 2, 8) if seats >= S), (0, 1))
    for S in table.sequences:
        assert table.seconds(S, 1) == pytest.approx(MACHINE.seconds(S, 1)), "each with its draft"
    with monkeypatch.context() as one_less:
        short = small | {"max_model_len": shortest - 1}
        assert trial(one_less, MACHINE, engine_class, **short)[1] == ALWAYS_DRAFT, "one token less is too few"


@pytest.mark.parametrize(
    ("blocks", "most", "sequences"),
    [
        (9, 1, (1, 2)),  # of 32 tokens: two sequences of 16 tokens and 128 to spare fill them to the last
        (8, 1, (1,)),
        (4, 1, (1,)),  # the tokens to spare have no room, and one sequence needs none
        (11, 4, (1, 2)),  # of 34 tokens and 128 to spare
        (10, 4, (1,)),  # with two drafts both would have room, with four they have none
    ],
)
def test_as_many_are_measured_as_have_room_with_all_their_drafts(monkeypatch, blocks, most, sequences):
    _, table = trial(monkeypatch, MACHINE, blocks=blocks, most=most, seats=2, max_model_len=100)
    assert table.sequences == sequences
    assert table.drafts[-1] == most
    assert table != ALWAYS_DRAFT, "one sequence alone is measured, too"


def test_a_single_draft_of_many_sequences_is_measured(monkeypatch):
    _, table = trial(monkeypatch, MACHINE)
    want = [MACHINE.step(S + 1) + MACHINE.draft for S in table.sequences]
    assert table.single_draft_seconds == pytest.approx(want), "one row more than a plain step, and one draft"


def test_a_larger_step_that_seemed_faster_is_an_error_of_measuring(monkeypatch):
    faster = Machine(lambda rows: 0.002 if rows == 1 else 0.001, draft=0.0002, read=0.0)
    _, table = trial(monkeypatch, faster)
    assert table.seconds(1, 0) == pytest.approx(0.001), "one sequence takes no longer than eight"
    falling = Machine(lambda rows: 0.002 if rows <= 8 else 0.001, draft=0.0, read=0.0)
    _, table = trial(monkeypatch, falling)
    assert table.seconds(8, 0) == pytest.approx(0.001), "a plain step takes no longer than one with drafts"


@pytest.mark.parametrize(("room", "read"), [(1, 0.00004), (0, 0.0)])
def test_to_read_is_measured_where_a_text_longer_than_a_prompt_fits(monkeypatch, room, read):
    """Behind the text there is room for three measurements of one draft."""
    reading = Machine(MACHINE.step, MACHINE.draft, read=0.00004)
    num_tokens = measuring.PROMPT_TOKENS + 3 * measuring._num_tokens(1) + room
    _, table = trial(monkeypatch, reading, max_model_len=num_tokens)
    assert table.read_seconds == pytest.approx(read, rel=0.5)


@pytest.mark.parametrize(
    ("budget", "sequences", "drafts"),
    [
        (40, (1, 2, 8), (0, 1, 2, 4)),
        (39, (1, 2), (0, 1, 2, 4)),
        (8, (1,), (0, 1, 2, 4)),
        (4, (1,), (0, 1, 2)),
        (1, None, None),
    ],
)
def test_a_step_that_has_no_room_for_its_drafts_is_not_measured(monkeypatch, budget, sequences, drafts):
    """A sequence with k drafts has k + 1 rows, and a step at most max_num_batched_tokens rows."""
    _, table = trial(monkeypatch, MACHINE, budget=budget, seats=min(8, budget))
    if sequences is None:
        assert table == ALWAYS_DRAFT, "no step has a draft: nothing is known"
    else:
        assert (table.sequences, table.drafts) == (sequences, drafts)


@pytest.mark.parametrize(("name", "numbers"), [("sequences", [1, 1]), ("drafts", [0, 1, 1])])
def test_a_number_stands_once_in_a_table(name, numbers):
    """Between two equal numbers there is no line."""
    with pytest.raises(ValueError, match=re.escape(f"step_times: {name}={tuple(numbers)}: whole numbers")):
        StepTimes.from_dict(GIVEN | {name: numbers})


@pytest.mark.parametrize("engine_class", [LLMEngine, AheadEngine])
def test_a_dummy_requests_tokens_are_counted_one_by_one(engine_class):
    """Two of eight prompts fit into a step, so the first request has tokens before the last one has any."""
    engine = mixing(
        BlockCache(200, 32), DraftLengths(4, ALWAYS_DRAFT), seats=8, budget=8, engine_class=engine_class
    )
    trial = measuring._Trial(engine, speculation_of(engine), 8)
    trial.start(8, measuring.PROMPT_TOKENS)
    most, left = 3 * measuring._num_tokens(4), trial.min_tokens_left
    for _ in range(3):
        trial.step(0)
    assert trial.min_tokens_left == left - 3, "a plain step adds one"
    output = engine.abort_request(trial.request_ids[0])
    assert len(output.outputs[0].token_ids) == most - trial.min_tokens_left
