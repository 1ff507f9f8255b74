"""Plans what a load generator sends, and when: at random, or as a production trace has it. Part 15.

The same arguments, with a generator of the same seed, give the same jobs. A prompt is a row of short common
words of about one token each; the exact count comes from the server's usage. Prompts are drawn independently,
so a prefix cache hardly ever helps.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import NamedTuple

WORDS = [
    "the", "a", "and", "to", "was", "he", "she", "said", "it", "they", "in", "his", "her", "with", "day",
    "big", "not", "you", "very", "happy", "so", "little", "for", "had", "on", "saw", "that", "wanted",
    "one", "went", "but", "mom", "play", "like", "dog", "then", "were", "time", "there", "fun", "of",
]  # fmt: skip
TEMPLATE_SHARE = 1 / 16  # share of the context that is left for a chat template and for words of two tokens
FITTING_SHARE = 0.99  # share of a trace's requests that fit after scaling; the longer ones are cut

Span = tuple[int, int]  # minimum and maximum, both included


@dataclass(frozen=True)
class Job:
    """One request that a load generator will send."""

    offset: float  # when it is due: seconds after the run's start; a closed loop ignores this
    prompt: str
    max_tokens: int  # of the output


def random_text(num_tokens: int, random: Random) -> str:
    """A random text of about `num_tokens` tokens, and of at least one word."""
    return " ".join(random.choices(WORDS, k=max(1, num_tokens)))


def endless_jobs(prompt_tokens: Span, max_tokens: Span, random: Random) -> Iterator[Job]:
    """Yield jobs without end, for a closed loop. The numbers of prompt and output tokens are drawn uniformly
    from their spans.
    """
    while True:
        yield Job(0.0, random_text(random.randint(*prompt_tokens), random), random.randint(*max_tokens))


def poisson_jobs(
    rate: float, seconds: float, prompt_tokens: Span, max_tokens: Span, random: Random
) -> list[Job]:
    """The jobs of the first `seconds` of a Poisson process with `rate` arrivals a second on average: the gaps
    between arrivals have an exponential distribution. Sizes are drawn as in `endless_jobs`.
    """
    jobs = []
    sized_jobs = endless_jobs(prompt_tokens, max_tokens, random)
    offset = random.expovariate(rate)
    while offset < seconds:
        jobs.append(replace(next(sized_jobs), offset=offset))
        offset += random.expovariate(rate)
    return jobs


@dataclass(frozen=True)
class TraceJobs:
    """The jobs of a production trace, and how they were changed to fit the model that is tested."""

    jobs: list[Job]
    size_factor: float  # at most 1: the trace's numbers of tokens were multiplied by this factor
    speed: float  # seconds of the trace that pass in one second of the run
    num_cut: int  # how many jobs had their prompt cut to fit; a cut output alone does not count


class TraceRow(NamedTuple):
    """A request of a production trace."""

    time: float  # in seconds
    prompt_tokens: int
    output_tokens: int


def jobs_of_trace(
    path: Path, context: int, seconds: float, random: Random, rate: float | None = None
) -> TraceJobs:
    """The jobs of a trace that are due in the first `seconds` of the run. The trace is a CSV file with the
    columns TIMESTAMP, ContextTokens and GeneratedTokens.

    All lengths are multiplied by one factor of at most 1, chosen so that FITTING_SHARE of the requests fit
    into `context` tokens. So long requests stay long in proportion to short ones. The other requests are cut:
    the prompt, and the output only if it leaves no room for a token of the prompt. With `rate`, the trace is
    played faster or slower, so that the whole trace has `rate` arrivals a second on average; its bursts
    remain.

    Its rows must be in the order of their times. Raises OSError if the file cannot be read, and ValueError if
    a column or a value is missing, a value is not a number or a time, a row is earlier than the row before,
    there are fewer than two rows, `rate` is given and the trace has no duration, or `context` has no room for
    a token of a prompt and one of its output.
    """
    context_tokens = int(context * (1 - TEMPLATE_SHARE))  # tokens for a prompt and its output together
    if context_tokens < 2:
        raise ValueError(f"{context=}: at least 3 tokens are needed")
    rows = _read_rows(path)

    start, end = rows[0].time, rows[-1].time
    speed = 1.0
    if rate:
        if end <= start:
            reason = "the last row is not later than the first"
            raise ValueError(f"{path}: {reason}, so no pace can become {rate=}")
        speed = rate * (end - start) / (len(rows) - 1)  # `rate` divided by the trace's own rate

    totals = sorted(row.prompt_tokens + row.output_tokens for row in rows)
    largest_fitting = totals[int(FITTING_SHARE * (len(totals) - 1))]
    size_factor = min(1.0, context_tokens / max(1, largest_fitting))

    jobs, num_cut = [], 0
    for row in rows:
        offset = (row.time - start) / speed
        if offset >= seconds:
            break
        prompt_tokens = max(1, round(row.prompt_tokens * size_factor))
        output_tokens = max(1, round(row.output_tokens * size_factor))
        output_tokens = min(output_tokens, context_tokens - 1)
        room = context_tokens - output_tokens  # for the prompt
        if prompt_tokens > room:
            prompt_tokens = room
            num_cut += 1
        jobs.append(Job(offset, random_text(prompt_tokens, random), output_tokens))
    return TraceJobs(jobs, size_factor=size_factor, speed=speed, num_cut=num_cut)


def _read_rows(path: Path) -> list[TraceRow]:
    """The rows of a trace, two at least, in the order of the file. Raises as `jobs_of_trace` does."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
        if not columns <= set(reader.fieldnames or ()):
            raise ValueError(f"{path}: the columns {', '.join(sorted(columns))} are needed")
        rows: list[TraceRow] = []
        for row in reader:
            if None in map(row.get, columns):
                raise ValueError(f"{path}, line {reader.line_num}: a value is missing")
            time = _to_seconds(row["TIMESTAMP"])
            if rows and time < rows[-1].time:
                raise ValueError(f"{path}, line {reader.line_num}: earlier than the line before")
            rows.append(TraceRow(time, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    if len(rows) < 2:
        raise ValueError(f"{path}: at least two rows are needed")
    return rows


def _to_seconds(stamp: str) -> float:
    """An ISO 8601 time, taken as UTC, as seconds since 1970. Decimals after the sixth are dropped."""
    # Only differences count, so a zone at the end is ignored. Local time would jump when clocks change.
    return datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp()
