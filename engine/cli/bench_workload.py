"""Draws the requests of `ruvon bench serve`: their lengths, arrivals and prompts. Part 20's wiring.

Lengths and arrivals have the distributions of vLLM's benchmark, so that the numbers of two servers can be
compared. Knows no server. Imports no torch.
"""

import math
from collections.abc import Callable
from itertools import accumulate
from random import Random
from typing import NamedTuple

from engine.load.plan import random_text

MAX_TRIES = 10  # to make a prompt of a given number of tokens


class Lengths(NamedTuple):
    """The sizes of one request, in tokens."""

    prompt: int
    output: int


def draw_lengths(
    num_requests: int, input_len: int, output_len: int, range_ratio: float, random: Random
) -> list[Lengths]:
    """The lengths of each request. `input_len` and `output_len` are averages, in tokens. Each length is drawn
    uniformly from average · (1 - range_ratio) to average · (1 + range_ratio), rounded, and is at least 1.
    """

    def draw_length(average: int) -> int:
        return max(1, round(average * random.uniform(1 - range_ratio, 1 + range_ratio)))

    return [Lengths(draw_length(input_len), draw_length(output_len)) for _ in range(num_requests)]


def draw_arrivals(num_requests: int, rate: float, burstiness: float, random: Random) -> list[float]:
    """When each request is due, in seconds from the start: `rate` requests a second, or all at the start if
    the rate is infinite.

    The gaps between requests have a gamma distribution of shape `burstiness`: 1 makes a Poisson process,
    infinity makes even gaps. As in vLLM, the gaps are scaled so that the last request is due at exactly
    num_requests / rate.
    """
    if rate == math.inf:
        return [0.0] * num_requests
    if burstiness == math.inf:
        gaps = [1.0] * num_requests
    else:
        gaps = [random.gammavariate(burstiness, 1.0) for _ in range(num_requests)]
    total = sum(gaps)
    if total == 0:  # with a tiny shape, all gaps may be too small for a float: all requests come at the end
        return [num_requests / rate] * num_requests
    shares = accumulate(gap / total for gap in gaps)  # of the whole time, up to each request
    return [share * num_requests / rate for share in shares]


def prompt_writer(tokenizer: str | None, random: Random) -> Callable[[int], str]:
    """A function that makes a random prompt of a given number of tokens.

    `tokenizer` is the name of a model, whose tokenizer counts the tokens exactly. With None, the number is
    approximate. Raises CheckpointError if the tokenizer cannot be read. The returned function raises
    ValueError if it finds no prompt of that length.
    """
    if tokenizer is None:
        return lambda num_tokens: random_text(num_tokens, random)
    from engine.text.tokenizer import Tokenizer

    encoder = Tokenizer.from_pretrained(tokenizer)

    def write_prompt(num_tokens: int) -> str:
        for _ in range(MAX_TRIES):
            words = random_text(num_tokens, random)
            token_ids = encoder.encode(words)
            while len(token_ids) < num_tokens:
                words += " " + random_text(num_tokens - len(token_ids), random)
                token_ids = encoder.encode(words)
            # Encoded again, the text of the first tokens may have more or fewer tokens.
            prompt = encoder.decode(token_ids[:num_tokens])
            if len(encoder.encode(prompt)) == num_tokens:
                return prompt
        raise ValueError(f"--tokenizer {tokenizer}: no prompt of {num_tokens} tokens is found")

    return write_prompt
