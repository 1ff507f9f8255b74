"""How many tokens are proposed: as many as pay."""

from types import SimpleNamespace

import pytest

from engine.speculation.lengths import Lengths
from engine.speculation.ngram import lookup

MOST = 5


def lengths(step: dict[int, float], draft: float, **rates: float) -> Lengths:
    """That has seen steps of so many rows take so long, and drafts of each request stand so often."""
    made = Lengths(MOST)
    for rows, seconds in step.items():
        made.step.add(rows, seconds)
        made.draft.add(rows, draft)
    for name, rate in rates.items():
        for i in range(400):
            made.observe(name, 1, int((i + 1) * rate) - int(i * rate))
    return made


FLAT = dict.fromkeys((1, 2, 4, 8, 16, 32, 64, 128, 256), 1.0)
LINEAR = {rows: float(rows) for rows in FLAT}


def test_where_rows_cost_nothing_and_drafts_stand_all_are_proposed():
    assert lengths(FLAT, 0.0, a=1.0).choose(["a"], [MOST]) == [MOST]


def test_no_more_than_its_cap():
    assert lengths(FLAT, 0.0, a=1.0, b=1.0).choose(["a", "b"], [2, 0]) == [2, 0]


def test_where_each_row_costs_a_step_nothing_is_proposed():
    assert lengths(LINEAR, 0.1, a=0.8).choose(["a"], [MOST]) == [0], "a row that costs a step saves none"


def test_a_draft_model_as_slow_as_the_target_is_not_asked():
    assert lengths(FLAT, 1.0, a=0.9).choose(["a"], [MOST]) == [0]


def test_who_is_guessed_badly_gets_fewer():
    costs = {rows: 1 + 0.1 * rows for rows in FLAT}
    well, badly = lengths(costs, 0.05, a=0.95, b=0.05).choose(["a", "b"], [MOST, MOST])
    assert well > badly, "a draft must be worth its row, for each request by its own record"


@pytest.mark.parametrize("people", [1, 2, 4])
def test_the_length_is_the_best_of_all(people):
    """Against every length tried by hand: tokens of the geometric series by seconds of the step."""
    costs, draft = {rows: 1 + 0.05 * rows for rows in FLAT}, 0.1
    names = [str(i) for i in range(people)]
    made = lengths(costs, draft, **{f"r{name}": 0.75 for name in names})
    chosen = made.choose([f"r{name}" for name in names], [MOST] * people)
    rate = made._accepted["r0"].value

    def speed(k: int) -> float:
        rows = people * (k + 1)
        seconds = costs[2 ** (rows - 1).bit_length()] + k * draft
        return people * sum(rate**j for j in range(k + 1)) / seconds

    best = max(range(MOST + 1), key=speed)
    assert speed(max(chosen)) > 0.95 * speed(best)


def test_what_was_never_tried_is_tried():
    made = Lengths(MOST)
    assert made.choose(["a"], [MOST]) == [MOST], "nothing is known yet: proposals look free"
    made.step.add(1, 1.0)
    assert max(made.choose(["a"], [MOST])) > 0, "more rows have never been seen to cost more"


def test_who_had_no_luck_gets_another_chance():
    costs = {rows: 1 + 0.1 * rows for rows in FLAT}
    made = lengths(costs, 0.05, a=0.01, b=0.9)
    assert made.choose(["a"], [MOST]) == [0]
    for _ in range(200):
        made.observe("a", 0, 0)
    assert max(made.choose(["a"], [MOST])) > 0, "without drafts its record goes back to what is usual"


def test_what_was_measured_in_a_bad_moment_is_measured_again():
    made = lengths({1: 1.0}, 0.0, a=0.9)
    made.step.add(MOST + 1, 100.0)  # somebody else had the machine
    made.step.add(2, 100.0)
    assert made.choose(["a"], [MOST]) == [0]
    tried = []
    for _ in range(1000):
        made.step.add(1, 1.0)
        tried += made.choose(["a"], [MOST])
    assert max(tried) > 0


def test_nothing_is_kept_of_who_has_finished():
    made = lengths(FLAT, 0.0, a=0.5)
    made.on_finish(SimpleNamespace(id="a"))
    assert not made._accepted


@pytest.mark.parametrize(
    ("text", "most", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),  # the latest place
        ([5, 1, 2, 3, 4, 6, 2, 3, 4, 7, 1, 2, 3, 4], 1, [6]),  # the longest match wins over a later short one
        ([1, 2, 3, 4], 3, []),
        ([7, 7, 7], 3, [7]),
        ([1], 3, []),
        ([], 3, []),
        ([1, 5, 1], 3, []),  # one token is no match
    ],
)
def test_lookup_finds_what_followed_the_same_words(text, most, found):
    assert lookup(text, most) == found
