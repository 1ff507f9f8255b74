"""Rounds of a benchmark, each between two measurements of one and the same control.

On a machine that is shared, neighbours come and go within seconds. So what a round says is told by its
control, a side whose work never changes (how many answers full seats complete, how long a step is): its
figure is taken before and after every round, and a round in which it has changed by more than a tenth is
taken again. What is kept are rounds of a machine that stood still, and shares of the control, which is the
same machine's and the same moment's.
"""

from collections.abc import Callable
from typing import TypeVar

MOST = 1.1  # times the lesser of the two
TRIES = 4  # rounds for each that is wanted

Found = TypeVar("Found")


class Restless(Exception):
    """Too few rounds had the same control before and after."""


def steady_rounds(
    number: int, control: Callable[[], float], one_round: Callable[[int, float], Found]
) -> list[tuple[Found, float]]:
    """The first `number` steady rounds: (what it found, the mean of the control before and after it).

    `one_round` gets the number of tries before it and the control's figure just taken. A round's second
    control is the next one's first. Restless: among TRIES times as many rounds there are not so many.
    """
    kept: list[tuple[Found, float]] = []
    before = control()
    for turn in range(TRIES * number):
        found = one_round(turn, before)
        after = control()
        if max(before, after) <= MOST * min(before, after):
            kept.append((found, (before + after) / 2))
        print(f"round {turn + 1}: control {before:.4g} and {after:.4g}, {len(kept)} kept", flush=True)
        if len(kept) == number:
            return kept
        before = after
    raise Restless(
        f"{len(kept)} of {TRIES * number} rounds had the same control before and after; wanted: {number}"
    )
