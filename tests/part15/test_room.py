"""Places, counted; the pace at which they come back; and when to come again."""

import pytest

from engine.server.room import FIRST_GUESS, MAX_RETRY_SECONDS, RECENT, QueueLimits, Room, queue_limits
from tests.part15.fakes import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def room(clock) -> Room:
    """Empty, for 4 sequences and 400 tokens."""
    return Room(QueueLimits(4, 400), clock)


@pytest.fixture
def full(room, clock) -> Room:
    """The same, full since second 0; every 2 seconds a sequence of 100 tokens left, and another came."""
    room.take(4, 400)
    for _ in range(4):
        clock.now += 2
        room.give_back(1, 100)
        room.take(1, 100)
    return room


@pytest.mark.parametrize("limits", [(0, 400), (4, 0), (-1, 400)])
def test_a_queue_with_no_room_at_all_is_refused(limits):
    with pytest.raises(ValueError, match="at least 1 is accepted"):
        QueueLimits(*limits)


def test_what_is_not_said_follows_from_what_runs_at_once():
    assert queue_limits(100, 10_000, 500) == QueueLimits(1600, 160_000), "16 rounds of seats and of memory"
    assert queue_limits(1, 10, 500) == QueueLimits(256, 64_000), "128 choices of full length have room"
    assert queue_limits(100, 10_000, 500, 7, 8) == QueueLimits(7, 8)


def test_there_is_room_up_to_the_limits_and_not_beyond(room):
    room.take(3, 300)
    assert room.fits(1, 100), "the last place may be taken"
    assert not room.fits(2, 100), "5 sequences in a room for 4"
    assert not room.fits(1, 101), "401 tokens in a room for 400"
    assert room.could_ever_fit(4, 400)
    assert not room.could_ever_fit(5, 1)
    assert not room.could_ever_fit(1, 401)


def test_what_is_given_back_can_be_taken_again(room):
    room.take(4, 400)
    room.give_back(4, 400)
    assert (room.sequences, room.tokens) == (0, 0)
    assert room.fits(4, 400)


def test_the_pace_is_what_left_in_a_second(full):
    assert full.pace() == (0.5, 50.0), "4 sequences of 100 tokens left in 8 seconds"


def test_time_in_which_nobody_was_here_says_nothing_about_the_pace(full, clock):
    full.give_back(4, 400)
    clock.now += 1000
    full.take(1, 100)
    assert full.pace() == (1.0, 100.0), "8 sequences left in 8 busy seconds; the 1,000 idle ones do not count"


def test_places_for_which_nobody_worked_tell_of_no_pace(full):
    full.give_back(1, 0, worked=False)
    assert full.pace() == (0.5, 50.0), "a request that was refused did not leave at the engine's pace"


def test_while_nobody_leaves_the_pace_falls(full, clock):
    clock.now += 8
    assert full.pace() == (0.25, 25.0), "4 sequences in 16 seconds"


def test_the_latest_ends_tell_of_the_pace_and_no_others(room, clock):
    room.take(1, 100)
    for seconds in [1] * RECENT + [8] + [4] * (RECENT - 1):
        clock.now += seconds
        room.take(1, 100)
        room.give_back(1, 100)
    assert room.pace()[0] == RECENT / (8 + 4 * (RECENT - 1)), "RECENT ends, and the time since the one before"


def test_before_anybody_has_left_the_pace_is_a_guess(room, clock):
    room.take(4, 400)
    for seconds in (0, 3):
        clock.now += seconds
        assert room.seconds_until_room(1, 100) == FIRST_GUESS, "no pace is known: FIRST_GUESS, and no promise"
    room.give_back(1, 0)
    assert room.seconds_until_room(1, 100) == FIRST_GUESS, "nor is it if only sequences have left"


def test_a_place_is_free_when_one_has_left(full):
    assert full.seconds_until_room(1, 100) == 2.0, "1 sequence is too many, and 0.5 leave in a second: 2 s"


def test_only_what_is_missing_must_leave(full):
    full.give_back(1, 100)  # at once: now 5 have left in 8 seconds
    assert full.seconds_until_room(2, 200) == pytest.approx(1 / (5 / 8)), (
        "one of the 2 places is free already: 1 is missing, at 5 in 8 seconds"
    )


def test_the_slower_of_the_two_kinds_counts(full):
    assert full.seconds_until_room(1, 300) == 6.0, (
        "1 sequence leaves in 2 s, but 300 tokens in 6 s: there is room when there is room for both"
    )


def test_two_who_are_turned_away_at_once_are_not_sent_back_at_once(full):
    told = [full.seconds_until_room(1, 100) for _ in range(3)]
    assert told == [2.0, 4.0, 6.0], (
        "each is told a time behind the one promised last, by as long as what it asks for takes to leave"
    )


def test_who_asks_for_more_holds_the_next_one_up_for_longer(full):
    assert full.seconds_until_room(1, 100) == 2.0
    assert full.seconds_until_room(2, 200) == 6.0, "2 places leave in 4 s, behind the promise for second 2"
    assert full.seconds_until_room(1, 100) == 8.0


def test_a_promise_whose_time_has_come_holds_nobody_up(full, clock):
    full.seconds_until_room(1, 100)
    for _ in range(4):  # the pace stays
        clock.now += 2
        full.give_back(1, 100)
        full.take(1, 100)
    assert full.seconds_until_room(1, 100) == 2.0, (
        "the promise was for 6 seconds ago: what is missing now counts, from now on"
    )


def test_nobody_is_sent_away_for_longer_than_the_most(full):
    told = [full.seconds_until_room(4, 400) for _ in range(20)]
    assert max(told) == told[-1] == MAX_RETRY_SECONDS, "at most MAX_RETRY_SECONDS"
    assert full.seconds_until_room(1, 100) == MAX_RETRY_SECONDS, (
        "what was promised last is no later than that"
    )


def test_a_flood_is_forgotten_in_time(full, clock):
    """Asked for by a hundred seconds of requests, a minute is all that is promised."""
    for _ in range(20):
        full.seconds_until_room(4, 400)
    for _ in range(30):
        clock.now += 2
        full.give_back(1, 100)
        full.take(1, 100)
    assert full.seconds_until_room(1, 100) == 2.0, "a flood a minute ago holds nobody up"


def test_whoever_comes_back_when_told_finds_room(full, clock):
    """At a steady pace of one every 2 seconds, which nobody changes."""
    back = sorted(clock.now + full.seconds_until_room(1, 100) for _ in range(10))
    for when in back:
        while clock.now + 2 <= when:
            clock.now += 2
            full.give_back(1, 100)
        clock.now = when
        assert full.fits(1, 100), f"told to come at second {when}, and there is no room"
        full.take(1, 100)
