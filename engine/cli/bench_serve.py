"""`ruvon bench serve`: measures a running server under load. Part 20's wiring. Imports no torch.

The server may be any server with OpenAI's API. The flags and the printed lines are vLLM's. A request's times
count from when the request was due by --request-rate. If --max-concurrency makes a request wait, they count
from when its wait ended. bench_workload.py draws the requests, and bench_report.py has the figures.
"""

import asyncio
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer

from engine.cli.bench_options import (
    check_above_zero,
    check_address,
    check_choice,
    check_text,
    json_object,
    latency_limits,
    percentile_of,
    request_url,
)
from engine.cli.bench_report import METRIC_NAMES, peaks, report_lines, vllm_figures
from engine.cli.bench_workload import Lengths, draw_arrivals, draw_lengths, prompt_writer
from engine.cli.neutral_flags import takes_neutral_flags
from engine.cli.options import check_output_file, flag, refusals, with_hint
from engine.load.client import Endpoint, RequestRecord
from engine.load.plan import Job
from engine.load.report import LatencyLimits, run_figures
from engine.load.run import Ask, Run, first_model, http_client
from engine.wiring.neutral_options import Neutral

WORKLOAD, METRICS = "Workload", "Metrics"  # headings in the help
# Reasons why flags of vLLM's are absent.
IN_EXTRA_BODY = "give it as --extra-body '{\"top_p\": 0.9}'"
RANDOM_PROMPTS = "prompts are random words, of lengths drawn from --random-range-ratio"
ONE_FILE = "--result-filename takes a path, and --save-result a name with the date"
# vLLM's flags that this command does not have: the values that are accepted, and why no others.
NEUTRAL_FLAGS: dict[str, Neutral] = {
    "dataset_path": Neutral((None,), RANDOM_PROMPTS),
    "random_prefix_len": Neutral((0,), RANDOM_PROMPTS),
    "tokenizer_mode": Neutral(("auto",), "the tokenizer is the engine's"),
    "trust_remote_code": Neutral((False,), "no code of a model's is run here"),
    "top_p": Neutral((1, 1.0), IN_EXTRA_BODY),
    "top_k": Neutral((-1, 0), IN_EXTRA_BODY),
    "min_p": Neutral((0, 0.0), IN_EXTRA_BODY),
    "frequency_penalty": Neutral((0, 0.0), IN_EXTRA_BODY),
    "presence_penalty": Neutral((0, 0.0), IN_EXTRA_BODY),
    "repetition_penalty": Neutral((1, 1.0), IN_EXTRA_BODY),
    "logprobs": Neutral((None,), IN_EXTRA_BODY),
    "use_beam_search": Neutral((False,), "a server has no beam search: LLM.beam_search has"),
    "ramp_up_strategy": Neutral((None,), "requests come at one rate: --request-rate, --burstiness"),
    "ready_check_timeout_sec": Neutral((0,), "a server that does not answer is named at once"),
    "profile": Neutral((False,), "a server here has no profiler"),
    "save_detailed": Neutral((False,), "figures are saved, not each request's"),
    "append_result": Neutral((False,), ONE_FILE),
    "result_dir": Neutral((None,), ONE_FILE),
    "metadata": Neutral((None,), ONE_FILE),
    "label": Neutral((None,), ONE_FILE),
    "disable_tqdm": Neutral((False,), "the bar is drawn on a terminal only"),
    "lora_modules": Neutral((None,), "--served-model-name names one adapter"),
    "insecure": Neutral((False,), "a certificate is always checked"),
}
BACKENDS = {"openai": "completions", "openai-chat": "chat"}  # vLLM's name -> `Endpoint.api`


@dataclass(frozen=True)
class Destination:
    """Where requests go, and what all of them have in common."""

    base_url: str
    model: str | None  # the model's name in requests; None: the server's first
    api: str  # a value of BACKENDS
    fields: dict[str, Any]  # further fields of each request
    url: str | None  # where requests are sent; None: to the usual path of the API


@takes_neutral_flags("bench serve", NEUTRAL_FLAGS)
def bench_serve(
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", "--url", help="The server, with or without /v1; default: --host, --port."),
    ] = None,
    host: Annotated[str, typer.Option(help="The server's address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The server's port.")] = 8000,
    endpoint: Annotated[
        str | None, typer.Option(help="The path of requests; default: /v1/completions, or the chat's.")
    ] = None,
    backend: Annotated[str, typer.Option(help="openai (completions) or openai-chat.")] = "openai",
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests; default: --model.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A model's tokenizer, to make prompts of exactly their length; default: about."),
    ] = None,
    dataset_name: Annotated[str, flag(WORKLOAD, "random: prompts of random words.")] = "random",
    num_prompts: Annotated[int, flag(WORKLOAD, "Requests; vLLM's default is 1000.", min=1)] = 100,
    random_input_len: Annotated[
        int, flag(WORKLOAD, "Tokens of a prompt.", "--random-input-len", "--input-len", min=1)
    ] = 128,
    random_output_len: Annotated[
        int,
        flag(WORKLOAD, "Tokens of an output, at most.", "--random-output-len", "--output-len", min=1),
    ] = 64,
    random_range_ratio: Annotated[
        float, flag(WORKLOAD, "Lengths are drawn from this share below to this share above.", min=0, max=0.99)
    ] = 0.0,
    request_rate: Annotated[
        float, flag(WORKLOAD, "Requests a second, on average; inf sends all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float,
        flag(WORKLOAD, "Shape of the gaps' gamma distribution; 1 is Poisson, less bursts more, inf is even."),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, flag(WORKLOAD, "Requests under way at once, at most.", min=1)
    ] = None,
    ignore_eos: Annotated[bool, flag(WORKLOAD, "Outputs of exactly their length (vLLM's field).")] = False,
    temperature: Annotated[float, flag(WORKLOAD, "0 is greedy.")] = 0.0,
    extra_body: Annotated[
        str | None, flag(WORKLOAD, "Further fields of each request, as JSON.", metavar="JSON")
    ] = None,
    num_warmups: Annotated[
        int, flag(WORKLOAD, "Uncounted requests before; all are the first prompt, as vLLM's.", min=0)
    ] = 0,
    seed: Annotated[int, flag(WORKLOAD, "Seed of prompts, lengths and arrivals.")] = 0,
    percentile_metrics: Annotated[str, flag(METRICS, "Some of ttft, tpot, itl, e2el.")] = "ttft,tpot,itl",
    metric_percentiles: Annotated[str, flag(METRICS, "Percentiles, such as 50,95,99.")] = "99",
    goodput: Annotated[
        list[str] | None,
        flag(METRICS, "A limit in ms that a good answer keeps: ttft:500."),
    ] = None,
    save_result: Annotated[bool, flag(METRICS, "Write the figures as JSON.", "--save-result")] = False,
    result_filename: Annotated[
        Path | None,
        flag(METRICS, "The file; default: a name with the date and time."),
    ] = None,
) -> None:
    """Send requests to a running server, and say how long people waited."""
    from engine.client.untrusted import printable

    with refusals("bench serve"):
        # 1. The flags.
        check_output_file("--result-filename", result_filename)
        check_text("--model", model)
        check_text("--served-model-name", served_model_name)
        check_choice("--backend", backend, BACKENDS)
        check_choice("--dataset-name", dataset_name, ["random"])
        metrics = percentile_metrics.split(",")
        for metric in metrics:
            check_choice("--percentile-metrics", metric, METRIC_NAMES)
        percentiles = [percentile_of(number) for number in metric_percentiles.split(",")]
        limits = latency_limits(goodput)
        check_above_zero("--request-rate", request_rate)
        check_above_zero("--burstiness", burstiness)
        # 2. The requests, and where they go.
        base_url = _server_url(base_url, host, port)
        url = request_url(base_url, endpoint)
        check_address(base_url if url is None else url)
        fields: dict[str, Any] = {"temperature": temperature}
        if ignore_eos:
            fields["ignore_eos"] = True
        fields |= json_object("--extra-body", extra_body)
        random = Random(seed)
        lengths = draw_lengths(num_prompts, random_input_len, random_output_len, random_range_ratio, random)
        arrivals = draw_arrivals(num_prompts, request_rate, burstiness, random)
        jobs = _write_jobs(arrivals, lengths, prompt_writer(tokenizer, random))
    destination = Destination(base_url, served_model_name or model, BACKENDS[backend], fields, url)
    # 3. The run.
    try:
        run, model_name = asyncio.run(_send_all(destination, jobs, num_warmups, max_concurrency))
    except (httpx.HTTPError, OSError, ValueError) as error:
        sys.exit(printable(with_hint(f"ruvon bench serve: {base_url}: {error}")))
    # 4. The figures.
    settings = {
        "date": f"{datetime.now():%Y%m%d-%H%M%S}",
        "backend": backend,
        "model_id": model or model_name,
        "tokenizer_id": tokenizer,
        "num_prompts": num_prompts,
        "request_rate": "inf" if request_rate == math.inf else request_rate,
        "burstiness": "inf" if burstiness == math.inf else burstiness,
        "max_concurrency": max_concurrency,
    }
    result = settings | _figures(run, limits, metrics, percentiles)
    for line in report_lines(result, metrics, percentiles):
        print(line)
    if save_result or result_filename:
        _save(result, result_filename or Path(f"{backend}-{request_rate}qps-{result['date']}.json"))
    if not result["completed"]:
        sys.exit(f"ruvon bench serve: no request was answered: {result['outcomes']}")


def _figures(
    run: Run, limits: LatencyLimits | None, metrics: list[str], percentiles: list[float]
) -> dict[str, Any]:
    """The run's figures for `report_lines`. The arguments are as in `run_figures` and `vllm_figures`."""
    measured = run_figures(run.records, run.start, run.wakeup_delays, limits, (50, *percentiles))
    figures = vllm_figures(measured, metrics, percentiles)
    run_peaks = peaks(run.records)
    figures["max_output_tokens_per_s"] = run_peaks.output_tokens_per_s
    figures["max_concurrent_requests"] = run_peaks.concurrent_requests
    return figures


def _save(result: dict[str, Any], path: Path) -> None:
    """Write the figures to the file as JSON, and say where."""
    path.write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
    print(f"written to {path}", file=sys.stderr)


def _server_url(base_url: str | None, host: str, port: int) -> str:
    """The server's address: `base_url` if it is given, else that of host and port."""
    if base_url is not None:
        return base_url
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_jobs(
    arrivals: Sequence[float], lengths: Sequence[Lengths], write_prompt: Callable[[int], str]
) -> list[Job]:
    """A job for each request. `arrivals`: when requests are due, in seconds from the start. `write_prompt`
    makes a prompt of so many tokens; the ValueError that it may raise is passed on.
    """
    jobs = []
    for due, tokens in zip(arrivals, lengths, strict=True):
        jobs.append(Job(due, write_prompt(tokens.prompt), tokens.output))
    return jobs


async def _send_all(
    destination: Destination, jobs: Sequence[Job], num_warmups: int, max_concurrency: int | None
) -> tuple[Run, str]:
    """Send the warmups, and then the jobs. Each warmup is the first job, as in vLLM, so a prefix cache has
    that job's prompt when it is measured. Returns the run of the jobs, and the model's name in requests.
    Raises httpx.HTTPError, OSError or ValueError if the server does not name a model when it is asked.
    """
    async with http_client(destination.base_url, os.environ.get("RUVON_API_KEY")) as http:
        name = destination.model or await first_model(http)
        endpoint = Endpoint(http, name, api=destination.api, fields=destination.fields, url=destination.url)
        ask = _with_bound(endpoint, max_concurrency)
        now = asyncio.get_running_loop().time()
        await asyncio.gather(*(ask(jobs[0], now) for _ in range(num_warmups)))
        run = Run(ask)
        await run.watch(run.open_loop(jobs), _bar(len(jobs)))
        return run, name


def _with_bound(endpoint: Endpoint, max_concurrency: int | None) -> Ask:
    """`endpoint.ask` with at most `max_concurrency` requests under way; None means no bound. A request that
    waits for others to end is due when its wait ends.
    """
    if max_concurrency is None:
        return endpoint.ask
    under_way = asyncio.Semaphore(max_concurrency)

    async def ask(job: Job, due: float) -> RequestRecord:
        must_wait = under_way.locked()
        async with under_way:
            return await endpoint.ask(job, asyncio.get_running_loop().time() if must_wait else due)

    return ask


def _bar(total: int) -> Callable[[Run], None]:
    """A function that shows a run's progress, in a bar if stderr is a terminal. Call it with the run whenever
    requests may have ended.
    """
    from tqdm import tqdm

    bar = tqdm(total=total, disable=None)
    return lambda run: bar.update(len(run.records) - bar.n)
