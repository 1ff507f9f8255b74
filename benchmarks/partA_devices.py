"""What do several ranks cost and bring: a sum alone, an order alone, whole steps on one device and on two?

    python -m benchmarks.partA_devices            # on two GPUs where there are two, else on two CPU processes
    python -m benchmarks.partA_devices --tiny --out FOLDER    # does it run? its numbers say nothing

sums: microseconds of a sum of [T, D]. orders (CPU): microseconds until another process has read a step's
numbers, by a pipe and by gloo's broadcast, and has answered with a sum of one number; that sum alone stands
beside. steps: milliseconds of a step in which all sequences decode, and of a prompt, sides taking turns in
one run. held: what each rank has of weights, of keys and values, and of the machine's memory. On two GPUs
partA_gpus.py measures, and says what.
"""

import argparse
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

from benchmarks import partA_gpus
from benchmarks.record import RESULTS, ROOT, quartiles, record, show
from engine import LLM
from engine.models.config import ModelConfig, architecture
from engine.parallel.executor import LeadingExecutor
from engine.parallel.group import Group
from engine.parallel.orders import STEP, STOP, read_orders, write_order
from engine.parallel.shards import divide
from engine.telemetry.ranks import resident_bytes

TOKENS = (1, 64, 512)
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if torch.cuda.device_count() >= 2:
        partA_gpus.measure(partA_gpus.__doc__.splitlines()[0], options.tiny, options.out)
        return
    torch.set_num_threads(1)
    repeats = 20 if options.tiny else 1000
    tables = {"sums": sums(repeats), "orders": orders(repeats)}
    tables["steps"], tables["held"] = steps(options.tiny)
    figures = {
        "sum_us": {f"{row[0]}x{row[1]}": row[2] for row in tables["sums"]["rows"]},
        "speed": {f"{row[0]}, {row[1]}": row[-1] for row in tables["steps"]["rows"] if row[2] == "two ranks"},
    }
    workload = {"tokens": TOKENS, "rounds": ROUNDS, "repeats": repeats, "tiny": options.tiny}
    path = record("partA_devices", __doc__.splitlines()[0], workload, figures, tables, folder=options.out)
    show(path, tables)


def sums(repeats: int) -> dict:
    """Of each size, the median and the quartiles over rounds."""
    rows = []
    for width in (256, 768):
        for tokens in TOKENS:
            rounds = [1e6 * sum_seconds(tokens, width, repeats) for _ in range(ROUNDS)]
            rows.append([tokens, width, *quartiles(rounds).values()])
    return {"columns": ["T", "D", "µs a sum", "lower quartile", "upper quartile"], "rows": rows}


def sum_seconds(tokens: int, width: int, rounds: int) -> float:
    """The mean time of a sum of [tokens, width] over two ranks, one right behind the other."""
    with two_ranks(tokens, width, rounds) as (group, _):
        return _summed(group, tokens, width, rounds)


def orders(repeats: int) -> dict:
    """An order of so many bytes and an answer, by each means in turn."""
    rows = []
    for num_bytes in (192, 4096, 65536):
        found: dict[str, list[float]] = {"pipe": [], "broadcast": [], "answer": []}
        with two_ranks(num_bytes, 0, ROUNDS * repeats) as (group, pipe):
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
                        group.all_reduce_sum(one)
                    seconds.append(1e6 * (time.perf_counter() - start) / repeats)
            write_order(pipe, STOP)
        medians = [statistics.median(seconds) for seconds in found.values()]
        rows.append([num_bytes, *medians, *(us - medians[-1] for us in medians[:-1])])
    columns = ["bytes", "pipe and answer, µs", "broadcast and answer, µs", "answer alone, µs"]
    return {"columns": [*columns, "the pipe's share", "the broadcast's share"], "rows": rows}


@contextmanager
def two_ranks(*numbers: int) -> Iterator[tuple[Group, IO[bytes]]]:
    """Another process as rank 1, which does what `follow` does with `numbers`: (the group, a pipe to it)."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"{folder}/ranks", *map(str, numbers)]
        process = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.partA_devices import follow; follow()", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
        )
        assert process.stdin is not None
        group = _group(0, f"{folder}/ranks")
        try:
            yield group, process.stdin
        finally:
            group.close()
            process.communicate()


def follow() -> None:
    """Rank 1: the same sums as rank 0; with a width of 0, the same orders and answers."""
    store, *numbers = sys.argv[1:]
    torch.set_num_threads(1)
    group = _group(1, store)
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
                group.all_reduce_sum(one)


def _group(rank: int, store: str) -> Group:
    return Group(rank, 2, store, torch.device("cpu"), "gloo")


def _summed(group: Group, tokens: int, width: int, rounds: int) -> float:
    x = torch.zeros(tokens, width)
    seconds = 0.0
    for count in (max(1, rounds // 10), rounds):  # the first warms up
        start = time.perf_counter()
        for _ in range(count):
            group.all_reduce_sum(x)
        seconds = (time.perf_counter() - start) / count
    return seconds


def steps(tiny: bool) -> tuple[dict, dict]:
    """Tables of whole steps, and of what a rank holds."""
    models = {"storyteller": "storyteller", "GPT-2 124M's shape": "gpt2"}
    common: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512}
    common |= {"enable_prefix_caching": False, "kv_cache_memory_bytes": 2**28}
    work = [(1, 32), (8, 32), (1, 400)]
    sides: dict[str, dict[str, Any]] = {"one process, 1 thread": {}, "one process, 2 threads": {}}
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
                    found[side].append(partA_gpus.step_ms(llm, batch, prompt))
            kind = f"prompt of {prompt}" if prompt > 64 else f"decode, {batch} at once"
            base = statistics.median(found[next(iter(sides))][1:])  # the first of each warms up
            for side, values in found.items():
                middle, *ends = quartiles(values[1:]).values()
                rows.append([name, kind, side, middle, *ends, base / middle])
        for llm in engines.values():
            llm.shutdown()
    columns = ["model", "step", "side", "ms a step", "lower quartile", "upper quartile", "times as fast"]
    columns_held = ["model", "side", "weights, MB", "KB of keys and values a token", "rank 1's process, MB"]
    return {"columns": columns, "rows": rows}, {"columns": columns_held, "rows": held}


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


if __name__ == "__main__":
    main()
