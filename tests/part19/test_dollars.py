"""The article's dollars on a GPU are reckoned from the record of Part 13's steps."""

import pytest

from benchmarks.part19_dollars import SOURCE, per_million, reckoned
from benchmarks.record import read_record


def test_a_million_tokens_cost_their_share_of_an_hour():
    assert per_million(1000) == pytest.approx(2.50 / 3.6), "3.6 million tokens in an hour of $2.50"


def test_the_record_is_what_its_source_says():
    assert read_record("part19_dollars")["figures"] == reckoned(read_record(SOURCE)["figures"]), (
        f"{SOURCE} was measured again: python -m benchmarks.part19_dollars"
    )
