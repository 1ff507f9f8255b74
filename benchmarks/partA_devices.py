"""What do several ranks cost and bring: a sum alone, an order alone, whole steps on one device and on two?

    python -m benchmarks.partA_devices            # on two GPUs where there are two, else on two CPU processes
    python -m benchmarks.partA_devices --tiny --out FOLDER    # does it run? its numbers say nothing

sums: microseconds of a sum of [T, D]. orders (CPU): microseconds until another process has read a step's
numbers, by a pipe and by gloo's broadcast, and has answered with a sum of one number; that sum alone stands
beside. steps: milliseconds of a step in which all sequences decode, and of a prompt, sides taking turns in
one run. held: what each rank has of weights, of keys and values, and (CPU) of the machine's memory.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from benchmarks.record import RESULTS, ROOT, record, show
from engine import LLM, SamplingParams
from engine.models.config import ModelConfig, architecture
from engine.models.known_shapes import SHAPES
from engine.parallel.executor import LeadingExecutor
from engine.parallel.group import Group
from engine.parallel.orders import STEP, STOP, read_orders, write_order
from engine.parallel.shards import divide
from engine.telemetry.ranks import resident_bytes

TOKENS = (1, 64, 512)
ROUNDS = 5
# Where Qwen3-8B's config.json differs from 4B's.
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    on_gpus = torch.cuda.device_count() >= 2
    torch.set_num_threads(1)
    repeats = 20 if options.tiny else 1000
    tables = {"sums": sums(on_gpus, repeats)}
    if not on_gpus:
        tables["orders"] = orders(repeats)
    with tempfile.TemporaryDirectory() as folder:
        tables["steps"], tables["held"] = steps(on_gpus, options.tiny, Path(folder))
    figures = {
        "sum_us": {f"{row[0]}x{row[1]}": row[2] for row in tables["sums"]["rows"]},
        "speed": {f"{row[0]}, {row[1]}": row[-1] for row in tables["steps"]["rows"] if row[2] == "two ranks"},
    }
    workload = {"tokens": TOKENS, "rounds": ROUNDS, "repeats": repeats, "tiny": options.tiny}
    name = "partA_devices_gpu" if on_gpus else "partA_devices"
    path = record(name, __doc__.splitlines()[0], workload, figures, tables, folder=options.out)
    show(path, tables)


def sums(on_gpus: bool, repeats: int) -> dict:
    """Of each size, the median and the quartiles over rounds."""
    rows = []
    for width in (256, 768) if not on_gpus else (1024, 2560, 4096):
        for tokens in (*TOKENS, 8192) if on_gpus else TOKENS:
            rounds = sorted(
                1e6 * sum_seconds(tokens, width, repeats, "cuda" if on_gpus else "cpu") for _ in range(ROUNDS)
            )
            rows.append([tokens, width, statistics.median(rounds), rounds[1], rounds[-2]])
    return {"columns": ["T", "D", "µs a sum", "lower quartile", "upper quartile"], "rows": rows}


def sum_seconds(tokens: int, width: int, rounds: int, device: str = "cpu") -> float:
    """The mean time of a sum of [tokens, width] over two ranks, one right behind the other."""
    with two_ranks(device, tokens, width, rounds) as (group, _):
        return _summed(group, tokens, width, rounds)


def orders(repeats: int) -> dict:
    """An order of so many bytes and an answer, by each means in turn."""
    rows = []
    for num_bytes in (192, 4096, 65536):
        found: dict[str, list[float]] = {"pipe": [], "broadcast": [], "answer": []}
        with two_ranks("cpu", num_bytes, 0, ROUNDS * repeats) as (group, pipe):
            payload, one = bytes(num_bytes), torch.zeros(1)
            numbers = torch.zeros(num_bytes // 8, dtype=torch.int64)
            for _ in range(ROUNDS):
                for means, seconds in found.items():
                    start = time.perf_counter()
                    for _ in range(repeats):
                        if means == "pipe":
                            write_order(pipe, STEP, payload)
                        elif means == "broadcast":
                            group.broadcast(numbers)
                        group.sum(one)
                    seconds.append(1e6 * (time.perf_counter() - start) / repeats)
            write_order(pipe, STOP)
        medians = [statistics.median(seconds) for seconds in found.values()]
        rows.append([num_bytes, *medians, *(us - medians[-1] for us in medians[:-1])])
    columns = ["bytes", "pipe and answer, µs", "broadcast and answer, µs", "answer alone, µs"]
    return {"columns": [*columns, "the pipe's share", "the broadcast's share"], "rows": rows}


@contextmanager
def two_ranks(device: str, *numbers: int) -> Iterator[tuple[Group, IO[bytes]]]:
    """Another process as rank 1, which does what `follow` does with `numbers`: (the group, a pipe to it)."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [device, f"{folder}/ranks", *map(str, numbers)]
        process = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.partA_devices import follow; follow()", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
        )
        assert process.stdin is not None
        group = _group(0, device, f"{folder}/ranks")
        try:
            yield group, process.stdin
        finally:
            group.close()
            process.communicate()


def follow() -> None:
    """Rank 1: the same sums as rank 0; with a width of 0, the same orders and answers."""
    device, store, *numbers = sys.argv[1:]
    torch.set_num_threads(1)
    group = _group(1, device, store)
    tokens, width, rounds = map(int, numbers)
    if width:
        _summed(group, tokens, width, rounds)
        return
    payloads, one = read_orders(sys.stdin.buffer), torch.zeros(1)
    numbers_read, repeats = torch.zeros(tokens // 8, dtype=torch.int64), rounds // ROUNDS
    for _ in range(ROUNDS):
        for means in ("pipe", "broadcast", "answer"):
            for _ in range(repeats):
                if means == "pipe":
                    _, payload = next(payloads)
                    np.frombuffer(payload, dtype=np.int64)
                elif means == "broadcast":
                    group.broadcast(numbers_read)
                group.sum(one)


def _group(rank: int, device: str, store: str) -> Group:
    place, backend = (f"cuda:{rank}", "nccl") if device == "cuda" else ("cpu", "gloo")
    return Group(rank, 2, store, torch.device(place), backend)


def _summed(group: Group, tokens: int, width: int, rounds: int) -> float:
    dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
    x = torch.zeros(tokens, width, dtype=dtype, device=group.device)
    seconds = 0.0
    for count in (max(1, rounds // 10), rounds):  # the first warms up
        start = time.perf_counter()
        for _ in range(count):
            group.sum(x)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        seconds = (time.perf_counter() - start) / count
    return seconds


def steps(on_gpus: bool, tiny: bool, folder: Path) -> tuple[dict, dict]:
    """Tables of whole steps, and of what a rank holds."""
    common: dict[str, Any]
    sides: dict[str, dict[str, Any]]
    if on_gpus:
        models = {name: name for name in ("qwen3-0.6b", "qwen3-4b")} | {"qwen3-8b": str(qwen3_8b(folder))}
        common = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 8448}
        common |= {"tokenizer": "storyteller", "enforce_eager": True, "enable_prefix_caching": False}
        common |= {"kv_cache_memory_bytes": 2**32}
        work = [(1, 64), (64, 64), (1, 8192)]
        sides = {"one GPU": {}, "one GPU, graphs": {"enforce_eager": False}}
        sides |= {"two ranks": {"tensor_parallel_size": 2}}
    else:
        models = {"storyteller": "storyteller", "GPT-2 124M's shape": "gpt2"}
        common = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "enable_prefix_caching": False}
        common |= {"kv_cache_memory_bytes": 2**28}
        work = [(1, 32), (8, 32), (1, 400)]
        sides = {"one process, 1 thread": {}, "one process, 2 threads": {}}
        sides |= {"two ranks": {"tensor_parallel_size": 2}}
    if tiny:
        models = dict(list(models.items())[:1])
    rows, held = [], []
    for name, model in models.items():
        dummy = {} if model == "storyteller" else {"load_format": "dummy"}
        engines = {side: LLM(model, **common | dummy | extra) for side, extra in sides.items()}
        for side, llm in engines.items():
            if side != "one process, 2 threads":
                held.append([name, side, *what_is_held(llm)])
        for batch, prompt in work:
            found: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(1 + (1 if tiny else ROUNDS)):
                for side, llm in engines.items():
                    torch.set_num_threads(2 if side.endswith("2 threads") else 1)
                    found[side].append(step_ms(llm, batch, prompt, on_gpus))
            kind = f"prompt of {prompt}" if prompt > 64 else f"decode, {batch} at once"
            base = statistics.median(found[next(iter(sides))][1:])  # the first of each warms up
            for side, values in found.items():
                rounds = sorted(values[1:])
                middle, quarter = statistics.median(rounds), len(rounds) // 4
                ends = rounds[quarter], rounds[-1 - quarter]
                rows.append([name, kind, side, middle, *ends, base / middle])
        for llm in engines.values():
            llm.shutdown()
    columns = ["model", "step", "side", "ms a step", "lower quartile", "upper quartile", "times as fast"]
    columns_held = ["model", "side", "weights, MB", "KB of keys and values a token", "rank 1's process, MB"]
    return {"columns": columns, "rows": rows}, {"columns": columns_held, "rows": held}


def step_ms(llm: LLM, batch: int, prompt: int, on_gpus: bool) -> float:
    """Milliseconds: of a decode step in which all take part, or of a prompt's only step with its token."""
    output = 1 if prompt > 64 else 32
    ids = [
        {"prompt_token_ids": [(17 * i + 31 * row) % 4000 + 5 for i in range(prompt)]} for row in range(batch)
    ]

    def seconds(max_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(ids, params, use_tqdm=False)
        return time.perf_counter() - start

    if output == 1:
        return 1e3 * seconds(1)
    short, long = seconds(2), seconds(2 + output)
    return 1e3 * (long - short) / output


def what_is_held(llm: LLM) -> tuple[float, float, float | None]:
    """MB of one rank's weights, by their shapes; KB of its keys and values for a token; MB of rank 1's
    process. Rank 0 has the output layer, and so is the one that is counted.
    """
    size, num_bytes = llm.args.tensor_parallel_size, 2 if llm.args.dtype == "bfloat16" else 4
    config = divide(ModelConfig.from_pretrained(llm.args.model), size)
    parameters = architecture(config.model_type).Model(config, device="meta").parameters()
    weights = num_bytes * sum(parameter.numel() for parameter in parameters)
    process = None
    if size > 1:
        executor = llm.engine.executor
        assert isinstance(executor, LeadingExecutor)  # of several ranks
        process = resident_bytes(executor.workers.workers[0].process.pid)
    return weights / 1e6, config.kv_bytes_per_token(num_bytes) / 1e3, process and process / 1e6


def qwen3_8b(folder: Path) -> Path:
    """A folder with the shape's config.json."""
    raw = json.loads((SHAPES / "qwen3-4b" / "config.json").read_text()) | QWEN3_8B
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


if __name__ == "__main__":
    main()
