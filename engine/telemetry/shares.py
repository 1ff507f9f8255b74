"""Exact division: nanoseconds among the requests that caused them, cents among a bill's lines. Part 19.

Promises that the parts are whole numbers and add up to the total: rounding loses nothing. Knows no clock, no
price and no requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

MAX_WEIGHT = 10**9  # nanoseconds per token: one second, more than any token takes


def share_out(total: int, weights: Sequence[int]) -> list[int]:
    """Divide `total` into whole parts in proportion to `weights`, one part for each weight.

    This is the method of the largest remainder:

    1. Each part is total · weight / (sum of the weights), rounded down.
    2. The units that are left over are added one by one to the parts with the largest remainders; among equal
       remainders, the earliest part comes first.

    The parts add up to `total`. Each part differs from its exact share by less than 1. A weight of 0 gets 0.

    Raises ValueError, whose message says total=… with the value, if `total` or a weight is below 0, or if
    `total` is above 0 and no weight is.
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
    num_left_over = total - sum(parts)
    # sorted() keeps the order of equals, so the earliest of equal remainders comes first.
    by_remainder = sorted(range(len(parts)), key=remainders.__getitem__, reverse=True)
    for i in by_remainder[:num_left_over]:
        parts[i] += 1
    return parts


@dataclass(frozen=True)
class Weights:
    """By how many nanoseconds one more token of each kind lengthens a step.

    The defaults were measured by `benchmarks/part19_weights.py` for the model `storyteller` on one machine,
    and rounded; another machine has others. Raises ValueError for a weight out of range.
    """

    input: int = 190_000  # a prompt token, computed together with others
    output: int = 250_000  # an output token, computed alone
    held: int = 1_800  # a token in the cache, whose keys and values the step reads

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
    """The work that a request caused in a step, by kind, in nanoseconds of weight."""

    cached: int = 0
    input: int = 0
    output: int = 0
    recomputed: int = 0


def work_of(*, prompt: int, cached: int, reached: int, start: int, end: int, weights: Weights) -> Work:
    """The work that a request caused in a step, which computed the request's tokens `start` to `end` - 1.

    prompt: how many tokens the prompt has.
    cached: how many tokens of the prompt were found in the cache.
    reached: how many tokens of the request had been computed, or found in the cache, before this step.

    1. Computing. Each computed token adds a weight to one kind:
       - `recomputed` if the token is before `reached`. It adds `weights.input`, in the prompt and after it,
         because recomputed tokens are computed together.
       - else `input` if the token is in the prompt. It adds `weights.input`.
       - else `output`. It adds `weights.output`.
    2. Reading. The step reads all `end` tokens held, and each of them adds `weights.held`. All of this goes
       to the kind of the last computed token. The exception: if that kind is `input`, the part of the
       `cached` tokens goes to the kind `cached`. Nothing else ever does, because a token found in a cache
       is read and not computed.
    """
    num_recomputed = min(max(reached - start, 0), end - start)
    num_input = max(min(prompt, end) - max(start, reached), 0)
    num_output = end - start - num_recomputed - num_input
    recomputed = num_recomputed * weights.input
    computed_input = num_input * weights.input
    computed_output = num_output * weights.output
    held = end * weights.held
    if num_output:  # tokens after the prompt are the last: the last computed token is output
        return Work(input=computed_input, output=computed_output + held, recomputed=recomputed)
    if num_input:
        held_cached = cached * weights.held
        input_and_held = computed_input + held - held_cached
        return Work(cached=held_cached, input=input_and_held, recomputed=recomputed)
    return Work(recomputed=recomputed + held)
