"""From what clients saw to what is said of it: percentiles, goodput, refusals, and the generator's own lag.

Part 15. Percentiles lie between the two nearest of the values, as numpy's and vLLM's do. Only whole answers
have latencies: a server that turns half of its clients away is fast for the others, so refusals stand beside.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.load.client import Seen

LATENCIES = ("ttft", "tpot", "e2e")
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
        found = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in LATENCIES or name in found:
                raise ValueError(f"{part.strip()!r}: ttft, tpot and e2e are known, each once, in seconds")
            found[name] = float(value)
            if not found[name] > 0:
                raise ValueError(f"{part.strip()!r}: a number of seconds above 0 is needed")
        return cls(**found)

    def met(self, seen: Seen) -> bool:
        """An answer that has no such time (one token has no rhythm) keeps the limit on it."""
        times = [(getattr(self, name), getattr(seen, name)) for name in LATENCIES]
        return seen.ok and all(most is None or time is None or time <= most for most, time in times)

    def __str__(self) -> str:
        given = [(name, getattr(self, name)) for name in LATENCIES]
        return ",".join(f"{name}={value:g}" for name, value in given if value is not None)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """count, mean, p50, p95, p99 and max; None of nothing."""
    if not values:
        return None
    cuts = statistics.quantiles([*values] * (1 if len(values) > 1 else 2), n=100, method="inclusive")
    return {
        "count": len(values),
        "mean": statistics.fmean(values),
        "p50": cuts[49],
        "p95": cuts[94],
        "p99": cuts[98],
        "max": max(values),
    }


def figures(
    seen: Sequence[Seen], start: float, wakeups: Sequence[float], limits: Limits | None = None
) -> dict:
    """Everything that is said of a run which began at `start`. `wakeups`: by how many seconds the generator's
    event loop was late for appointments of its own, all through the run: no time here is truer than that.
    """
    answered = [one for one in seen if one.ok]
    seconds = max((one.end for one in seen), default=start) - start
    counted = [one for one in answered if one.tokens is not None]
    refused = [one for one in seen if one.outcome.isdigit()]
    failed = [one for one in seen if not one.ok and not one.outcome.isdigit()]
    told = [one.retry_after for one in refused if one.retry_after is not None]
    tokens = sum(one.tokens for one in counted)
    found = {
        "sent": len(seen),
        "answered": len(answered),
        "refused": dict(sorted(Counter(one.outcome for one in refused).items())),
        "failed": dict(sorted(Counter(one.outcome for one in failed).items())),
        "refusals_with_retry_after": len(told),
        "retry_after_seconds": spread(told),
        "refused_after_seconds": spread([one.end - one.sent for one in refused]),
        "seconds": seconds,  # from the start to the last answer's end
        "prompt_tokens": sum(one.prompt_tokens or 0 for one in counted),
        "output_tokens": tokens,
        "answers_without_usage": len(answered) - len(counted),
        "answers_per_second": len(answered) / seconds if seconds else 0.0,
        "output_tokens_per_second": tokens / seconds if seconds else 0.0,
        "late_seconds": spread([one.late for one in seen]),
        "wakeups_late_seconds": spread(wakeups),
    }
    for name in LATENCIES:
        found[f"{name}_seconds"] = spread([t for one in answered if (t := getattr(one, name)) is not None])
    if limits is not None:
        good = sum(map(limits.met, seen))
        found["goodput"] = {
            "limits": str(limits),
            "answers_per_second": good / seconds if seconds else 0.0,
            "share": good / len(seen) if seen else 0.0,  # of all that were sent, refused ones too
        }
    return found


def tables(found: dict) -> dict[str, dict[str, list]]:
    """For people, in milliseconds."""
    columns = ["ms", "mean", "p50", "p95", "p99", "max"]
    rows = [
        [TITLES[name], *(round(times[key] * 1e3, 2) for key in columns[1:])]
        for name in LATENCIES
        if (times := found[f"{name}_seconds"])
    ]
    counts = [
        ["sent", found["sent"]],
        ["answered", found["answered"]],
        *([f"refused with {status}", count] for status, count in found["refused"].items()),
        *([outcome, count] for outcome, count in found["failed"].items()),
        ["answers a second", round(found["answers_per_second"], 3)],
        ["output tokens a second", round(found["output_tokens_per_second"], 1)],
    ]
    if "goodput" in found:
        good = found["goodput"]
        counts.append([f"good answers a second ({good['limits']})", round(good["answers_per_second"], 3)])
        counts.append(["good, of all sent", round(good["share"], 3)])
    return {
        "latency": {"columns": columns, "rows": rows},
        "requests": {"columns": ["requests", "number"], "rows": counts},
    }


def own_lag(found: dict) -> str:
    """One sentence about the generator itself."""
    sent, woke = found["late_seconds"], found["wakeups_late_seconds"]
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
