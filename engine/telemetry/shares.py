"""Sharing out: whole nanoseconds among requests that caused them, whole cents among lines of a bill. Part 19.

Promises that what was shared out is what there was: whole numbers, and nothing lost to rounding. Knows no
clock, no price and no requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

MAX_WEIGHT = 10**9  # nanoseconds: a second for one token is more than any token takes


def share_out(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts, one for each weight: the method of the largest remainder.

    1. Each part is total · weight / (sum of the weights), rounded down.
    2. What is left over goes out in ones: the largest remainder first; of equal ones, the earliest.

    So the parts add up to `total`, no part is a whole unit away from its exact share, and a weight of 0 gets
    0. Raises ValueError: something below 0, or something to share and no weight above 0.
    """
    if total < 0 or min(weights, default=0) < 0:
        raise ValueError(f"{total=}, {min(weights, default=0)=}: neither may be below 0")
    weight_sum = sum(weights)
    if not weight_sum:
        if total:
            raise ValueError(f"{total=} to share, and all weights are 0")
        return [0] * len(weights)
    parts, remainders = [], []
    for weight in weights:
        part, remainder = divmod(total * weight, weight_sum)
        parts.append(part)
        remainders.append(remainder)
    # sorted() keeps the order of equals, so the earliest of equal remainders comes first.
    for i in sorted(range(len(parts)), key=remainders.__getitem__, reverse=True)[: total - sum(parts)]:
        parts[i] += 1
    return parts


@dataclass(frozen=True)
class Weights:
    """Nanoseconds that one more of each adds to a step. `benchmarks/part19_weights.py` fits them; these are
    of `storyteller` on the machine that its results name, rounded.
    """

    input: int = 190_000  # a token of a prompt, read with others
    output: int = 250_000  # a token that is chosen by itself
    held: int = 1_800  # a token whose keys and values are read

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            minimum = 0 if field.name == "held" else 1  # `share_out` needs a weight above 0
            if type(value) is not int or not minimum <= value <= MAX_WEIGHT:
                raise ValueError(
                    f"weight {field.name}={value!r}: a whole number of nanoseconds from {minimum} to "
                    f"{MAX_WEIGHT:,} is accepted"
                )


class Work(NamedTuple):
    """What a request caused in a step, by kind, in the unit of the weights."""

    cached: int = 0
    input: int = 0
    output: int = 0
    recomputed: int = 0


def work_of(*, prompt: int, cached: int, reached: int, start: int, end: int, weights: Weights) -> Work:
    """What a request with `prompt` prompt tokens caused in a step that computed its tokens `start` to `end`.

    `reached`: so many of its tokens had been computed before, or found. `cached`: so many of its prompt's
    were found in the cache.

    1. Each computed token: before `reached` it is `recomputed` and counts `weights.input`, wherever it
       stands, since it is read with others. Else it is `input` in the prompt, `output` behind it, and counts
       its kind's weight.
    2. Each of the `end` tokens held counts `weights.held`. The kind of the last computed token bears it; but
       while that is `input`, the `cached` ones bear their own: all that a token found in a cache costs.
    """
    num_again = min(max(reached - start, 0), end - start)
    new_input = max(min(prompt, end) - max(start, reached), 0)
    new_output = end - start - num_again - new_input
    recomputed, computed_input = num_again * weights.input, new_input * weights.input
    computed_output = new_output * weights.output
    held = end * weights.held
    if new_output:
        return Work(0, computed_input, computed_output + held, recomputed)
    if new_input:
        held_cached = cached * weights.held
        return Work(held_cached, computed_input + held - held_cached, 0, recomputed)
    return Work(0, 0, 0, recomputed + held)
