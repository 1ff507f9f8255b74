"""How many tokens are proposed: as many as pay."""

from functools import cache

import numpy as np
import pytest

from engine.speculation import lengths as module
from engine.speculation.lengths import DraftLengths, expected_tokens
from engine.speculation.step_times import StepTimes
from tests.part16.machines import MACHINES, MOST, OTHERS, SOME, Machine, best_fixed, speed

best_fixed = cache(best_fixed)
PEOPLE = [1, 4]


def known(times, **rates: float) -> DraftLengths:
    """DraftLengths that have seen drafts of each request stand so often."""
    lengths = DraftLengths(MOST, times)
    for name, rate in rates.items():
        for i in range(400):
            lengths.observe(name, 1, int((i + 1) * rate) - int(i * rate))
    return lengths


def rows(step, draft: float = 0.0) -> Machine:
    """Where so many rows cost so much, and so does a pass of the draft model."""
    return Machine(step, draft, read=0.0)


FREE, LINEAR = rows(lambda rows: 1.0), rows(lambda rows: rows, 0.1)

# 1. What is chosen.


def test_where_rows_cost_nothing_and_drafts_stand_all_are_proposed():
    assert known(FREE, a=1.0).choose(["a"], [MOST]) == [MOST], "as many as there may be: each is a token"


def test_no_more_than_its_cap():
    lengths = known(FREE, a=1.0, b=1.0, c=1.0)
    chosen = lengths.choose(["a", "b", "c"], [2, MOST, 0])
    assert chosen == [2, MOST, 0], "nobody gets more than its cap"


def test_where_each_row_costs_a_step_nothing_is_proposed():
    assert known(LINEAR, a=0.8).choose(["a"], [MOST]) == [0], "a row that costs a step saves none"


def test_a_draft_model_as_slow_as_the_target_is_not_asked():
    slow = rows(FREE.step, 1.0)
    assert known(slow, a=0.9).choose(["a"], [MOST]) == [0], "a pass as long as a step saves none"


def test_who_is_guessed_badly_gets_none():
    some = rows(SOME.step, 0.05)
    chosen = known(some, a=0.05, b=0.95, c=0.1, d=0.9).choose(["a", "b", "c", "d"], [MOST] * 4)
    assert chosen == [0, MOST, 0, MOST], "likeliest first: a draft must be worth its row, by its own record"


def test_a_dear_first_row_is_looked_past():
    """The article's machine: one draft does not pay, and five do."""
    jump = StepTimes((1,), (0, 1, MOST), ((1.0, 1.9, 2.2),))
    tokens = expected_tokens(np.array([0.85]), np.array([MOST]), MOST)[0]
    assert tokens[1] / jump.seconds(1, 1) < 1 < tokens[MOST] / jump.seconds(1, MOST)
    assert known(jump, a=0.85).choose(["a"], [MOST]) == [MOST], "all lengths are compared, not the next alone"


@pytest.mark.parametrize("people", [1, 2, 4, 16])
def test_the_length_is_the_best_of_all(people):
    """Against every length tried by hand: tokens of the geometric series by seconds of the step."""
    times = rows(SOME.step, 0.1)
    names = [f"r{i}" for i in range(people)]
    lengths = known(times, **dict.fromkeys(names, 0.75))
    rate = lengths._rates["r0"]

    def by_hand(k: int) -> float:
        return people * sum(rate**j for j in range(k + 1)) / times.seconds(people, k)

    best = max(range(MOST + 1), key=by_hand)
    assert lengths.choose(names, [MOST] * people) == [best] * people, "tokens per second decide"


def test_to_choose_changes_nothing():
    lengths = known(SOME, a=0.7)
    before = dict(lengths._rates), lengths._mean_rate, lengths._plain_tokens, lengths._unread_tokens
    first = lengths.choose(["a", "new"], [MOST, 3])
    assert lengths.choose(["a", "new"], [MOST, 3]) == first, "it is asked twice in a step"
    assert before == (lengths._rates, lengths._mean_rate, lengths._plain_tokens, lengths._unread_tokens)
    assert lengths.choose([], []) == [], "nobody decodes, and nothing is chosen"


# 2. Tries.


def steps_to_the_next_try(lengths: DraftLengths, people: int, limit: int = 10_000) -> int:
    names = [str(i) for i in range(people)]
    for step in range(limit):
        if any(lengths.choose(names, [MOST] * people)):
            return step
        for name in names:
            lengths.observe(name, 0, 0)
    raise AssertionError("nothing is ever tried again: a text that has become easy is never found out")


@pytest.mark.parametrize("people", [1, 4])
def test_all_tries_together_cost_their_share(people):
    times = rows(lambda rows: 1 + 0.1 * rows, 0.1)
    lengths = known(times, **{str(i): 0.0 for i in range(people)})
    lengths.observe_proposals(0)
    steps = steps_to_the_next_try(lengths, people)
    chosen = lengths.choose([str(i) for i in range(people)], [MOST] * people)
    assert sum(chosen) == 1, "where none pays, the cheapest is tried: one draft for one request"
    plain = times.seconds(people, 0)
    assert steps == pytest.approx((0.1 + 0.1) / (module.TRY_SHARE * plain), abs=1.01), (
        "a try is due when a share of the plain steps since the last one pays for it"
    )


def test_who_has_much_to_read_is_tried_less_often():
    times = Machine(lambda rows: 1 + 0.1 * rows, 0.1, read=0.05)
    waits = []
    for late in (0, 40):
        lengths = known(times, **{"0": 0.0})
        lengths.observe_proposals(late)
        waits.append(steps_to_the_next_try(lengths, 1))
    assert waits[1] - waits[0] == pytest.approx(40 * 0.05 / (module.TRY_SHARE * 1.1), abs=1.01), (
        "what the last try had to read first is paid for, too"
    )


# 3. What is remembered.


def test_a_record_begins_with_what_is_usual():
    lengths = DraftLengths(MOST, FREE)
    assert lengths.choose(["a"], [MOST]) == [MOST], "what was never tried looks good"
    for _ in range(100):
        lengths.observe("a", 2, 0)
    lengths.observe("new", 0, 0)
    assert lengths._rates["new"] < 0.1, "a new request is expected to be like the others of late"
    for _ in range(100):
        lengths.observe("b", 3, 3)
    assert lengths._rates["b"] > 0.9


def test_what_is_behind_a_rejected_draft_says_nothing():
    one, many = DraftLengths(MOST, FREE), DraftLengths(MOST, FREE)
    one.observe("a", 1, 0)
    many.observe("a", 5, 0)
    assert one._rates == many._rates, "the first draft failed, the others were not judged"


def test_nothing_is_kept_of_who_has_left():
    lengths = known(FREE, a=0.5, b=0.5)
    lengths.retain({"b", "c"})
    assert lengths.num_requests == 1
    assert set(lengths._rates) == {"b"}


# 4. What a step brings, and what it takes.


def test_tokens_of_a_step_are_the_drafts_that_stand_and_one_more():
    tokens = expected_tokens(np.array([0.5, 1.0, 0.0]), np.array([2, 4, 4]), 4)
    assert tokens.tolist() == [[1, 1.5, 1.75, 1.75, 1.75], [1, 2, 3, 4, 5], [1, 1, 1, 1, 1]]


def test_a_step_in_which_some_have_drafts_takes_what_these_take_and_what_the_others_add():
    seconds = DraftLengths(MOST, rows(SOME.step, 0.1)).seconds(4)
    for m in range(1, 5):
        for k in range(1, MOST + 1):
            assert seconds[m - 1, k] == pytest.approx(SOME.step(4 + m * k) + 0.1 * k)


def test_but_no_less_than_as_many_drafts_of_all():
    """Where a number of rows takes another form, what a few take alone says too little."""
    cliff = MACHINES["many rows take another form"]
    seconds = DraftLengths(MOST, cliff).seconds(4)
    assert seconds[0, 4] >= cliff.seconds(4, 1), "four drafts of one are eight rows, as are one of each"


# 5. On simulated machines: no clock, no luck but the texts'.


@pytest.mark.parametrize("people", PEOPLE)
@pytest.mark.parametrize("name", MACHINES)
def test_it_is_nearly_as_fast_as_the_best_fixed_length(name, people):
    """Of which nobody knows beforehand which it is. The promise is 0.9, and 0.95 of no drafts."""
    best, k = best_fixed(MACHINES[name], people)
    reached = speed(MACHINES[name], people, DraftLengths(MOST, MACHINES[name]))
    assert reached > 0.9 * best, f"{reached:.2f} of plain steps' speed; with {k} drafts always {best:.2f}"
    assert reached > 0.95, f"{reached:.2f} of the speed without drafts"


def test_in_a_crowd_as_well():
    for name, machine in (MACHINES | OTHERS).items():
        reached = speed(machine, 16, DraftLengths(MOST, machine), 500)
        assert reached > 0.95, f"{name}: {reached:.2f} of the speed without drafts"


@pytest.mark.parametrize("people", PEOPLE)
@pytest.mark.parametrize("name", OTHERS)
def test_nor_is_it_slower_where_texts_differ_or_change(name, people):
    reached = speed(OTHERS[name], people, DraftLengths(MOST, OTHERS[name]))
    assert reached > 0.95, f"{reached:.2f} of the speed without drafts"
    if len(OTHERS[name].stands) > 1 or OTHERS[name].later:
        best, k = best_fixed(OTHERS[name], people)
        assert reached > best, f"{reached:.2f}; one length for all, {k}, reaches {best:.2f}"


@pytest.mark.parametrize(
    ("constant", "value", "name", "people"),
    [
        ("TRY_SHARE", 0.0, "texts become easy", 1),
        ("TRY_SHARE", 0.2, "to catch up is dear, and for nothing", 4),
        ("WEIGHT", 0.2, "steps run ahead", 1),
        ("WEIGHT", 0.01, "some requests are easy, some are not", 1),
    ],
)
def test_each_constant_earns_its_place(monkeypatch, constant, value, name, people):
    """Without tries, or with many; with a short memory, or a long one: somewhere more is lost."""
    kept = speed(OTHERS[name], people, DraftLengths(MOST, OTHERS[name]))
    monkeypatch.setattr(module, constant, value)
    assert speed(OTHERS[name], people, DraftLengths(MOST, OTHERS[name])) < 0.95 * kept


def test_a_table_that_is_given_decides_alike_every_time():
    table = StepTimes((1, 4), (0, MOST), ((1.0, 1.9), (1.2, 3.0)), 0.01)
    once, again = (speed(SOME, 4, DraftLengths(MOST, table)) for _ in range(2))
    assert once == again, "it reads no clock"


def test_a_try_is_due_as_soon_as_its_share_is_as_long_as_it_costs(monkeypatch):
    monkeypatch.setattr(module, "TRY_SHARE", 0.25)  # these numbers have no rounding
    lengths = DraftLengths(1, StepTimes((1,), (0, 1), ((1.0, 2.0),)))
    lengths.observe("a", 1, 0)
    lengths.observe_proposals(0)
    chosen = []
    for _ in range(5):
        chosen += lengths.choose(["a"], [1])
        lengths.observe("a", 0, 0)
    assert chosen == [0, 0, 0, 0, 1], "a quarter of four plain seconds pays for a second more"
