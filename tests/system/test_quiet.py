"""A measurement is recorded only where the machine was as fast after it as before, and its rounds agree."""

import pytest

from benchmarks.quiet import refuse_noise, yardstick


def test_what_agrees_is_recorded():
    assert yardstick() > 0
    refuse_noise(2.0, 2.1, {"a": [1.0, 1.05, 1.0, 1.02, 9.0]})  # one round of five may be disturbed


@pytest.mark.parametrize(
    ("before", "after", "rounds", "words"),
    [
        (2.0, 2.3, [1.0] * 5, "not recorded: the yardstick read 2 and 2.3 in one run"),
        (2.3, 2.0, [1.0] * 5, "not recorded: the yardstick read 2 and 2.3 in one run"),
        (2.0, 2.0, [1.0, 1.0, 1.1, 1.2, 1.3], "not recorded: a read 1 and 1.2 in one run"),
    ],
)
def test_what_does_not_agree_is_refused(before, after, rounds, words):
    with pytest.raises(SystemExit) as refused:
        refuse_noise(before, after, {"a": rounds})
    assert str(refused.value) == words
