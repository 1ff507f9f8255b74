"""`ruvon bench`: latency and throughput of the engine in this process. Part 20's wiring.

Flags and lines of output are vLLM's, so that two engines' numbers can stand side by side. Prompts are random
token ids, none of which is a special token; outputs are of exactly the length asked for.
"""

import json
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from engine.cli.bench_serve import bench_serve
from engine.cli.options import check_folder, refusals, takes_engine_args
from engine.wiring.engine_args import EngineArgs

PERCENTILES = (10, 25, 50, 75, 90, 99)
WORK = "Workload"

bench = typer.Typer(no_args_is_help=True, help="Measure: one batch, many requests, or a running server.")
bench.command("serve")(bench_serve)


def _size(help: str):
    return typer.Option(help=help, rich_help_panel=WORK, min=1)


OutputJson = Annotated[Path | None, typer.Option(help="Where to write the figures.", rich_help_panel=WORK)]
Seed = Annotated[int, typer.Option(help="Of the prompts.", rich_help_panel=WORK)]


@bench.command()
@takes_engine_args("bench latency", enable_prefix_caching=False)
def latency(
    args: EngineArgs,
    input_len: Annotated[int, _size("Tokens of a prompt.")] = 32,
    output_len: Annotated[int, _size("Tokens of an output.")] = 128,
    batch_size: Annotated[int, _size("Requests at once.")] = 8,
    n: Annotated[int, _size("Samples of each.")] = 1,
    num_iters_warmup: Annotated[
        int, typer.Option(help="Batches that are not counted.", rich_help_panel=WORK, min=0)
    ] = 10,
    num_iters: Annotated[int, _size("Batches that are.")] = 30,
    seed: Seed = 0,
    output_json: OutputJson = None,
) -> None:
    """How long does one batch take, from its first prompt to its last token?"""
    with refusals("bench latency"):
        check_folder("--output-json", output_json)
        llm, params = _loaded(args, input_len, output_len, n)
        prompts = _prompts(llm, batch_size, input_len, random.Random(seed))
        for _ in _track(range(num_iters_warmup), "Warming up"):
            llm.generate(prompts, params, use_tqdm=False)
        seconds = []
        for _ in _track(range(num_iters), "Batches"):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
    import numpy

    percentiles = dict(zip(PERCENTILES, numpy.percentile(seconds, PERCENTILES).tolist(), strict=True))
    print(f"Avg latency: {sum(seconds) / len(seconds)} seconds")
    for percentage, value in percentiles.items():
        print(f"{percentage}% percentile latency: {value} seconds")
    _write(
        output_json,
        {"avg_latency": sum(seconds) / len(seconds), "latencies": seconds, "percentiles": percentiles},
    )


@bench.command()
@takes_engine_args("bench throughput")
def throughput(
    args: EngineArgs,
    input_len: Annotated[int, _size("Tokens of a prompt.")] = 128,
    output_len: Annotated[int, _size("Tokens of an output.")] = 64,
    num_prompts: Annotated[int, _size("Requests, all there from the start; vLLM's default is 1000.")] = 100,
    n: Annotated[int, _size("Samples of each.")] = 1,
    seed: Seed = 0,
    output_json: OutputJson = None,
) -> None:
    """How many tokens a second, with as many requests as the engine will run at once?"""
    with refusals("bench throughput"):
        check_folder("--output-json", output_json)
        llm, params = _loaded(args, input_len, output_len, n)
        draw = random.Random(seed)
        llm.generate(_prompts(llm, 2, input_len, draw), params, use_tqdm=False)  # what is made at first use
        prompts = _prompts(llm, num_prompts, input_len, draw)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
    num_input_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    num_tokens = num_input_tokens + num_output_tokens
    print(
        f"Throughput: {num_prompts / seconds:.2f} requests/s, "
        f"{num_tokens / seconds:.2f} total tokens/s, {num_output_tokens / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_input_tokens}")
    print(f"Total num output tokens:  {num_output_tokens}")
    figures = {
        "elapsed_time": seconds,
        "num_requests": num_prompts,
        "total_num_tokens": num_tokens,
        "requests_per_second": num_prompts / seconds,
        "tokens_per_second": num_tokens / seconds,
    }
    _write(output_json, figures)


def _loaded(args: EngineArgs, input_len: int, output_len: int, n: int):
    """(the engine, how it is asked). Raises ValueError for lengths that the model cannot have."""
    from engine.decoding.params import SamplingParams
    from engine.wiring.llm import LLM
    from engine.wiring.loading import loading, one_thread_if_small

    one_thread_if_small(args.model)
    with loading(args.model):
        llm = LLM(**vars(args))
    if input_len + output_len > llm.engine.max_model_len:
        raise ValueError(
            f"--input-len {input_len} and --output-len {output_len} are more than max_model_len="
            f"{llm.engine.max_model_len} together"
        )
    return llm, SamplingParams(n=n, temperature=1.0, ignore_eos=True, max_tokens=output_len)


def _prompts(llm, number: int, tokens: int, draw: random.Random) -> list[dict]:
    special = llm.tokenizer.special_ids
    ids = [id for id in range(llm.tokenizer.vocab_size) if id in llm.tokenizer and id not in special]
    return [{"prompt_token_ids": draw.choices(ids, k=tokens)} for _ in range(number)]


def _track(rounds: Iterable[int], what: str) -> Iterable[int]:
    from tqdm import tqdm

    return tqdm(rounds, desc=what, disable=None)


def _write(path: Path | None, figures: dict) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=4) + "\n", encoding="utf-8")
