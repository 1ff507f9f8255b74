"""`ruvon bench`: measures the latency and throughput of an engine in this process. Part 20's wiring.

The flags and the printed lines are vLLM's, so that the numbers of two engines can be compared. Prompts are
random token ids without special tokens. Every output has exactly the length that was asked for.
"""

import json
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.bench_serve import bench_serve
from engine.cli.engine_flags import takes_engine_args
from engine.cli.options import Command, check_output_file, flag, refusals
from engine.wiring.engine_args import EngineArgs

if TYPE_CHECKING:  # these import torch
    from engine.decoding.params import SamplingParams
    from engine.wiring.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)
WORKLOAD = "Workload"  # a heading in the help

bench = typer.Typer(no_args_is_help=True, help="Measure: one batch, many requests, or a running server.")
bench.command("serve", cls=Command)(bench_serve)


OutputJson = Annotated[Path | None, flag(WORKLOAD, "A file for the figures.")]


@bench.command()
@takes_engine_args("bench latency", enable_prefix_caching=False, seed=0)
def latency(
    args: EngineArgs,
    input_len: Annotated[int, flag(WORKLOAD, "Tokens of a prompt.", min=1)] = 32,
    output_len: Annotated[int, flag(WORKLOAD, "Tokens of an output.", min=1)] = 128,
    batch_size: Annotated[int, flag(WORKLOAD, "Requests at once.", min=1)] = 8,
    n: Annotated[int, flag(WORKLOAD, "Samples of each.", min=1)] = 1,
    num_iters_warmup: Annotated[int, flag(WORKLOAD, "Batches that are not counted.", min=0)] = 10,
    num_iters: Annotated[int, flag(WORKLOAD, "Batches that are counted.", min=1)] = 30,
    output_json: OutputJson = None,
) -> None:
    """How long does one batch take, from its first prompt to its last token?"""
    import numpy

    with refusals("bench latency"):
        check_output_file("--output-json", output_json)
        llm, params = _load(args, input_len, output_len, n)
        prompts = _random_prompts(llm, batch_size, input_len, random.Random(args.seed))
        for _ in _with_bar(range(num_iters_warmup), "Warming up"):
            llm.generate(prompts, params, use_tqdm=False)
        seconds = []
        for _ in _with_bar(range(num_iters), "Batches"):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
    average = sum(seconds) / len(seconds)
    percentiles = {percentage: float(numpy.percentile(seconds, percentage)) for percentage in PERCENTILES}
    print(f"Avg latency: {average} seconds")
    for percentage, value in percentiles.items():
        print(f"{percentage}% percentile latency: {value} seconds")
    _write_json(output_json, {"avg_latency": average, "latencies": seconds, "percentiles": percentiles})


@bench.command()
@takes_engine_args("bench throughput", seed=0)
def throughput(
    args: EngineArgs,
    input_len: Annotated[int, flag(WORKLOAD, "Tokens of a prompt.", min=1)] = 128,
    output_len: Annotated[int, flag(WORKLOAD, "Tokens of an output.", min=1)] = 64,
    num_prompts: Annotated[
        int, flag(WORKLOAD, "Requests, all there from the start; vLLM's default is 1000.", min=1)
    ] = 100,
    n: Annotated[int, flag(WORKLOAD, "Samples of each.", min=1)] = 1,
    output_json: OutputJson = None,
) -> None:
    """How many tokens a second, with as many requests as the engine will run at once?"""
    with refusals("bench throughput"):
        check_output_file("--output-json", output_json)
        llm, params = _load(args, input_len, output_len, n)
        generator = random.Random(args.seed)
        # The first use of the engine allocates buffers and compiles kernels, so it is not timed.
        warmup = _random_prompts(llm, 2, input_len, generator)
        llm.generate(warmup, params, use_tqdm=False)
        prompts = _random_prompts(llm, num_prompts, input_len, generator)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
    num_input_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = 0
    for output in outputs:
        num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
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
    _write_json(output_json, figures)


def _load(args: EngineArgs, input_len: int, output_len: int, n: int) -> "tuple[LLM, SamplingParams]":
    """(the LLM, SamplingParams for `n` samples of exactly `output_len` tokens each).

    Raises CheckpointError if the model cannot be loaded, ValueError if `input_len` and `output_len` together
    are more than the model's longest sequence.
    """
    from engine.decoding.params import SamplingParams
    from engine.wiring.llm import LLM
    from engine.wiring.loading import loading, one_thread_if_small

    one_thread_if_small(args.model, args.model_impl)
    with loading(args.model):
        llm = LLM(**vars(args))
    if input_len + output_len > llm.engine.max_model_len:
        raise ValueError(
            f"--input-len {input_len} and --output-len {output_len} are more than max_model_len="
            f"{llm.engine.max_model_len} together"
        )
    return llm, SamplingParams(n=n, temperature=1.0, ignore_eos=True, max_tokens=output_len)


def _random_prompts(llm: "LLM", num_prompts: int, num_tokens: int, generator: random.Random) -> list[dict]:
    """Prompts for LLM.generate with `num_tokens` random token ids each. Special tokens are left out, and so
    are ids of the vocabulary that stand for no token.
    """
    tokenizer = llm.tokenizer
    ordinary_ids: list[int] = []
    for token_id in range(tokenizer.vocab_size):
        if token_id in tokenizer and token_id not in tokenizer.special_ids:
            ordinary_ids.append(token_id)
    return [{"prompt_token_ids": generator.choices(ordinary_ids, k=num_tokens)} for _ in range(num_prompts)]


def _with_bar(iterations: range, description: str) -> Iterable[int]:
    """The iterations, with a progress bar if stderr is a terminal."""
    from tqdm import tqdm

    return tqdm(iterations, desc=description, disable=None)


def _write_json(path: Path | None, figures: dict) -> None:
    """Write the figures to the file of --output-json, if that flag was given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=4) + "\n", encoding="utf-8")
