"""Any order of events: no invariant breaks, and everybody has the tokens it has alone."""

from tests.part12.machine import drive


def test_no_order_of_events_breaks_an_invariant_or_changes_a_token(record_property):
    done = drive(60)
    for what, count in done.items():
        record_property(what, count)
    rare = ("failed steps", "preempted by the machine", "swapped out", "aborts", "forked samples")
    for what in (*rare, "outputs compared", "tokens found or forked"):
        assert done[what] >= 20, f"hardly any {what}: these runs show nothing"
