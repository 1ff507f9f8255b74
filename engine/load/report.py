"""The figures of a run, from the records of its requests: percentiles, goodput, refusals, generator lag.

Part 15. A percentile is interpolated between the two nearest values, as numpy's and vLLM's are. Only whole
answers have latencies. A server that turns half of its clients away is fast for the others, so refusals are
counted beside them.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.load.client import RequestRecord

LATENCIES = ("ttft", "tpot", "e2e")  # those that a limit may be set to
PERCENTILES = (50, 95, 99)
TITLES = {"ttft": "time to first text", "tpot": "time per output token", "e2e": "whole answer"}
MAX_LAG = 0.010  # seconds: the delay of a generator that is later than that counts in what it measures


@dataclass(frozen=True)
class Limits:
    """What an answer must keep to be good; None: no limit. In seconds."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Limits":
        """`ttft=0.5,tpot=0.05`. Raises ValueError: another name, or no number of seconds."""
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
        """Whether the request has a whole answer within all limits. One that has no such time (a single token
        has no time per output token) keeps the limit on it.
        """
        if not record.ok:
            return False
        for name in LATENCIES:
            limit, seconds = getattr(self, name), getattr(record, name)
            if limit is not None and seconds is not None and seconds > limit:
                return False
        return True

    def __str__(self) -> str:
        limits = [(name, getattr(self, name)) for name in LATENCIES]
        return ",".join(f"{name}={value:g}" for name, value in limits if value is not None)


def spread(values: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> dict[str, float] | None:
    """count, mean, the percentiles (by default p50, p95 and p99) and max; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "mean": statistics.fmean(ordered),
        **{f"p{percent:g}": _percentile(ordered, percent) for percent in percentiles},
        "max": ordered[-1],
    }


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of at least one value, the smallest first: 0 is the first, 100 the last."""
    index = (len(ordered) - 1) * percent / 100  # mostly between two
    below = int(index)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (index - below) * (ordered[above] - ordered[below])


def figures(
    records: Sequence[RequestRecord],
    start: float,
    wakeup_delays: Sequence[float],
    limits: Limits | None = None,
    percentiles: Sequence[float] = PERCENTILES,
) -> dict[str, Any]:
    """The figures of a run that began at `start`: times in seconds, each list of them as a `spread` with
    these percentiles. `wakeup_delays`: by how many seconds the generator's event loop woke up too late, all
    through the run; no time here is more exact than that.
    """
    answered = [record for record in records if record.ok]
    refused = [record for record in records if record.outcome.isdigit()]  # an HTTP status
    failed = [record for record in records if not record.ok and not record.outcome.isdigit()]
    seconds = max((record.end for record in records), default=start) - start
    num_output_tokens = [record.tokens for record in answered if record.tokens is not None]
    retry_after = [record.retry_after for record in refused if record.retry_after is not None]
    times: dict[str, list[float]] = {
        "ttft": [record.ttft for record in answered if record.ttft is not None],
        "tpot": [record.tpot for record in answered if record.tpot is not None],
        "itl": [gap for record in answered for gap in record.gaps],
        "e2e": [record.e2e for record in answered if record.e2e is not None],
    }
    measured: dict[str, Any] = {
        "sent": len(records),
        "answered": len(answered),
        "refused": dict(sorted(Counter(record.outcome for record in refused).items())),
        "failed": dict(sorted(Counter(record.outcome for record in failed).items())),
        "refusals_with_retry_after": len(retry_after),
        "retry_after_seconds": spread(retry_after, percentiles),
        "refused_after_seconds": spread([record.end - record.sent for record in refused], percentiles),
        "seconds": seconds,  # from the start to the last answer's end
        "prompt_tokens": sum(record.prompt_tokens or 0 for record in answered),
        "output_tokens": sum(num_output_tokens),
        "answers_without_usage": len(answered) - len(num_output_tokens),
        "answers_per_second": len(answered) / seconds if seconds else 0.0,
        "output_tokens_per_second": sum(num_output_tokens) / seconds if seconds else 0.0,
        "late_seconds": spread([record.late for record in records], percentiles),
        "wakeups_late_seconds": spread(wakeup_delays, percentiles),
    }
    measured |= {f"{name}_seconds": spread(values, percentiles) for name, values in times.items()}
    if limits is not None:
        num_good = sum(limits.are_met(record) for record in records)
        measured["goodput"] = {
            "limits": str(limits),
            "answers_per_second": num_good / seconds if seconds else 0.0,
            "share": num_good / len(records) if records else 0.0,  # of all that were sent, refused ones too
        }
    return measured


def tables(measured: dict[str, Any]) -> dict[str, dict[str, list]]:
    """`figures` for people: a table of latencies, in milliseconds, and one of how requests ended."""
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
    """One sentence about the generator itself, from `figures`: how late it sent, and read the clock."""
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
