"""From what clients saw to what is said of it: percentiles, goodput, refusals, and the generator's own lag.

Part 15. Percentiles lie between the two nearest of the values, as numpy's and vLLM's do. Only whole answers
have latencies: a server that turns half of its clients away is fast for the others, so refusals stand beside.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.load.client import Seen

LATENCIES = ("ttft", "tpot", "e2e")  # those that a limit may be set to
PERCENTILES = (50, 95, 99)
TITLES = {"ttft": "time to first text", "tpot": "time per output token", "e2e": "whole answer"}
LATE = 0.010  # seconds: a generator that is later than that is part of what it measures


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

    def met(self, seen: Seen) -> bool:
        """An answer that has no such time (one token has no rhythm) keeps the limit on it."""
        times = [(getattr(self, name), getattr(seen, name)) for name in LATENCIES]
        return seen.ok and all(limit is None or time is None or time <= limit for limit, time in times)

    def __str__(self) -> str:
        limits = [(name, getattr(self, name)) for name in LATENCIES]
        return ",".join(f"{name}={value:g}" for name, value in limits if value is not None)


def spread(values: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> dict[str, float] | None:
    """count, mean, the percentiles (by default p50, p95 and p99) and max; None of nothing."""
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
    """Of at least one value, the smallest first: 0 is that one, 100 the last."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def figures(
    seen: Sequence[Seen],
    start: float,
    wakeups: Sequence[float],
    limits: Limits | None = None,
    percentiles: Sequence[float] = PERCENTILES,
) -> dict[str, Any]:
    """Everything that is said of a run which began at `start`; times in seconds, each list of them as a
    `spread` with these percentiles. `wakeups`: by how many seconds the generator's event loop was late for
    appointments of its own, all through the run: no time here is truer than that.
    """
    answered = [request for request in seen if request.ok]
    seconds = max((request.end for request in seen), default=start) - start
    num_output_tokens = [request.tokens for request in answered if request.tokens is not None]
    refused = [request for request in seen if request.outcome.isdigit()]
    failed = [request for request in seen if not request.ok and not request.outcome.isdigit()]
    retry_after = [request.retry_after for request in refused if request.retry_after is not None]
    times: dict[str, list[float]] = {
        "ttft": [request.ttft for request in answered if request.ttft is not None],
        "tpot": [request.tpot for request in answered if request.tpot is not None],
        "itl": [gap for request in answered for gap in request.gaps],
        "e2e": [request.e2e for request in answered if request.e2e is not None],
    }
    measured: dict[str, Any] = {
        "sent": len(seen),
        "answered": len(answered),
        "refused": dict(sorted(Counter(request.outcome for request in refused).items())),
        "failed": dict(sorted(Counter(request.outcome for request in failed).items())),
        "refusals_with_retry_after": len(retry_after),
        "retry_after_seconds": spread(retry_after, percentiles),
        "refused_after_seconds": spread([request.end - request.sent for request in refused], percentiles),
        "seconds": seconds,  # from the start to the last answer's end
        "prompt_tokens": sum(request.prompt_tokens or 0 for request in answered),
        "output_tokens": sum(num_output_tokens),
        "answers_without_usage": len(answered) - len(num_output_tokens),
        "answers_per_second": len(answered) / seconds if seconds else 0.0,
        "output_tokens_per_second": sum(num_output_tokens) / seconds if seconds else 0.0,
        "late_seconds": spread([request.late for request in seen], percentiles),
        "wakeups_late_seconds": spread(wakeups, percentiles),
    }
    measured |= {f"{name}_seconds": spread(values, percentiles) for name, values in times.items()}
    if limits is not None:
        good = sum(limits.met(request) for request in seen)
        measured["goodput"] = {
            "limits": str(limits),
            "answers_per_second": good / seconds if seconds else 0.0,
            "share": good / len(seen) if seen else 0.0,  # of all that were sent, refused ones too
        }
    return measured


def tables(measured: dict[str, Any]) -> dict[str, dict[str, list]]:
    """`figures` for people: a table of latencies, in milliseconds, and one of how requests ended."""
    columns = ["ms", "mean", "p50", "p95", "p99", "max"]
    rows = [
        [TITLES[name], *(round(times[key] * 1e3, 2) for key in columns[1:])]
        for name in LATENCIES
        if (times := measured[f"{name}_seconds"])
    ]
    counts = [
        ["sent", measured["sent"]],
        ["answered", measured["answered"]],
        *([f"refused with {status}", count] for status, count in measured["refused"].items()),
        *([outcome, count] for outcome, count in measured["failed"].items()),
        ["answers a second", round(measured["answers_per_second"], 3)],
        ["output tokens a second", round(measured["output_tokens_per_second"], 1)],
    ]
    if "goodput" in measured:
        good = measured["goodput"]
        counts.append([f"good answers a second ({good['limits']})", round(good["answers_per_second"], 3)])
        counts.append(["good, of all sent", round(good["share"], 3)])
    return {
        "latency": {"columns": columns, "rows": rows},
        "requests": {"columns": ["requests", "number"], "rows": counts},
    }


def own_lag(measured: dict[str, Any]) -> str:
    """One sentence about the generator itself, from `figures`."""
    sent, woke = measured["late_seconds"], measured["wakeups_late_seconds"]
    if not sent or not woke:
        return "Nothing was sent."
    worst = max(sent["p99"], woke["p99"])
    verdict = (
        "this generator was too busy: its own delay is part of the times"
        if worst > LATE
        else "of no weight beside the times"
    )
    return (
        f"Own lag: 99 of 100 requests were sent within {sent['p99'] * 1e3:.1f} ms of their time (at most "
        f"{sent['max'] * 1e3:.1f}); the clock was read within {woke['p99'] * 1e3:.1f} ms (at most "
        f"{woke['max'] * 1e3:.1f}): {verdict}."
    )
