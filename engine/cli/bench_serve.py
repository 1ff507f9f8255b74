"""`ruvon bench serve`: measures a running server under load. Part 20's wiring. Imports no torch.

The server may be any server with OpenAI's API. The flags and the printed lines are vLLM's. A request's times
count from when the request was due by --request-rate. With --max-concurrency, they count from when a place
for the request became free.
"""

import asyncio
import json
import math
import os
import re
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from engine.cli.options import check_folder, refusals, with_hint
from engine.load.client import Endpoint, RequestRecord
from engine.load.plan import Job, text
from engine.load.report import Limits, figures
from engine.load.run import Ask, Run, client, first_model

WORKLOAD, METRICS = "Workload", "Metrics"
METRIC_NAMES = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)"}
METRIC_NAMES |= {"itl": "Inter-token Latency", "e2el": "End-to-end Latency"}
WIDTH = 50  # characters in a line of the printed report, as in vLLM's
# vLLM's name of a metric -> its key in the figures of engine/load/report.py
FIGURE_NAMES = {name: f"{name}_seconds" for name in METRIC_NAMES} | {"e2el": "e2e_seconds"}
BACKENDS = {"openai": "completions", "openai-chat": "chat"}  # vLLM's name -> `Endpoint.api`


def _workload_flag(help: str, **settings):
    return typer.Option(help=help, rich_help_panel=WORKLOAD, **settings)


def bench_serve(
    base_url: Annotated[
        str, typer.Option("--base-url", "--url", help="The server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    backend: Annotated[str, typer.Option(help="openai (completions) or openai-chat.")] = "openai",
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    num_prompts: Annotated[int, _workload_flag("Requests; vLLM's default is 1000.", min=1)] = 100,
    random_input_len: Annotated[int, _workload_flag("Tokens of a prompt, about.", min=1)] = 128,
    random_output_len: Annotated[int, _workload_flag("Tokens of an output, at most.", min=1)] = 64,
    random_range_ratio: Annotated[
        float, _workload_flag("Lengths are drawn from this share below to this share above.", min=0, max=0.99)
    ] = 0.0,
    request_rate: Annotated[
        float, _workload_flag("Requests a second, on average (Poisson); inf sends all at once.")
    ] = math.inf,
    max_concurrency: Annotated[
        int | None, _workload_flag("Requests under way at once, at most.", min=1)
    ] = None,
    ignore_eos: Annotated[bool, _workload_flag("Outputs of exactly their length (vLLM's field).")] = False,
    temperature: Annotated[float, _workload_flag("0 is greedy.")] = 0.0,
    seed: Annotated[int, _workload_flag("Seed of prompts, lengths and arrivals.")] = 0,
    percentile_metrics: Annotated[
        str, typer.Option(help="Some of ttft, tpot, itl, e2el.", rich_help_panel=METRICS)
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles, such as 50,95,99.", rich_help_panel=METRICS)
    ] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="A limit in ms that a good answer keeps: ttft:500.", rich_help_panel=METRICS),
    ] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write the figures as JSON.", rich_help_panel=METRICS)
    ] = False,
    result_filename: Annotated[
        Path | None,
        typer.Option(help="The file; default: a name with the date and time.", rich_help_panel=METRICS),
    ] = None,
) -> None:
    """Send requests to a running server, and say how long people waited."""
    import httpx

    from engine.client.untrusted import printable

    with refusals("bench serve"):
        check_folder("--result-filename", result_filename)
        api = _one_of("--backend", backend, BACKENDS)
        metrics = percentile_metrics.split(",")
        for name in metrics:
            _one_of("--percentile-metrics", name, METRIC_NAMES)
        percentiles = [_percentile(number) for number in metric_percentiles.split(",")]
        limits = _limits(goodput)
        if not request_rate > 0:
            raise ValueError(f"--request-rate {request_rate}: more than 0 is accepted, or inf")
        jobs = _jobs(
            num_prompts, random_input_len, random_output_len, random_range_ratio, request_rate, Random(seed)
        )
    fields = {"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {})

    async def run() -> tuple[Run, str]:
        async with client(base_url, os.environ.get("RUVON_API_KEY")) as http:
            name = model or await first_model(http)
            requests = Run(_with_bound(Endpoint(http, name, api, fields=fields), max_concurrency))
            await requests.watch(requests.open_loop(jobs), _bar(len(jobs)))
            return requests, name

    try:
        requests, name = asyncio.run(run())
    except (httpx.HTTPError, OSError, LookupError, ValueError) as error:
        sys.exit(printable(with_hint(f"ruvon bench serve: {base_url}: {error}")))
    measured = figures(requests.records, requests.start, requests.wakeup_delays, limits, (50, *percentiles))
    result = in_vllms_names(measured, metrics, percentiles)
    result |= {"model_id": name, "request_rate": str(request_rate), "max_concurrency": max_concurrency}
    for line in lines(result, metrics, percentiles):
        print(line)
    if save_result or result_filename:
        path = result_filename or Path(f"openai-{request_rate}qps-{datetime.now():%Y%m%d-%H%M%S}.json")
        path.write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
        print(f"written to {path}", file=sys.stderr)
    if not result["completed"]:
        sys.exit(f"ruvon bench serve: no request was answered: {result['outcomes']}")


def in_vllms_names(measured: dict[str, Any], metrics: list[str], percentiles: list[float]) -> dict[str, Any]:
    """The figures under the names of vLLM's benchmark. `measured` is a result of `figures` in
    engine/load/report.py, with these percentiles and the 50th.

    The latencies of `metrics` are in milliseconds, and 0 if no request was answered; the duration is in
    seconds.
    """
    seconds = measured["seconds"]
    num_tokens = measured["prompt_tokens"] + measured["output_tokens"]
    outcomes = {"ok": measured["answered"]} if measured["answered"] else {}
    outcomes |= measured["refused"] | measured["failed"]
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
    for name in metrics:
        spread = measured[FIGURE_NAMES[name]]  # in seconds; None if no request was answered
        statistics = {"mean": "mean", "median": "p50"}  # vLLM's name -> the key in the spread
        statistics |= {f"p{percent:g}": f"p{percent:g}" for percent in percentiles}
        for statistic, key in statistics.items():
            result[f"{statistic}_{name}_ms"] = 1e3 * spread[key] if spread else 0.0
    return result


def lines(result: dict[str, Any], metrics: list[str], percentiles: list[float]) -> list[str]:
    """The lines that vLLM's benchmark prints. `result` comes from `in_vllms_names`, with request_rate and
    max_concurrency added.
    """
    rate = result["request_rate"]
    printed = [" Serving Benchmark Result ".center(WIDTH, "=")]
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
        ("Total Token throughput (tok/s):", result["total_token_throughput"]),
    ]
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
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"


def _jobs(
    num_jobs: int, input_len: int, output_len: int, range_ratio: float, rate: float, random: Random
) -> list[Job]:
    """Jobs with random prompts. Lengths are averages in tokens: each is drawn from `range_ratio` below its
    average to `range_ratio` above. Jobs arrive as a Poisson process of `rate` requests a second; with an
    infinite rate, all arrive at the start.
    """

    def random_length(average: int) -> int:
        return max(1, round(average * random.uniform(1 - range_ratio, 1 + range_ratio)))

    jobs, arrival = [], 0.0  # seconds from the start
    for _ in range(num_jobs):
        num_input_tokens, num_output_tokens = random_length(input_len), random_length(output_len)
        jobs.append(Job(arrival, text(num_input_tokens, random), num_output_tokens))
        arrival += 0.0 if rate == math.inf else random.expovariate(rate)
    return jobs


def _with_bound(endpoint: Endpoint, max_concurrency: int | None) -> Ask:
    """`endpoint.ask` with at most `max_concurrency` requests under way; None means no bound. A request that
    waits for others to end is due when its wait ends.
    """
    if max_concurrency is None:
        return endpoint.ask
    under_way = asyncio.Semaphore(max_concurrency)

    async def ask(job: Job, due: float) -> RequestRecord:
        async with under_way:
            return await endpoint.ask(job, asyncio.get_running_loop().time())

    return ask


def _bar(total: int) -> Callable[[Run], None]:
    """A function that shows a run's progress, in a bar if stderr is a terminal. Call it with the run whenever
    requests may have ended.
    """
    from tqdm import tqdm

    bar = tqdm(total=total, disable=None)
    return lambda run: bar.update(len(run.records) - bar.n)


def _one_of(option: str, value: str, accepted: dict[str, str]) -> str:
    """accepted[value]. Raises ValueError, which names the option, if `value` is not a key."""
    if value not in accepted:
        raise ValueError(f"{option} {value}: accepted are {', '.join(accepted)}")
    return accepted[value]


def _percentile(number: str) -> float:
    """The value of `number`. Raises ValueError if it is not a number from 0 to 100."""
    value = float(number) if re.fullmatch(r"[0-9]+(\.[0-9]*)?", number) else -1.0
    if not 0 <= value <= 100:
        raise ValueError(f"--metric-percentiles {number}: numbers from 0 to 100 are accepted")
    return value


def _limits(goodput: list[str] | None) -> Limits | None:
    """The limits of --goodput, each written as in vLLM: `ttft:500` is 500 milliseconds. None without limits.
    Raises ValueError if a name is unknown or comes twice, or if a value is not a number above 0.
    """
    if not goodput:
        return None
    limit_names = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}  # vLLM's name -> the field of Limits
    try:
        pairs = [limit.partition(":")[::2] for limit in goodput]  # (name, milliseconds)
        seconds = {limit_names[name]: float(milliseconds) / 1e3 for name, milliseconds in pairs}
        is_twice = len(seconds) < len(pairs)
        if is_twice or not all(limit > 0 for limit in seconds.values()):
            raise ValueError
        return Limits(**seconds)
    except (KeyError, ValueError):
        raise ValueError(
            f"--goodput {' '.join(goodput)}: ttft:MS, tpot:MS and e2el:MS are accepted, each once"
        ) from None
