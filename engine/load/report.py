"""Computes a run's figures from its records: percentiles, goodput, refusals, the generator's lag. Part 15.

A percentile is interpolated between the two nearest values, as in numpy and vLLM. Only whole answers have
latencies. Refusals are reported beside the latencies, because a server that refuses half of its clients is
fast for the others.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.load.client import RequestRecord

LATENCIES = ("ttft", "tpot", "e2e")  # the latencies that may have a limit
PERCENTILES = (50, 95, 99)
TITLES = {"ttft": "time to first text", "tpot": "time per output token", "e2e": "whole answer"}
MAX_LAG = 0.010  # seconds: a longer delay of the generator distorts the times that it measures


@dataclass(frozen=True)
class LatencyLimits:
    """Upper bounds, in seconds, for the latencies of a good answer. None means no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> "LatencyLimits":
        """Read limits such as `ttft=0.5,tpot=0.05`. Raises ValueError if a name is unknown or comes twice, or
        if a value is not a number above 0.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in LATENCIES or name in limits:
                raise ValueError(f"{part.strip()!r}: ttft, tpot and e2e are known, each once, in seconds")
            limits[name] = float(value)
            if not limits[name] > 0:
                raise ValueError(f"{part.strip()!r}: a number of seconds above 0 is needed")
        return cls(**limits)

    def are_met(self, record: RequestRecord) -> bool:
        """Whether the request has a whole answer within all limits. A latency that an answer does not have
        meets its limit: an answer of one token has no time per output token.
        """
        if not record.ok:
            return False
        for name in LATENCIES:
            limit, seconds = getattr(self, name), getattr(record, name)
            if limit is not None and seconds is not None and seconds > limit:
                return False
        return True

    def __str__(self) -> str:
        """The limits as `parse` reads them."""
        limits = {name: getattr(self, name) for name in LATENCIES}
        return ",".join(f"{name}={value:g}" for name, value in limits.items() if value is not None)


def spread(values: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> dict[str, float] | None:
    """A dict with count, mean, std (the standard deviation of these values, as numpy's), the percentiles (by
    default p50, p95 and p99) and max. None without values.
    """
    if not values:
        return None
    ordered = sorted(values)
    mean = statistics.fmean(ordered)
    return {
        "count": len(ordered),
        "mean": mean,
        "std": math.sqrt(statistics.fmean((value - mean) ** 2 for value in ordered)),
        **{f"p{percent:g}": _percentile(ordered, percent) for percent in percentiles},
        "max": ordered[-1],
    }


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile, from 0 to 100, of one or more values in ascending order."""
    index = (len(ordered) - 1) * percent / 100  # mostly between two values
    below = int(index)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (index - below) * (ordered[above] - ordered[below])


def run_figures(
    records: Sequence[RequestRecord],
    start: float,
    wakeup_delays: Sequence[float],
    limits: LatencyLimits | None = None,
    percentiles: Sequence[float] = PERCENTILES,
) -> dict[str, Any]:
    """The figures of a run as a dict that JSON can hold. Times are in seconds. Each kind of time is a
    `spread` with these percentiles, or None if nothing was measured.

    `start` is when the run began, by the event loop's clock. `wakeup_delays` has the seconds by which the
    generator's event loop woke up too late, measured all through the run: no other time is more exact.
    With `limits`, the figures include "goodput".
    """
    answered = [record for record in records if record.ok]
    refused = [record for record in records if record.refused]
    failed = [record for record in records if not record.ok and not record.refused]
    seconds = max((record.end for record in records), default=start) - start
    num_output_tokens = [record.tokens for record in answered if record.tokens is not None]
    retry_after = [record.retry_after for record in refused if record.retry_after is not None]
    measured: dict[str, Any] = {
        "sent": len(records),
        "answered": len(answered),
        "refused": dict(sorted(Counter(record.outcome for record in refused).items())),
        "failed": dict(sorted(Counter(record.outcome for record in failed).items())),
        "refusals_with_retry_after": len(retry_after),
        "retry_after_seconds": spread(retry_after, percentiles),
        "refused_after_seconds": spread([record.end - record.sent for record in refused], percentiles),
        "seconds": seconds,  # from the start to the end of the last request, answered or not
        "prompt_tokens": sum(record.prompt_tokens or 0 for record in answered),
        "output_tokens": sum(num_output_tokens),
        "answers_without_usage": len(answered) - len(num_output_tokens),
        "answers_per_second": len(answered) / seconds if seconds else 0.0,
        "output_tokens_per_second": sum(num_output_tokens) / seconds if seconds else 0.0,
        "late_seconds": spread([record.late for record in records], percentiles),
        "wakeups_late_seconds": spread(wakeup_delays, percentiles),
    }
    for name, values in _times_of(answered).items():
        measured[f"{name}_seconds"] = spread(values, percentiles)
    if limits is not None:
        num_good = sum(limits.are_met(record) for record in records)
        measured["goodput"] = {
            "limits": str(limits),
            "answers_per_second": num_good / seconds if seconds else 0.0,
            "share": num_good / len(records) if records else 0.0,  # of all requests, refused ones included
        }
    return measured


def _times_of(answered: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """The times of whole answers, in seconds, by kind. An answer that does not have a time is left out."""
    return {
        "ttft": [record.ttft for record in answered if record.ttft is not None],
        "tpot": [record.tpot for record in answered if record.tpot is not None],
        "itl": [gap for record in answered for gap in record.gaps],
        "e2e": [record.e2e for record in answered if record.e2e is not None],
    }


def tables(measured: dict[str, Any]) -> dict[str, dict[str, list]]:
    """Two tables for people from the result of `run_figures` with PERCENTILES: "latency", in milliseconds,
    and "requests", which says how the requests ended. Each is a dict with "columns" and "rows".
    """
    column_names = ("mean", "p50", "p95", "p99", "max")
    latency_rows: list[list] = []
    for name in LATENCIES:
        times = measured[f"{name}_seconds"]
        if times:
            milliseconds = [round(times[key] * 1e3, 2) for key in column_names]
            latency_rows.append([TITLES[name], *milliseconds])
    request_rows: list[list] = [["sent", measured["sent"]], ["answered", measured["answered"]]]
    request_rows += [[f"refused with {status}", count] for status, count in measured["refused"].items()]
    request_rows += [[outcome, count] for outcome, count in measured["failed"].items()]
    request_rows.append(["answers a second", round(measured["answers_per_second"], 3)])
    request_rows.append(["output tokens a second", round(measured["output_tokens_per_second"], 1)])
    if "goodput" in measured:
        goodput = measured["goodput"]
        title = f"good answers a second ({goodput['limits']})"
        request_rows.append([title, round(goodput["answers_per_second"], 3)])
        request_rows.append(["good, of all sent", round(goodput["share"], 3)])
    return {
        "latency": {"columns": ["ms", *column_names], "rows": latency_rows},
        "requests": {"columns": ["requests", "number"], "rows": request_rows},
    }


def generator_lag(measured: dict[str, Any]) -> str:
    """One sentence about the generator's own delays, from the result of `run_figures` with PERCENTILES: how
    late requests were sent, and how late the clock was read.
    """
    sending, reading = measured["late_seconds"], measured["wakeups_late_seconds"]
    if not sending or not reading:
        return "Nothing was sent."
    if max(sending["p99"], reading["p99"]) > MAX_LAG:
        verdict = "this generator was too busy: its own delay is part of the times"
    else:
        verdict = "of no weight beside the times"
    sent_p99, sent_max = 1e3 * sending["p99"], 1e3 * sending["max"]  # milliseconds
    read_p99, read_max = 1e3 * reading["p99"], 1e3 * reading["max"]
    return (
        f"Own lag: 99 of 100 requests were sent within {sent_p99:.1f} ms of their time (at most "
        f"{sent_max:.1f}); the clock was read within {read_p99:.1f} ms (at most {read_max:.1f}): {verdict}."
    )
