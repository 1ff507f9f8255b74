"""Places, counted; the pace at which they come back; and when to come again."""

import math

import pytest

from engine.server.capacity import MAX_RETRY_SECONDS, PACE_ROUNDS, Capacity, QueueLimits, queue_limits
from tests.part01.outcome import outcome
from tests.part15.crowd import milliseconds, serve, whole_seconds
from tests.part15.fakes import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def capacity(clock) -> Capacity:
    """Empty, for 8 sequences and 800 tokens, of which 2 sequences run at once."""
    return Capacity(QueueLimits(8, 800), 2, clock)


@pytest.fixture
def full(capacity, clock) -> Capacity:
    """The same, full since second 0, of sequences of 100 tokens. In 8 seconds two left, and others came; with
    the two who run now that is 4: one leaves every 2 seconds.
    """
    capacity.take(8, 800)
    for _ in range(2):
        clock.now += 4
        capacity.give_back(1, 100)
        capacity.take(1, 100)
    return capacity


@pytest.mark.parametrize("limits", [(0, 400), (4, 0), (-1, 400)])
def test_a_queue_with_no_room_at_all_is_refused(limits):
    with pytest.raises(ValueError, match="at least 1 is accepted"):
        QueueLimits(*limits)


def test_what_is_not_said_follows_from_what_runs_at_once():
    assert queue_limits(100, 10_000, 500) == QueueLimits(1600, 160_000), "16 rounds of seats and of memory"
    assert queue_limits(1, 10, 500) == QueueLimits(256, 64_000), "128 choices of full length have room"
    assert queue_limits(100, 10_000, 500, 7, 8) == QueueLimits(7, 8)


def test_there_is_room_up_to_the_limits_and_not_beyond(capacity):
    capacity.take(7, 700)
    assert capacity.fits(1, 100), "the last place may be taken"
    assert not capacity.fits(2, 100), "9 sequences in a queue for 8"
    assert not capacity.fits(1, 101), "801 tokens in a queue for 800"
    assert capacity.could_ever_fit(8, 800)
    assert not capacity.could_ever_fit(9, 1)
    assert not capacity.could_ever_fit(1, 801)


def test_what_is_given_back_can_be_taken_again(capacity):
    capacity.take(8, 800)
    capacity.give_back(8, 800)
    assert (capacity.sequences, capacity.tokens) == (0, 0)
    assert capacity.fits(8, 800)


def test_the_pace_is_what_left_and_what_runs_in_a_second(full):
    assert full.pace() == 0.5, "2 have left in 8 seconds, and 2 run: 4 in 8 seconds"


def test_with_a_free_seat_no_pace_is_known(capacity, clock):
    """What leaves then tells of the demand: any server completes one an hour, if one an hour comes."""
    for _ in range(20):
        capacity.take(2, 200)
        clock.now += 3600
        capacity.give_back(2, 200)
    assert capacity.pace() == math.inf, "demand is not capacity"
    capacity.take(8, 800)
    clock.now += 4
    assert capacity.pace() == 0.5, "2 run for 4 seconds by now: nothing from before counts"


def test_a_pace_belongs_to_the_crowd_in_which_it_was_measured(full):
    full.give_back(6, 600)
    assert full.pace() == math.inf, "nobody waits any more"


def test_places_for_which_nobody_worked_tell_of_no_pace(full):
    full.give_back(1, 0, has_begun=False)
    assert full.pace() == 0.5, "a request that was refused did not leave at the engine's pace"


def test_while_nobody_leaves_the_pace_falls(full, clock):
    clock.now += 8
    assert full.pace() == 0.25, "4 sequences in 16 seconds"


def test_n_samples_that_leave_together_are_n(full):
    full.give_back(4, 400)
    assert full.pace() == 1.0, "6 have left, and 2 run, in 8 seconds"


def test_the_latest_ends_tell_of_the_pace_and_no_others(full, clock):
    ends = PACE_ROUNDS * 2
    for seconds in [1000] + [4] * ends:
        clock.now += seconds
        full.give_back(1, 100)
        full.take(1, 100)
    assert full.pace() == (ends + 2) / (4 * ends), "those of four rounds of the seats, and the two who run"


def test_who_comes_back_finds_half_of_the_queue(full):
    assert full.retry_after(1, 100) == 6.0, (
        "6 wait for a seat: to be back when half of those who wait have one, 3 · 2 s"
    )


def test_the_time_is_not_rounded(full, clock):
    clock.now += 1
    assert full.retry_after(1, 100) == 6.75, "3 must leave, at 4 in 9 seconds: whoever writes headers rounds"


def test_who_needs_more_room_waits_until_it_is_there(full):
    assert full.retry_after(5, 500) == 10.0, "5 are missing: before they have left there is no room"


def test_only_what_is_missing_must_leave(full):
    full.give_back(1, 100, has_begun=False)
    assert full.retry_after(5, 500) == 8.0, "one of the 5 places is free already: 4 are missing"


def test_the_scarcer_of_the_two_kinds_counts(full):
    assert full.retry_after(1, 700) == 14.0, (
        "1 sequence is missing, and 700 tokens: there is room when there is room for both: 7 must leave"
    )


def test_tokens_leave_with_their_sequences_as_many_as_these_hold(capacity, clock):
    capacity.take(4, 800)
    clock.now += 4
    assert capacity.retry_after(1, 600) == 6.0, "sequences of 200 tokens hold 600: 3 must leave, at 2 in 4 s"


def test_each_refusal_is_told_the_same(full):
    told = [full.retry_after(1, 100) for _ in range(100)]
    assert set(told) == {6.0}, "who finds no room again is told again: that costs nothing"


def test_before_a_second_is_over_nobody_knows_the_pace(capacity):
    capacity.take(8, 800)
    assert capacity.retry_after(1, 100) == 0.0, "come at once: nobody is sent away on a guess"


def test_with_an_empty_seat_nobody_is_sent_away(capacity, clock):
    """Two requests hold all tokens, and both have a seat."""
    capacity.take(2, 800)
    clock.now += 100
    assert capacity.retry_after(1, 100) == 0.0, "no pace is known: to be back at once"


def test_nobody_is_sent_away_for_longer_than_the_most(full, clock):
    clock.now += 1000
    assert full.retry_after(1, 100) == MAX_RETRY_SECONDS, "at most MAX_RETRY_SECONDS"


def one_of_five_is_long(lengths) -> int:
    return 184 if lengths.random() < 0.2 else 4


@pytest.mark.parametrize(
    "length", [lambda _: 40, lambda lengths: lengths.randint(4, 76), one_of_five_is_long]
)
@pytest.mark.parametrize("slow", [1, 8])
@pytest.mark.parametrize("before", [0, 24], ids=["a new server", "after light traffic"])
def test_a_bound_starves_no_seat(before, slow, length):
    """The first version took what had left a server that was half empty for what it can do. After light
    traffic, the crowd was done 2 to 3 times as late as without a bound.
    """
    for seed in range(4):
        unbounded, _ = serve(10**6, before, length, slow, seed)
        bounded, refusals = serve(32, before, length, slow, seed)
        assert refusals > 0
        assert bounded <= 1.15 * unbounded, (
            f"a refusal costs nothing, an empty seat does: all are done after {bounded:.1f} s, and without a "
            f"bound after {unbounded:.1f} s"
        )
        assert refusals < 700, f"{refusals} refusals: told 1 second each, a slow server writes thousands"


def test_where_a_second_is_long_milliseconds_keep_the_seats_taken():
    """A crowd that a fast server is done with in 2 seconds."""
    for before in (0, 24):
        unbounded, bounded, rounded = (
            serve(bound, before, lambda lengths: lengths.randint(16, 96), 0.1, 0, header)[0]
            for bound, header in ((10**6, milliseconds), (32, milliseconds), (32, whole_seconds))
        )
        assert bounded <= 1.15 * unbounded, "told in milliseconds, they come before a seat is empty"
        assert rounded > 1.5 * unbounded, "told at least a second, most seats are empty for it"


def test_half_of_an_odd_number_is_no_whole_number(full):
    full.give_back(1, 100, has_begun=False)
    assert full.retry_after(2, 200) == 5.0, "5 wait for a seat: half of them are 2.5, at one in 2 seconds"


def test_a_deadline_may_come_when_nobody_else_is_there(capacity):
    told = outcome(capacity.retry_after, 0, 0)
    assert told == 0.0, f"nobody is admitted, and nothing is missing: 0 s, not {told}"
