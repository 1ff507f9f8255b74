"""What a load generator sends, and when: by chance from a seed, or as a production trace has it. Part 15.

Promises the same jobs for the same arguments. A prompt is a row of short common words, about one token each
(the server's usage says how many they were), and no two prompts begin alike, so that no prefix cache knows
them. Knows no server.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random

WORDS = [
    "the", "a", "and", "to", "was", "he", "she", "said", "it", "they", "in", "his", "her", "with", "day",
    "big", "not", "you", "very", "happy", "so", "little", "for", "had", "on", "saw", "that", "wanted",
    "one", "went", "but", "mom", "play", "like", "dog", "then", "were", "time", "there", "fun", "of",
]  # fmt: skip
TEMPLATE_SHARE = 1 / 16  # of the context: left for a chat template, and for words of two tokens
FITTING_SHARE = 0.99  # of a trace's requests: scaled until they fit; the prompts of the longest few are cut

Span = tuple[int, int]  # minimum and maximum, both included


@dataclass(frozen=True)
class Job:
    """One request, due `at` seconds after the start. A closed loop ignores `at`."""

    at: float
    prompt: str
    max_tokens: int


def text(tokens: int, random: Random) -> str:
    """A text of about so many tokens, at least one."""
    return " ".join(random.choices(WORDS, k=max(1, tokens)))


def endless(prompt_tokens: Span, max_tokens: Span, random: Random) -> Iterator[Job]:
    """Jobs of sizes drawn evenly, for a closed loop."""
    while True:
        yield Job(0.0, text(random.randint(*prompt_tokens), random), random.randint(*max_tokens))


def poisson(rate: float, seconds: float, prompt_tokens: Span, max_tokens: Span, random: Random) -> list[Job]:
    """Independent arrivals, `rate` a second on average: the gaps between them are drawn from an exponential
    distribution. Sizes as in `endless`.
    """
    jobs = []
    sized_jobs = endless(prompt_tokens, max_tokens, random)
    at = random.expovariate(rate)
    while at < seconds:
        jobs.append(replace(next(sized_jobs), at=at))
        at += random.expovariate(rate)
    return jobs


@dataclass(frozen=True)
class Trace:
    """A recording's jobs, and how they were changed to fit a smaller model."""

    jobs: list[Job]
    size_factor: float  # what its numbers of tokens were multiplied by
    speed: float  # how many of its seconds pass in one of ours
    cut: int  # jobs whose prompt was cut to fit


def replay(path: Path, context: int, seconds: float, random: Random, rate: float | None = None) -> Trace:
    """The first `seconds` of a trace with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

    Prompts and outputs are multiplied by one factor of at most 1, so that 99 of 100 requests fit `context`
    tokens and long ones stay long beside short ones; the prompts of the others are cut. `rate` plays the
    trace faster or slower, so that all of it has so many arrivals a second on average; bursts stay bursts.
    Raises ValueError: it has other columns, fewer than two rows, or no duration that `rate` could change.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
        if not columns <= set(reader.fieldnames or ()):
            raise ValueError(f"{path}: the columns {', '.join(sorted(columns))} are needed")
        rows = [
            (_to_seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in reader
        ]
    if len(rows) < 2:
        raise ValueError(f"{path}: at least two rows are needed")
    start, end = rows[0][0], rows[-1][0]
    if rate and end <= start:
        raise ValueError(f"{path}: the last row is not later than the first, so no pace can become {rate=}")
    speed = rate * (end - start) / (len(rows) - 1) if rate else 1.0
    room = int(context * (1 - TEMPLATE_SHARE))
    totals = sorted(prompt + output for _, prompt, output in rows)
    factor = min(1.0, room / max(1, totals[int(FITTING_SHARE * (len(totals) - 1))]))

    jobs, cut = [], 0
    for moment, prompt, output in rows:
        at = (moment - start) / speed
        if at >= seconds:
            break
        output_tokens = min(max(1, round(output * factor)), room - 1)
        prompt_tokens = max(1, round(prompt * factor))
        if prompt_tokens > room - output_tokens:
            prompt_tokens = room - output_tokens
            cut += 1
        jobs.append(Job(at, text(prompt_tokens, random), output_tokens))
    return Trace(jobs, factor, speed, cut)


def _to_seconds(stamp: str) -> float:
    """Seconds of an ISO time. It may have seven digits behind the point, of which Python reads six."""
    return datetime.fromisoformat(stamp[:26]).timestamp()
