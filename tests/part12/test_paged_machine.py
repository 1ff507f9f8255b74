"""Any order of events: no invariant breaks, and everybody has the tokens it has alone."""

import pytest
from hypothesis import Phase

from tests.part12.machine import drive


def test_no_order_of_events_breaks_an_invariant_or_changes_a_token(record_property):
    """A failure is told in a line; `python -m tests.part12.machine` searches for the shortest way to it."""
    try:
        done = drive(40, phases=[Phase.generate])
    except AssertionError as error:
        said = str(error).splitlines()[0]
    else:
        said = ""
    if said:
        pytest.fail(f"{said} (python -m tests.part12.machine shows how it came about)", pytrace=False)
    for what, count in done.items():
        record_property(what, count)
    rare = ("failed steps", "preempted by the machine", "swapped out", "aborts", "forked samples")
    for what in (*rare, "outputs compared", "tokens found or forked"):
        assert done[what] >= 10, f"hardly any {what}: these runs show nothing"
