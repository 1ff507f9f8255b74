"""How many tokens are proposed: as many as pay."""

from types import SimpleNamespace

import pytest

from engine.speculation.lengths import TRIES, Lengths, Seconds, expected_tokens, size_of

MOST = 5


def lengths(step: dict[int, float], draft: float, **rates: float) -> Lengths:
    """That has seen steps of so many rows take so long, and drafts of each request stand so often."""
    made = Lengths(MOST)
    for rows, seconds in step.items():
        for _ in range(TRIES):
            made.step.add(rows, seconds)
            made.draft.add(rows, draft)
    for name, rate in rates.items():
        for i in range(400):
            made.observe(name, 1, int((i + 1) * rate) - int(i * rate))
    return made


FLAT = dict.fromkeys(range(1, 65), 1.0)
LINEAR = {rows: float(rows) for rows in FLAT}


def test_where_rows_cost_nothing_and_drafts_stand_all_are_proposed():
    assert lengths(FLAT, 0.0, a=1.0).choose(["a"], [MOST]) == [MOST], (
        "as many as there may be: each is a token"
    )


def test_no_more_than_its_cap():
    made = lengths(FLAT, 0.0, a=1.0, b=1.0)
    assert made.choose(["a", "b"], [2, 0]) == [2, 0], "nobody gets more than its cap"


def test_where_each_row_costs_a_step_nothing_is_proposed():
    assert lengths(LINEAR, 0.1, a=0.8).choose(["a"], [MOST]) == [0], "a row that costs a step saves none"


def test_a_draft_model_as_slow_as_the_target_is_not_asked():
    assert lengths(FLAT, 1.0, a=0.9).choose(["a"], [MOST]) == [0], "a pass as long as a step saves none"


def test_who_is_guessed_badly_gets_fewer():
    costs = {rows: 1 + 0.1 * rows for rows in FLAT}
    well, badly = lengths(costs, 0.05, a=0.95, b=0.05).choose(["a", "b"], [MOST, MOST])
    assert well > badly, "a draft must be worth its row, for each request by its own record"


def test_a_late_draft_must_be_worth_its_row_too():
    costs = {rows: 1 + 0.1 * rows for rows in FLAT}
    made = lengths(costs, 0.0, a=0.77, **{f"w{i}": 0.99 for i in range(5)})
    first, *others = made.choose(["a", *(f"w{i}" for i in range(5))], [MOST] * 6)
    assert 0 < first < min(others), "a late draft stands more seldom: with all before it"


def test_a_speed_is_tokens_by_seconds_and_a_row_takes_its_share():
    made = lengths({rows: 1 + 0.1 * rows for rows in FLAT}, 0.3)
    made.draft = Seconds()
    for _ in range(TRIES):
        made.draft.add(2, 0.05)
        made.draft.add(5, 0.3)
    speed, row_seconds = made._speed([0.5, 0.8], [2, 1], 2)  # 2 + 3 rows, two passes of the draft model
    assert speed == pytest.approx((1.75 + 1.8) / (1.5 + 2 * 0.05))
    assert row_seconds == pytest.approx(0.1), "what each row adds to the step without drafts"
    assert made._speed([0.5], [2], 0) == (pytest.approx(1 / 1.1), 0), "no drafts: no row of theirs"


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
        seconds = made.step.of(rows) + k * draft
        return people * sum(rate**j for j in range(k + 1)) / seconds

    best = max(range(MOST + 1), key=speed)
    assert speed(max(chosen)) > 0.95 * speed(best), f"{max(chosen)} drafts a step; the fastest are {best}"


def test_lengths_are_tried_one_by_one():
    made, chosen = Lengths(MOST), []
    for _ in range(2 * (MOST + 1) * TRIES):
        (k,) = made.choose(["a"], [MOST])
        chosen.append(k)
        made.stepped(1, k + 1, 1.0)
        made.observe("a", k, k)
    tries = [k for k in range(MOST) for _ in range(TRIES)]
    assert chosen[: len(tries)] == tries, "none beyond the first that is not known; none is known by one try"
    assert set(chosen[len(tries) :]) == {MOST}


def test_a_crowd_tries_no_more_than_it_must():
    made = Lengths(MOST)
    names, chosen = [str(i) for i in range(32)], []
    for _ in range(60):
        k = made.choose(names, [MOST] * 32)[0]
        chosen.append(k)
        made.stepped(32, 32 * (k + 1), 1.0 + 0.9 * k)
    assert max(chosen) == 1
    assert chosen.count(1) == TRIES, "a first draft does not pay, so a second is not tried"


def test_who_had_no_luck_gets_another_chance():
    costs = {rows: 1 + 0.1 * rows for rows in FLAT}
    made = lengths(costs, 0.05, a=0.01, b=0.9)
    assert made.choose(["a"], [MOST]) == [0]
    for _ in range(200):
        made.observe("a", 0, 0)
    assert max(made.choose(["a"], [MOST])) > 0, "without drafts its record goes back to what is usual"


def test_what_was_measured_in_a_bad_moment_is_measured_again():
    made = lengths({1: 1.0}, 0.0, a=0.9)
    for rows in range(2, MOST + 2):  # somebody else had the machine
        for _ in range(TRIES):
            made.step.add(rows, 100.0)
    assert made.choose(["a"], [MOST]) == [0]
    tried = []
    for _ in range(2000):
        made.stepped(1, 1, 1.0)
        tried += made.choose(["a"], [MOST])
    assert max(tried) > 0, "what was not tried of late looks cheaper by and by"


def test_what_fades_makes_no_smaller_size_cheaper():
    made = lengths({1: 1.0, 2: 1.1, 3: 1.2}, 5.0, a=0.9)  # a draft's time was measured in a bad moment
    assert made.choose(["a"], [MOST]) == [0]
    for _ in range(1000):
        made.stepped(1, 1, 1.0)
    assert made.step.of(1) == 1.0, "what is tried all the time costs what it costs"
    assert max(made.choose(["a"], [MOST])) > 0, "else nothing would ever be tried again"


def test_who_finds_no_draft_is_asked_less():
    costs = {rows: 1 + 0.1 * rows for rows in FLAT}
    made = lengths(costs, 0.05, a=0.9)
    assert max(made.choose(["a"], [MOST])) > 0
    for _ in range(60):
        made.found_nothing("a")
    assert made.choose(["a"], [MOST]) == [0], "to look for drafts costs time, too"


def test_nothing_is_kept_of_who_has_finished():
    made = lengths(FLAT, 0.0, a=0.5)
    made.on_finish(SimpleNamespace(id="a"))
    assert not made._accepted


def test_a_try_costs_more_in_a_crowd_so_it_is_made_less_often():
    made = lengths({1: 1.0, 6: 100.0}, 1.0)
    before = made.step.of(6), made.draft.of(1)
    made.stepped(1, 1, 1.0)
    alone = made.step.of(6)
    made.stepped(32, 1, 1.0)
    assert made.step.of(1) == 1.0, "what was tried just now does not fade"
    assert before[0] - alone > 20 * (alone - made.step.of(6)) > 0
    assert made.draft.of(1) < before[1], "the draft model, if it is not asked, looks cheaper, too"


def test_fewer_rows_never_cost_more_than_more_rows_did():
    made = Seconds()
    assert made.of(3) == 0, "nothing is known: proposals look free"
    made.add(4, 1.0)
    made.add(4, 1.0)
    assert made.of(4) == 0, "twice is not often enough: the first of a kind are slow"
    assert not made.knows(4)
    made.add(4, 1.0)
    assert made.knows(4)
    for _ in range(TRIES):
        made.add(2, 5.0)
    assert made.of(2) == 1.0, "what takes 4 rows a second takes 2 rows no longer"
    assert made.of(1) == 0.0
    for _ in range(TRIES):
        made.add(6, 2.0)
    assert made.of(8) == 3.0, "what is not known yet lies on the line: 1 at 4 rows, 2 at 6"


def test_a_shorter_time_says_more_than_a_longer_one():
    made = Seconds()
    for _ in range(TRIES):
        made.add(4, 1.0)
    made.add(4, 20.0)
    assert made.of(4) == pytest.approx(1.1), "somebody else had the machine for a moment"
    for _ in range(40):
        made.add(4, 2.0)
    assert made.of(4) == 2.0, "but what stays so is believed"
    made.add(4, 1.0)
    assert made.of(4) == 1.5


def test_what_is_tried_again_costs_what_it_costs():
    made = Seconds()
    for _ in range(TRIES):
        made.add(4, 1.0)
    made.fade(0.5)
    assert made.of(4) == 0.5
    made.add(4, 1.0)
    assert made.of(4) == 1.0, "one try, and it is not faded any more"


def test_sizes_are_exact_where_few_rows_matter():
    assert [size_of(rows) for rows in (1, 2, 7, 8, 9, 10, 16, 17, 33, 64)] == [
        1,
        2,
        7,
        8,
        10,
        10,
        16,
        20,
        40,
        64,
    ]


def test_tokens_of_a_step_are_the_drafts_that_stand_and_one_more():
    assert expected_tokens(0.5, 0) == 1
    assert expected_tokens(0.5, 2) == 1 + 0.5 + 0.25
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1


def test_a_record_begins_with_what_is_usual():
    made = Lengths(MOST)
    for _ in range(300):
        made.observe("a", 2, 0)
    made.observe("new", 0, 0)
    assert made._accepted["new"].value < 0.3, "a new request is expected to be like the others of late"
    for _ in range(100):
        made.observe("b", 3, 3)
    assert made._accepted["b"].value > 0.9


def test_what_is_behind_a_rejected_draft_says_nothing():
    one, many = Lengths(MOST), Lengths(MOST)
    one.observe("a", 1, 0)
    many.observe("a", 5, 0)
    assert one._accepted["a"].value == many._accepted["a"].value, (
        "the first draft failed, the others were not judged"
    )


def test_nobody_decodes_and_nothing_is_chosen():
    assert Lengths(MOST).choose([], []) == []
