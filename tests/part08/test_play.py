"""The step player shows what the schedulers do today: its recording is made again and compared."""

import json
from pathlib import Path

import pytest

from benchmarks.part08_play import GUESTS, recording

FIGURE = Path(__file__).resolve().parents[2] / "articles" / "figures" / "08_play.play.json"
MOST_BYTES = 60_000  # a reader on a phone loads it


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads(FIGURE.read_text())


def test_the_recording_is_what_the_schedulers_do(recorded):
    now = json.loads(json.dumps(recording()))
    assert now == recorded, "the schedule has changed: python articles/figures/08_play.py records it anew"
    assert FIGURE.stat().st_size < MOST_BYTES


def test_every_scheduler_computes_and_says_the_same(recorded):
    for run in recorded["runs"]:
        for guest in GUESTS:
            work = [step["work"][guest.name] for step in run["steps"] if guest.name in step["work"]]
            assert sum(said for _, said in work) == guest.output, f"{run['name']}, {guest.name}"
            # The last token is never computed: nothing follows it.
            assert sum(computed for computed, _ in work) == guest.prompt + guest.output - 1


def test_no_step_has_more_requests_than_seats_or_more_tokens_than_the_budget(recorded):
    for run in recorded["runs"]:
        for step in run["steps"]:
            assert len(step["work"]) <= run["seats"]
            assert sum(computed for computed, _ in step["work"].values()) <= (run["budget"] or 1_000)


def test_before_a_marked_step_there_is_something_to_predict(recorded):
    for run in recorded["runs"]:
        assert run["marks"], run["name"]
        for mark in run["marks"]:
            step, before = run["steps"][mark - 1]["work"], run["steps"][mark - 2]["work"]
            ran = {name for earlier in run["steps"][:mark] for name in earlier["work"]}
            waits = any(guest.after_step < mark and guest.name not in ran for guest in GUESTS)
            assert step != before or waits, f"{run['name']}: step {mark} is as the one before"
