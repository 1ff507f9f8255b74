"""Who gets a step's time, event by event, on a clock of the test's own."""

from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from engine.telemetry.shares import Weights
from tests.part19.metering import Asked, Played, paid


@pytest.fixture
def played() -> Played:
    return Played()


# Without a step: these are green from the start.


def test_while_nobody_is_there_it_is_idle(played):
    assert played.seconds(5) == {"idle": 5}


def test_from_an_arrival_on_it_is_not_idle_but_under_way(played):
    played.arrive(2, Asked("a"))
    assert played.seconds(5) == {"idle": 2, "under_way": 3}


def test_when_the_last_has_left_it_is_idle_again(played):
    one, other = Asked("a"), Asked("b")
    played.arrive(1, one, other)
    played.finish(2, one, "abort")
    assert played.seconds(3) == {"idle": 1, "under_way": 2}
    played.finish(4, other, "abort")
    assert played.seconds(6) == {"idle": 6}, "no step ended it, so this time was for nobody"


# A step.


def test_a_step_is_paid_by_its_request(played):
    one = Asked("a")
    played.arrive(1, one)
    played.step(1, 3, {one: 10})
    assert paid(one) == {"input": 2}, "the step's two seconds are on the request's account"
    assert played.seconds(3) == {"idle": 1, "input": 2}, "and in the sum of their kind"


def test_a_step_is_shared_by_work_not_by_heads(played):
    long, short = Asked("a", 30), Asked("b", 10)
    played.arrive(0, long, short)
    played.step(0, 4, {long: 30, short: 10})
    assert (paid(long), paid(short)) == ({"input": 3}, {"input": 1}), "30 tokens and 10: three to one"


def test_each_sample_of_a_request_pays_for_its_own_work(played):
    first, second, other = Asked("a/0", request_id="a"), Asked("a/1", request_id="a"), Asked("b")
    played.arrive(0, first, second, other)
    played.step(0, 3, dict.fromkeys((first, second, other), 10))
    assert (paid(first), paid(other)) == ({"input": 2}, {"input": 1}), (
        "two samples of a request beside another one, all alike: two thirds and one third"
    )


def test_a_step_waits_while_somebody_reads(played):
    one = Asked("a")
    played.arrive(0, one)
    with ThreadPoolExecutor(1) as pool:
        with played.meter._lock:
            step = pool.submit(played.step, 0, 4, {one: 10})
            wait([step], timeout=0.2)
            waits, charged = not step.done(), paid(one)
        step.result()
    assert (waits, charged) == (True, {}), "on_step holds the lock: a reader never sees half of a step"
    assert paid(one) == {"input": 4}


def test_the_last_nanosecond_is_given_out(played):
    three = [Asked(name, 1) for name in "abc"]
    played.arrive(0, *three)
    played.step(0, 10e-9, dict.fromkeys(three, 1))
    assert [request.stats.account.total_ns for request in three] == [4, 3, 3], (
        "10 ns among three equals: one share of all works (share_out), so that none is lost"
    )


def test_the_works_of_all_requests_are_shared_out_in_one_go():
    """Three equal works, two of them of one request: what it read of the cache, and what it computed."""
    played = Played(Weights(input=1, output=1, held=1))
    hit, other = Asked("a", 12), Asked("b", 4)
    played.arrive(0, hit, other)
    hit.computed = 8  # found in the cache
    played.step(0, 11e-9, {hit: 4, other: 4})
    assert [request.stats.account.total_ns for request in (hit, other)] == [8, 3], (
        "11 ns among three equal works are 4, 4 and 3: not first among the requests, which would be 7 and 4"
    )


def test_time_between_two_steps_belongs_to_the_step_that_ends_it(played):
    one = Asked("a")
    played.arrive(0, one)
    played.step(1, 2, {one: 10})
    played.step(5, 6, {one: 1})
    assert paid(one) == {"input": 2, "output": 4}, (
        "somebody was there all the time: what lies before a step's start is the step's, not lost"
    )
    assert played.seconds(6) == {"input": 2, "output": 4}


def test_a_second_arrival_makes_no_time_idle(played):
    one, other = Asked("a"), Asked("b")
    played.arrive(0, one)
    played.arrive(2, other)
    played.step(1, 3, {one: 10})
    assert paid(one) == {"input": 3}, (
        "somebody was there when the second came: the step has all three seconds"
    )


def test_steps_that_overlap_have_each_second_once(played):
    one, other = Asked("a"), Asked("b")
    played.arrive(0, one, other)
    played.step(0, 10, {one: 10})
    played.step(4, 12, {other: 10})  # launched before the other's tokens had been read
    assert paid(one) == {"input": 10}
    assert paid(other) == {"input": 2}, (
        "the seconds 4 to 10 are the first step's: the second has from its end to its own"
    )
    assert played.seconds(12) == {"input": 12}


def test_a_failed_step_costs_its_requests_nothing(played):
    one = Asked("a")
    played.arrive(0, one)
    played.step(0, 3, {one: 10}, error="RuntimeError: the cable came loose")
    assert paid(one) == {}, "a failed step was for nothing: no request pays for it"
    assert played.seconds(3) == {"failed": 3}, "a failed step took its time: the operator pays, as `failed`"
    played.step(3, 5, {one: 10})
    assert paid(one) == {"input": 2}, "what a failed step did was not reached: it is done for the first time"
    assert one.stats.account.tokens == {"cached": 0, "input": 10, "output": 1}


def test_nobody_pays_for_a_request_that_has_left(played):
    gone, stays = Asked("a"), Asked("b")
    played.arrive(0, gone, stays)
    played.step(0, 2, {gone: 10, stays: 10})
    played.finish(2, gone, "abort")
    played.step(2, 4, {gone: 1, stays: 1})  # it was in flight
    assert paid(gone) == {"input": 1}, "its account is complete: nothing comes on top"
    assert paid(stays) == {"input": 1, "output": 1}, "the others pay their own work, not that of who has left"
    assert played.seconds(4) == {"input": 2, "output": 1, "late": 1}


def test_late_work_weighs_as_output_and_what_it_holds():
    played = Played(Weights(input=1, output=10, held=2))
    gone, stays = Asked("a", 15), Asked("b", 20)
    played.arrive(0, gone, stays)
    played.step(0, 0, {gone: 15, stays: 20})
    played.finish(0, gone)
    played.step(0, 94, {gone: 1, stays: 1})
    late, output = 10 + 2 * 16, 10 + 2 * 21
    assert played.seconds(94) == {"late": late, "output": output}, (
        "late work: each token counts weights.output, each held one weights.held"
    )


def test_what_is_computed_again_is_not_on_the_account(played):
    one = Asked("a")
    played.arrive(0, one)
    played.step(0, 1, {one: 10})
    one.computed = 0  # preempted
    played.step(1, 3, {one: 11})  # its prompt again, and its first output token
    assert paid(one) == {"input": 1, "output": pytest.approx(2 / 11)}
    assert played.seconds(3)["recomputed"] == pytest.approx(2 * 10 / 11), (
        "ten tokens again, one new: the ten are the operator's"
    )
    assert one.stats.account.tokens == {"cached": 0, "input": 10, "output": 2}


def test_cached_tokens_bear_their_reading_in_each_chunk_of_the_prompt():
    played = Played(Weights(input=1, output=1, held=1))
    one = Asked("a", 20)
    played.arrive(0, one)
    one.computed = 8  # found in the cache
    played.step(0, 20, {one: 6})  # 6 computed and 14 held
    played.step(20, 46, {one: 6})  # 6 computed and 20 held
    assert paid(one) == {"cached": 8 + 8, "input": 12 + 18}, (
        "the eight that were found are read by both chunks"
    )
    assert one.stats.account.tokens == {"cached": 8, "input": 12, "output": 1}, "and are counted once"


@pytest.mark.parametrize("expected", [0, 1])
def test_rejected_drafts_are_not_computed_again_but_for_the_first_time(played, expected):
    """Part 16: a step computes four tokens and one of them stands; the next begins behind that one. A token
    that is expected (Part 13) is not known.
    """
    one = Asked("a")
    played.arrive(0, one)
    played.step(0, 1, {one: 10})
    one.token_ids += [-1] * expected
    one.num_output_placeholders = expected
    played.step(1, 2, {one: 4})
    one.computed = 11
    played.step(2, 3, {one: 4})
    assert played.seconds(3) == {"input": 1, "output": 2}, "what a rejected draft left behind was not reached"
    assert one.stats.account.tokens == {"cached": 0, "input": 10, "output": 3}


def test_guesses_that_stand_make_an_answer_cheaper(played):
    """Part 16: the same ten tokens, in steps of a second each; two guesses of each step stand."""
    plain, guessed = Asked("a"), Asked("b")
    played.arrive(0, plain)
    played.step(0, 1, {plain: 10})
    for second in range(1, 10):
        played.step(second, second + 1, {plain: 1})
    played.finish(10, plain)
    played.arrive(10, guessed)
    played.step(10, 11, {guessed: 10})
    for second in range(11, 14):
        guessed.token_ids += [0, 0]
        guessed.stats.token_times += [second + 1.0] * 2
        played.step(second, second + 1, {guessed: 3})
    played.finish(14, guessed)
    for one in (plain, guessed):
        assert one.stats.account.tokens == {"cached": 0, "input": 10, "output": 10}
    assert paid(plain) == {"input": 1, "output": 9}
    assert paid(guessed) == {"input": 1, "output": 3}, "three tokens of a step share what the step costs"


def test_samples_of_a_request_share_its_account(played):
    first, second = Asked("a/0", request_id="a"), Asked("a/1", request_id="a")
    played.arrive(0, first, second)
    played.step(0, 2, {first: 10, second: 10})
    assert first.stats.account is second.stats.account
    assert paid(first) == {"input": 2}
    assert first.stats.account.tokens["input"] == 10, "there is one prompt, however many samples read it"
    heard = []
    played.meter.closed.append(heard.append)
    played.finish(2, first)
    assert heard == [], "the account is complete when all samples have ended"
    assert [account.request_id for account in played.meter.unfinished()] == ["a"]
    played.finish(2, second)
    assert heard == [first.stats.account]
    assert played.meter.unfinished() == []


def test_a_name_that_is_used_again_has_a_new_account(played):
    one, again = Asked("a"), Asked("a")
    played.arrive(0, one)
    played.step(0, 1, {one: 10})
    played.finish(1, one)
    played.arrive(1, again)
    played.step(1, 4, {again: 10})
    assert (paid(one), paid(again)) == ({"input": 1}, {"input": 3})


def test_who_was_there_before_the_meter_is_nobody_s(played):
    stranger = Asked("a")
    played.step(0, 1, {stranger: 10})
    played.finish(1, stranger)
    assert played.seconds(1) == {"late": 1}, (
        "a step that ends has its time, as `late` if all its requests left"
    )
    assert played.meter.read().num_ended == 0


def test_a_step_that_lands_behind_a_look_has_no_time_left(played):
    """Its request had left, so the time up to the look is idle; the step ended before it."""
    one = Asked("a")
    played.arrive(0, one)
    played.step(0, 1, {one: 10})
    played.finish(2, one, "abort")
    assert played.seconds(5) == {"input": 1, "idle": 4}
    played.step(1, 4, {one: 1})
    assert played.seconds(6) == {"input": 1, "idle": 5}, "each second once: the hand never goes back"


def test_looking_changes_nothing(played):
    one = Asked("a")
    played.seconds(1)
    played.arrive(2, one)
    played.seconds(3)
    played.step(2, 4, {one: 10})
    played.seconds(4)
    played.finish(5, one)
    assert played.seconds(7) == {"idle": 5, "input": 2}
    assert paid(one) == {"input": 2}


def test_a_step_has_the_time_up_to_its_own_end(played):
    one = Asked("a")
    played.arrive(0, one)
    played.step(0, 2, {one: 10}, told_at=3)
    assert paid(one) == {"input": 2}, "a step's time ends with the step (record.end), not when it is told"
    assert played.seconds(3) == {"input": 2, "under_way": 1}


def test_a_single_rejected_draft_is_paid_for_as_output_and_was_not_reached(played):
    """Part 16: a step computes two tokens and one of them stands, beside a request without drafts."""
    one, other = Asked("a"), Asked("b")
    played.arrive(0, one, other)
    played.step(0, 20, {one: 10, other: 10})
    played.step(20, 23, {one: 2, other: 1})
    one.computed = 11
    played.step(23, 26, {one: 2, other: 1})
    assert paid(one) == {"input": 10, "output": 4}, "two of three tokens are its own, none again"
    assert paid(other) == {"input": 10, "output": 2}


def test_the_unfinished_accounts_are_those_of_the_moment(played):
    """Another thread reads them while the engine goes on to charge."""
    one = Asked("a")
    played.arrive(0, one)
    played.step(0, 1, {one: 10})
    (account,) = played.meter.unfinished()
    played.step(1, 3, {one: 1})
    live = one.stats.account
    assert (account.total_ns, live.total_ns) == (1e9, 3e9)
    assert account.tokens["output"] < live.tokens["output"]
