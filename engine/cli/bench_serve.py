"""`ruvon bench serve`: a running server under load, from outside. Part 20's wiring. Imports no torch.

Any server with OpenAI's API. Flags and lines of output are vLLM's. An open loop (--request-rate) counts from
when a request was due; with --max-concurrency, from when it was its turn.
"""

import asyncio
import json
import math
import os
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from engine.cli.options import check_folder, nobody_there, refusals
from engine.load.client import Seen, Target
from engine.load.plan import Job, text
from engine.load.report import Limits
from engine.load.run import Run, client, first_model

WORK, TIMES = "Workload", "What is told"
NAMES = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)"}
NAMES |= {"itl": "Inter-token Latency", "e2el": "End-to-end Latency"}
WIDTH = 50
BACKENDS = {"openai": "completions", "openai-chat": "chat"}


def _work(help: str, **about):
    return typer.Option(help=help, rich_help_panel=WORK, **about)


def serve(
    base_url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    backend: Annotated[str, typer.Option(help="openai (completions) or openai-chat.")] = "openai",
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    num_prompts: Annotated[int, _work("Requests; vLLM's default is 1000.", min=1)] = 100,
    random_input_len: Annotated[int, _work("Tokens of a prompt, about.", min=1)] = 128,
    random_output_len: Annotated[int, _work("Tokens of an output, at most.", min=1)] = 64,
    random_range_ratio: Annotated[
        float, _work("Lengths are drawn from this share below to this share above.", min=0, max=0.99)
    ] = 0.0,
    request_rate: Annotated[float, _work("A second, on average (Poisson); inf: all at once.")] = math.inf,
    max_concurrency: Annotated[int | None, _work("Requests under way at once, at most.", min=1)] = None,
    ignore_eos: Annotated[bool, _work("Outputs of exactly their length (vLLM's field).")] = False,
    temperature: Annotated[float, _work("0 is greedy.")] = 0.0,
    seed: Annotated[int, _work("Of prompts, lengths and arrivals.")] = 0,
    percentile_metrics: Annotated[
        str, typer.Option(help="Some of ttft, tpot, itl, e2el.", rich_help_panel=TIMES)
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles, such as 50,95,99.", rich_help_panel=TIMES)
    ] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="A limit in ms that a good answer keeps: ttft:500.", rich_help_panel=TIMES),
    ] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write the figures as JSON.", rich_help_panel=TIMES)
    ] = False,
    result_filename: Annotated[
        Path | None, typer.Option(help="Where; default: by the time of day.", rich_help_panel=TIMES)
    ] = None,
) -> None:
    """Send requests to a running server, and say how long people waited."""
    import httpx

    from engine.outside import shown

    with refusals("bench serve"):
        check_folder("--result-filename", result_filename)
        api = _one_of("--backend", backend, BACKENDS)
        metrics = percentile_metrics.split(",")
        for name in metrics:
            _one_of("--percentile-metrics", name, NAMES)
        percentiles = [_percentile(one) for one in metric_percentiles.split(",")]
        limits = _limits(goodput)
        if not request_rate > 0:
            raise ValueError(f"--request-rate {request_rate}: more than 0 is accepted, or inf")
        draw = Random(seed)
        jobs = _jobs(num_prompts, random_input_len, random_output_len, random_range_ratio, request_rate, draw)
    fields = {"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {})

    async def run() -> tuple[Run, str]:
        async with client(base_url, os.environ.get("RUVON_API_KEY")) as http:
            name = model or await first_model(http)
            running = Run(_in_turn(Target(http, name, api, fields=fields), max_concurrency))
            await running.watched(running.open_loop(jobs), _bar(len(jobs)))
            return running, name

    try:
        running, name = asyncio.run(run())
    except (httpx.HTTPError, OSError, LookupError, ValueError) as error:
        sys.exit(shown(nobody_there(f"ruvon bench serve: {base_url}: {error}")))
    found = figures(running.seen, running.start, metrics, percentiles, limits)
    found |= {"model_id": name, "request_rate": str(request_rate), "max_concurrency": max_concurrency}
    for line in lines(found, metrics, percentiles):
        print(line)
    if save_result or result_filename:
        path = result_filename or Path(f"openai-{request_rate}qps-{datetime.now():%Y%m%d-%H%M%S}.json")
        path.write_text(json.dumps(found, indent=4) + "\n", encoding="utf-8")
        print(f"written to {path}", file=sys.stderr)
    if not found["completed"]:
        sys.exit(f"ruvon bench serve: no request was answered: {found['outcomes']}")


def figures(
    seen: list[Seen], start: float, metrics: list[str], percentiles: list[float], limits: Limits | None
) -> dict:
    """What is said of a run, in vLLM's names; times in milliseconds."""
    import numpy

    answered = [one for one in seen if one.ok]
    seconds = max((one.end for one in seen), default=start) - start
    given, made = (sum(getattr(one, name) or 0 for one in answered) for name in ("prompt_tokens", "tokens"))
    found = {
        "duration": seconds,
        "completed": len(answered),
        "failed": len(seen) - len(answered),
        "outcomes": dict(sorted(Counter(one.outcome for one in seen).items())),
        "total_input_tokens": given,
        "total_output_tokens": made,
        "request_throughput": len(answered) / seconds,
        "request_goodput": None if limits is None else sum(map(limits.met, seen)) / seconds,
        "output_throughput": made / seconds,
        "total_token_throughput": (given + made) / seconds,
    }
    times = {
        "ttft": [one.ttft for one in answered],
        "tpot": [one.tpot for one in answered if one.tpot is not None],
        "itl": [gap for one in answered for gap in one.gaps],
        "e2el": [one.e2e for one in answered],
    }
    for name in metrics:
        values = [1e3 * value for value in times[name]]
        found[f"mean_{name}_ms"] = float(numpy.mean(values)) if values else 0.0
        found[f"median_{name}_ms"] = float(numpy.median(values)) if values else 0.0
        for p in percentiles:
            found[f"p{p:g}_{name}_ms"] = float(numpy.percentile(values, p)) if values else 0.0
    return found


def lines(found: dict, metrics: list[str], percentiles: list[float]) -> list[str]:
    """As vLLM prints them."""
    told = ["{s:{c}^{n}}".format(s=" Serving Benchmark Result ", n=WIDTH, c="=")]
    rows = [
        ("Successful requests:", found["completed"]),
        ("Failed requests:", found["failed"]),
        ("Maximum request concurrency:", found["max_concurrency"]),
        ("Request rate configured (RPS):", found["request_rate"] if found["request_rate"] != "inf" else None),
        ("Benchmark duration (s):", found["duration"]),
        ("Total input tokens:", found["total_input_tokens"]),
        ("Total generated tokens:", found["total_output_tokens"]),
        ("Request throughput (req/s):", found["request_throughput"]),
        ("Request goodput (req/s):", found["request_goodput"]),
        ("Output token throughput (tok/s):", found["output_throughput"]),
        ("Total Token throughput (tok/s):", found["total_token_throughput"]),
    ]
    told += [_row(name, value) for name, value in rows if value is not None]
    for name in metrics:
        told.append("{s:{c}^{n}}".format(s=NAMES[name], n=WIDTH, c="-"))
        for kind in ("Mean", "Median", *(f"P{p:g}" for p in percentiles)):
            told.append(_row(f"{kind} {name.upper()} (ms):", found[f"{kind.lower()}_{name}_ms"]))
    refused = {outcome: count for outcome, count in found["outcomes"].items() if outcome != "ok"}
    if refused:
        told.append("Not answered: " + ", ".join(f"{outcome}: {count}" for outcome, count in refused.items()))
    return [*told, "=" * WIDTH]


def _row(name: str, value) -> str:
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"


def _jobs(number: int, given: int, made: int, ratio: float, rate: float, draw: Random) -> list[Job]:
    """Each with its own beginning, so that no prefix cache knows it."""
    jobs, at = [], 0.0
    for _ in range(number):
        sizes = [max(1, round(size * draw.uniform(1 - ratio, 1 + ratio))) for size in (given, made)]
        jobs.append(Job(at, text(sizes[0], draw), sizes[1]))
        at += 0.0 if rate == math.inf else draw.expovariate(rate)
    return jobs


def _in_turn(target: Target, most: int | None):
    """Asks, with at most so many requests under way."""
    if most is None:
        return target.ask
    seats = asyncio.Semaphore(most)

    async def ask(job: Job, due: float) -> Seen:
        async with seats:
            return await target.ask(job, asyncio.get_running_loop().time())

    return ask


def _bar(total: int):
    from tqdm import tqdm

    bar = tqdm(total=total, disable=None)
    return lambda run: bar.update(len(run.seen) - bar.n)


def _one_of(option: str, value: str, accepted: dict) -> str:
    if value not in accepted:
        raise ValueError(f"{option} {value}: accepted are {', '.join(accepted)}")
    return accepted[value]


def _percentile(text: str) -> float:
    value = float(text) if text.replace(".", "", 1).isdigit() else -1.0
    if not 0 <= value <= 100:
        raise ValueError(f"--metric-percentiles {text}: numbers from 0 to 100 are accepted")
    return value


def _limits(goodput: list[str] | None) -> Limits | None:
    """vLLM's `ttft:500`, in milliseconds. Raises ValueError."""
    if not goodput:
        return None
    known = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}
    try:
        pairs = [one.partition(":")[::2] for one in goodput]
        found = {known[name]: float(value) / 1e3 for name, value in pairs}
        if len(found) < len(pairs) or not all(limit > 0 for limit in found.values()):
            raise ValueError
        return Limits(**found)
    except (KeyError, ValueError):
        raise ValueError(
            f"--goodput {' '.join(goodput)}: ttft:MS, tpot:MS and e2el:MS are accepted, each once"
        ) from None
