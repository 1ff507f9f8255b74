"""The block table shows what the cache does today: its recordings are made again and compared."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.part12_play import recording, steps_in_slots_and_pages
from tests.part08.test_play import MOST_BYTES

FIGURES = Path(__file__).resolve().parents[2] / "articles" / "figures"


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads((FIGURES / "12_play.play.json").read_text())


@pytest.mark.parametrize(("name", "make"), [("12_play", recording), ("12_pages", steps_in_slots_and_pages)])
def test_a_recording_is_what_the_cache_does(name, make):
    file = FIGURES / f"{name}.play.json"
    now = json.loads(json.dumps(make()))
    assert now == json.loads(file.read_text()), f"python articles/figures/{name}.py records it anew"
    assert file.stat().st_size < MOST_BYTES


def test_every_sequence_has_blocks_for_all_that_is_computed(recorded):
    for run in recorded["runs"]:
        for moment in run["moments"]:
            for computed, known, table in moment["sequences"].values():
                assert computed <= len(table) * run["block_size"]
                assert computed < known, "the last token is known, and not computed yet"
                assert len(set(table)) == len(table)
                assert set(table) <= set(range(run["num_blocks"]))


def test_the_scene_has_all_that_the_article_names(recorded):
    small = recorded["runs"][0]
    assert (small["block_size"], small["prefix"]) == (4, True)
    moments = small["moments"]
    kinds = {kind for moment in moments for kind, *_ in moment.get("copies", ())}
    assert kinds == {"fork", "out", "in"}, "copy-on-write, and swapping both ways"
    assert any(moment.get("preempted") for moment in moments)
    tables = [[table for _, _, table in moment["sequences"].values()] for moment in moments]
    assert any(
        left[0] == right[0] for step in tables for left in step for right in step if left is not right
    ), "two sequences share a block"
    known = [set(moment.get("known", ())) for moment in moments]
    assert any(before - after for before, after in pairwise(known)), "one is forgotten"
