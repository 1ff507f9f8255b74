"""The step player shows which drafts stand today: its recording is made again and compared."""

import json
from pathlib import Path

from benchmarks.part16_play import recording
from tests.part08.test_play import MOST_BYTES

FIGURE = Path(__file__).resolve().parents[2] / "articles" / "figures" / "16_play.play.json"


def test_the_recording_is_what_the_models_say():
    now = json.loads(json.dumps(recording()))
    assert now == json.loads(FIGURE.read_text()), "python articles/figures/16_play.py records it anew"
    assert FIGURE.stat().st_size < MOST_BYTES


def test_a_step_with_drafts_says_those_that_stand_and_one_more():
    drafted = json.loads(FIGURE.read_text())["runs"][1]
    work = [numbers for step in drafted["steps"] for numbers in step["work"].values() if len(numbers) == 3]
    assert work
    for computed, said, drafts in work:
        assert computed == 1 + drafts
        assert 1 <= said <= 1 + drafts
    stood = {said - 1 for _, said, drafts in work if drafts == 3}
    assert {0, 3} <= stood, "there are steps in which none stands, and in which all do"
