"""benchmarks/steady.py: a round between two unlike controls is taken again."""

import pytest

from benchmarks.steady import TRIES, Restless, steady_rounds


def rounds(number: int, controls: list[float]):
    """What is kept of rounds that find their own number; and what each was told."""
    left, told = iter(controls), []

    def one_round(turn: int, before: float) -> int:
        told.append((turn, before))
        return turn

    return steady_rounds(number, lambda: next(left), one_round), told


def test_rounds_are_kept_with_the_mean_of_their_controls():
    kept, told = rounds(2, [10.0, 11.0, 12.0])
    assert kept == [(0, 10.5), (1, 11.5)]
    assert told == [(0, 10.0), (1, 11.0)], "a round's second control is the next one's first"


@pytest.mark.parametrize("other", [11.1, 9.0], ids=["slower", "quicker"])
def test_a_round_whose_control_has_changed_is_taken_again(other):
    kept, told = rounds(2, [10.0, 10.0, other, 10.0, 10.5])
    assert kept == [(0, 10.0), (3, 10.25)]
    assert len(told) == 4


def test_a_machine_that_never_stands_still_gives_nothing():
    controls = [1.0, 2.0] * (TRIES + 1)
    with pytest.raises(Restless, match=f"0 of {2 * TRIES} rounds .* wanted: 2"):
        rounds(2, controls)
