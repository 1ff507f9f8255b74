"""Put an OpenAI-compatible server under load, and say how it bears it. Part 15.

    python -m benchmarks.load --url http://127.0.0.1:8000 --rate 5 --seconds 30 --slo ttft=0.5,tpot=0.05
    python -m benchmarks.load --trace ../shared/data/AzureLLMInferenceTrace_conv.csv --rate 2
    python -m benchmarks.load --concurrency 32 --api chat

An open loop (`--rate`, `--trace`) sends each request when it is due, however many have not been answered:
people do not wait for one another. Its times begin when a request was due, so that a server which stalls
cannot hide it by keeping the generator from sending. A closed loop (`--concurrency N`) has N users, each of
whom asks again as soon as it has its answer. Every request has a connection of its own and is sent once.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import httpx

from engine.load.client import PATHS, Endpoint
from engine.load.plan import Job, Span, endless_jobs, jobs_of_trace, poisson_jobs
from engine.load.report import LatencyLimits, generator_lag, run_figures, tables
from engine.load.run import Run, first_model, http_client

CONTEXT = 1024  # storyteller's, and GPT-2's


def span(text: str) -> Span:
    """`64`, or `8-128`."""
    least, _, most = text.partition("-")
    low, high = int(least), int(most or least)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text}: a number from 1 on, or two of them as in 8-128")
    return low, high


def positive(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: a number above 0 is needed")
    return float(text)


def limits(text: str) -> LatencyLimits:
    try:
        return LatencyLimits.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="any server with OpenAI's API, with or without /v1")
    add("--api-key", default=os.environ.get("RUVON_API_KEY"), help="default: RUVON_API_KEY, if set")
    add("--model", help="default: the first that the server has")
    add("--api", choices=PATHS, default="completions")
    add("--rate", type=positive, help="requests a second, on average (Poisson); of a trace: its new speed")
    add("--trace", type=Path, help="a CSV with TIMESTAMP, ContextTokens, GeneratedTokens, to be replayed")
    add("--context", type=int, default=CONTEXT, help=f"tokens a trace is scaled to; default: {CONTEXT}")
    add("--concurrency", type=int, help="a closed loop with so many users, in place of --rate")
    add("--seconds", type=positive, default=30, help="for which requests are sent; default: 30")
    add("--prompt-tokens", type=span, default=(8, 128), help="drawn evenly; default: 8-128")
    add("--max-tokens", type=span, default=(16, 128), help="drawn evenly; default: 16-128")
    add("--ignore-eos", action="store_true", help="outputs of exactly that length (vLLM's field)")
    add("--timeout", type=positive, default=600, help="seconds for a whole answer; default: 600")
    add("--slo", type=limits, help="limits for goodput, in seconds: ttft=0.5,tpot=0.05,e2e=10")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="the JSON's file; default: out/load.json")
    options = parser.parse_args(given)
    ways = [options.concurrency is not None, options.rate is not None or options.trace is not None]
    if sum(ways) != 1:
        parser.error("one of --rate, --trace (with or without --rate) and --concurrency is needed")
    if options.concurrency is not None and options.concurrency < 1:
        parser.error(f"--concurrency {options.concurrency}: at least 1 user is needed")
    return options


async def load(options: argparse.Namespace, http: httpx.AsyncClient) -> tuple[dict, dict]:
    """The run that `options` ask for: (workload, figures)."""
    fields = {"temperature": 0} | ({"ignore_eos": True} if options.ignore_eos else {})
    model = options.model or await first_model(http)
    endpoint = Endpoint(http, model, options.api, options.timeout, fields)
    workload = {
        "url": str(http.base_url), "model": model, "api": options.api, "seconds": options.seconds,
        "seed": options.seed, "ignore_eos": options.ignore_eos,
    }  # fmt: skip
    random = Random(options.seed)
    sizes = options.prompt_tokens, options.max_tokens, random
    spans = {"prompt_tokens": list(options.prompt_tokens), "max_tokens": list(options.max_tokens)}
    if options.trace:
        trace = jobs_of_trace(options.trace, options.context, options.seconds, random, options.rate)
        jobs = trace.jobs
        workload |= {
            "arrivals": options.trace.name, "speed": trace.speed, "size_factor": trace.size_factor,
            "context": options.context, "prompts_cut": trace.num_cut, "rate": options.rate,
        }  # fmt: skip
    elif options.concurrency:
        jobs = None
        workload |= {"arrivals": "closed loop", "users": options.concurrency} | spans
    else:
        jobs = poisson_jobs(options.rate, options.seconds, *sizes)
        workload |= {"arrivals": "Poisson", "rate": options.rate} | spans

    with Board(jobs, options.seconds) as tick:
        run = Run(endpoint.ask)
        work = (
            run.open_loop(jobs)
            if jobs is not None
            else run.closed_loop(endless_jobs(*sizes), options.concurrency, options.seconds)
        )
        await run.watch(work, tick)
    return workload, run_figures(run.records, run.start, run.wakeup_delays, options.slo)


class Board:
    """A bar on stderr, where somebody looks at it: what was sent, answered, refused, and is under way."""

    def __init__(self, jobs: list[Job] | None, seconds: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.jobs, self.seconds = jobs, seconds
        counts = "{task.fields[sent]} sent, {task.fields[ok]} answered, {task.fields[no]} not, "
        self.bar = Progress(
            BarColumn(), TextColumn(counts + "{task.fields[open]} under way"), TimeElapsedColumn(),
            console=Console(stderr=True), auto_refresh=False, transient=True,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=len(jobs) if jobs else seconds, sent=0, ok=0, no=0, open=0)
        self.ok = self.counted = 0

    def __enter__(self) -> Callable[[Run], None]:
        if not self.bar.console.is_terminal:
            return lambda run: None
        self.bar.start()
        return self.tick

    def tick(self, run: Run) -> None:
        """The bar is full when the last answer is there; of a closed loop, when nobody asks any more."""
        self.ok += sum(one.ok for one in run.records[self.counted :])
        self.counted = len(run.records)
        passed = asyncio.get_running_loop().time() - run.start
        self.bar.update(
            self.task,
            completed=self.counted if self.jobs is not None else min(passed, self.seconds),
            sent=run.num_sent,
            ok=self.ok,
            no=self.counted - self.ok,
            open=run.num_sent - self.counted,
        )
        self.bar.refresh()

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def main(given: list[str] | None = None) -> None:
    options = arguments(given)

    async def run() -> tuple[dict, dict]:
        async with http_client(options.url, options.api_key) as http:
            return await load(options, http)

    try:
        workload, found = asyncio.run(run())
    except (httpx.HTTPError, OSError, ValueError, LookupError) as error:
        sys.exit(f"benchmarks.load: {options.url}: {error}")
    except KeyboardInterrupt:
        sys.exit("benchmarks.load: interrupted; nothing was written")
    from benchmarks.record import OUT, record, show  # takes torch's time: after the run

    path = options.out or OUT / "load.json"
    shown = tables(found)
    written = record(path.stem, "How does this server bear the load?", workload, found, shown, path.parent)
    show(written.resolve(), shown)
    print(generator_lag(found))


if __name__ == "__main__":
    main()
