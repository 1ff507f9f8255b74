"""The figures of `ruvon bench serve`, under vLLM's names and in the lines that vLLM prints. Part 20's wiring.

Imports no torch.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from engine.load.client import RequestRecord

# vLLM's name of a metric -> its heading in the report
METRIC_NAMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
# vLLM's name of a metric -> its key in the figures of engine/load/report.py
FIGURE_NAMES = {
    "ttft": "ttft_seconds",
    "tpot": "tpot_seconds",
    "itl": "itl_seconds",
    "e2el": "e2e_seconds",
}
WIDTH = 50  # characters in a line of the printed report, as in vLLM's


class Peaks(NamedTuple):
    """The largest load of a run."""

    output_tokens_per_s: float  # the most pieces of text that came in one second
    concurrent_requests: int  # the most requests that were under way at once


def vllm_figures(measured: dict[str, Any], metrics: list[str], percentiles: list[float]) -> dict[str, Any]:
    """The figures under the names of vLLM's benchmark.

    `measured` is a result of `run_figures` (engine/load/report.py) with `percentiles` and the 50th
    percentile. `metrics` are the keys of METRIC_NAMES to report, in milliseconds; they are 0 if no request
    was answered. The duration is in seconds.
    """
    seconds = measured["seconds"]
    num_tokens = measured["prompt_tokens"] + measured["output_tokens"]
    outcomes = measured["refused"] | measured["failed"]  # outcome -> number of requests
    if measured["answered"]:
        outcomes = {"ok": measured["answered"]} | outcomes
    result = {
        "duration": seconds,
        "completed": measured["answered"],
        "failed": measured["sent"] - measured["answered"],
        "outcomes": dict(sorted(outcomes.items())),
        "total_input_tokens": measured["prompt_tokens"],
        "total_output_tokens": measured["output_tokens"],
        "request_throughput": measured["answers_per_second"],
        "request_goodput": measured["goodput"]["answers_per_second"] if "goodput" in measured else None,
        "output_throughput": measured["output_tokens_per_second"],
        "total_token_throughput": num_tokens / seconds if seconds else 0.0,
    }
    statistics = {"mean": "mean", "median": "p50", "std": "std"}  # vLLM's name -> the key in a spread
    for percent in percentiles:
        statistics[f"p{percent:g}"] = f"p{percent:g}"
    for name in metrics:
        spread = measured[FIGURE_NAMES[name]]  # in seconds; None if no request was answered
        for statistic, key in statistics.items():
            result[f"{statistic}_{name}_ms"] = 1e3 * spread[key] if spread else 0.0
    return result


def peaks(records: Sequence[RequestRecord]) -> Peaks:
    """The peaks of a run, counted as vLLM does. Only requests with a whole answer count. The seconds begin
    when the first of these requests is sent. A request is under way from when it is sent to its last piece of
    text. A piece counts as one token, although it may hold several.
    """
    answered = [record for record in records if record.ok]
    if not answered:
        return Peaks(0.0, 0)
    start = min(record.sent for record in answered)
    pieces_by_second: Counter[int] = Counter()
    changes: list[tuple[float, int]] = []  # (time, 1 for a request that begins, -1 for one that ends)
    for record in answered:
        if record.first is not None:
            for time in accumulate(record.gaps, initial=record.first):
                pieces_by_second[int(time - start)] += 1
        last = record.end if record.last is None else record.last
        changes += [(record.sent, 1), (last, -1)]

    num_under_way = most_under_way = 0
    for _, change in sorted(changes):  # of changes at the same time, ends come first
        num_under_way += change
        most_under_way = max(most_under_way, num_under_way)
    most_pieces = max(pieces_by_second.values(), default=0)
    return Peaks(float(most_pieces), most_under_way)


def report_lines(result: dict[str, Any], metrics: list[str], percentiles: list[float]) -> list[str]:
    """The lines that vLLM's benchmark prints. `result` is that of `vllm_figures`, with four more entries:
    request_rate, max_concurrency, and the results of `peaks` as max_output_tokens_per_s and
    max_concurrent_requests. `metrics` and `percentiles` are those of `vllm_figures`.
    """
    rate = result["request_rate"]
    rows = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Maximum request concurrency:", result["max_concurrency"]),
        ("Request rate configured (RPS):", rate if rate != "inf" else None),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Request goodput (req/s):", result["request_goodput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", float(result["max_concurrent_requests"])),  # vLLM prints it as 3.00
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    printed = [" Serving Benchmark Result ".center(WIDTH, "=")]
    printed += [_row(name, value) for name, value in rows if value is not None]
    for name in metrics:
        printed.append(METRIC_NAMES[name].center(WIDTH, "-"))
        for statistic in ("Mean", "Median", *(f"P{percent:g}" for percent in percentiles)):
            value = result[f"{statistic.lower()}_{name}_ms"]
            printed.append(_row(f"{statistic} {name.upper()} (ms):", value))
    not_answered = [f"{outcome}: {count}" for outcome, count in result["outcomes"].items() if outcome != "ok"]
    if not_answered:
        printed.append(f"Not answered: {', '.join(not_answered)}")
    return [*printed, "=" * WIDTH]


def _row(name: str, value: float | str) -> str:
    """A line of the report. A number with a point has two decimals."""
    if isinstance(value, float):
        return f"{name:<40} {value:<10.2f}"
    return f"{name:<40} {value:<10}"
