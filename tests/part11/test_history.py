"""The last minutes, second by second."""

import json

import pytest

from engine.telemetry.history import MAX_SAMPLES, SECONDS, WINDOW, History, Point, percentile

START = 1000.0


def point(tokens: int, running: int = 0) -> Point:
    return Point(tokens, 0, 0, 0, running, 0, 0.0)


def read(history: History, after: float) -> dict:
    return history.copy().read(START + after)


def test_before_a_second_is_over_there_is_only_the_start():
    history = History(START)
    history.note(START + 0.5, point(3))
    assert read(history, 0.9)["second"] == [-1]
    assert read(history, 0.9)["generation_tokens"] == [0]


def test_a_second_is_shown_as_it_ended_and_stands_until_something_happens():
    history = History(START)
    for when, tokens in ((0.1, 2), (0.9, 5), (1.5, 6), (4.0, 10), (5.1, 99)):
        history.note(START + when, point(tokens, running=tokens % 4))
    columns = read(history, 5.2)
    assert columns["second"] == [-1, 0, 1, 2, 3, 4]
    assert columns["generation_tokens"] == [0, 5, 6, 6, 6, 10]
    assert columns["running"] == [0, 1, 2, 2, 2, 2]


def test_what_is_kept_is_bounded_and_enough_for_what_is_shown():
    history = History(START)
    for second in range(1000):
        for part in range(5):
            history.note(START + second + part / 5, point(second * 10 + part))
        for _ in range(50):
            history.sample("ttft", START + second + 0.5, 1.0)
    recent = history.copy()
    assert len(recent.points) <= SECONDS + 4
    assert len(recent.samples["ttft"]) <= MAX_SAMPLES
    columns = recent.read(START + 1000.0)
    assert columns["second"] == list(range(999 - SECONDS, 1000))
    assert columns["generation_tokens"] == [second * 10 + 4 for second in columns["second"]]


def test_long_silence_shows_the_last_state():
    history = History(START)
    history.note(START + 2.5, point(7))
    columns = read(history, 100_000)
    assert columns["generation_tokens"] == [7] * (SECONDS + 1)
    assert columns["second"][-1] == 99_999


def test_percentiles_are_of_single_observations_of_the_window():
    history = History(START)
    for i in range(100):
        history.sample("ttft", START + 5.5, (i + 1) / 100)
    columns = read(history, 6.0 + WINDOW + 3)
    seconds = columns["second"]
    for name, value in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        by_second = dict(zip(seconds, columns["ttft"][name], strict=True))
        assert by_second[4] is None
        assert by_second[5] == by_second[4 + WINDOW] == value
        assert by_second[5 + WINDOW] is None
    assert set(columns["tpot"]["p50"]) == {None}


@pytest.mark.parametrize(("n", "q", "expected"), [
    (1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (20, 0.95, 19), (100, 0.99, 99), (101, 0.99, 100), (10, 0.99, 10),
])  # fmt: skip
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(n, q, expected):
    assert percentile(range(1, n + 1), q) == expected


def test_readers_do_not_disturb_one_another():
    history = History(START)
    history.sample("tpot", START + 3.0, 0.02)
    late = history.copy()
    early = read(history, 10.0)
    assert late.read(START + 500.0)["tpot"]["p95"][-1] is None
    assert read(history, 10.0) == early
    assert early["tpot"]["p95"][4] == 0.02


def test_it_is_json():
    assert json.loads(json.dumps(read(History(START), 12.3)))["second"] == list(range(-1, 12))


def test_a_sample_that_comes_a_moment_late_is_in_the_percentiles_all_the_same():
    """A step's first tokens are sampled after they were made: a reader may come between."""
    history = History(START)
    history.sample("ttft", START + 0.5, 1.0)
    assert read(history, 1.1)["ttft"]["p99"] == [None, 1.0]
    history.sample("ttft", START + 0.9, 3.0)
    assert read(history, 1.1)["ttft"]["p99"] == [None, 3.0]
    assert ("ttft", 0) not in history._percentile_cache, "another may still come"
    history.sample("ttft", START + 1.2, 5.0)
    assert read(history, 1.3)["ttft"]["p99"] == [None, 3.0]
    assert ("ttft", 0) in history._percentile_cache, "no other can come for the first second"


class BesideAnotherReader(dict):
    """A cache of percentiles from which another reader, who reads a later second, removes all at once."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().clear()


def test_a_reader_beside_another_one_computes_what_the_other_has_removed():
    history = History(START)
    history.sample("ttft", START + 0.5, 2.0)
    history.sample("ttft", START + 2.5, 9.0)  # later than all that is read: what is read may be kept
    history._percentile_cache = BesideAnotherReader()
    assert read(history, 2.0)["ttft"]["p50"] == [None, 2.0, 2.0]


def test_all_counts_begin_at_nothing():
    columns = read(History(START), 0.5)
    assert [columns[name] for name in Point._fields] == [[0]] * len(Point._fields)
