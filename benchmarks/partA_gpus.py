"""What do two GPUs bring one model: a sum alone and in a graph, whole steps, and tokens in the cache?

`python -m benchmarks.partA_devices` calls this where there are two GPUs. Each side is measured in a process
of its own, one after the other: two engines of several ranks cannot be in one process, and each has the whole
memory of its GPUs. What is measured is written after each side, so a side that fails costs no other. Weights
are random. The share in sums is reckoned: two sums a block, each as long as one of its size in a graph.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import ROOT, quartiles, record, show
from engine import LLM, SamplingParams
from engine.models.known_shapes import SHAPES
from engine.parallel.executor import LeadingExecutor
from engine.parallel.group import Group

ROUNDS = 5
TOKENS, WIDTHS = (1, 64, 8192), (1024, 2560, 4096)  # of the sums: the models' D
WORK = ((1, 64), (64, 64), (1, 8192))  # sequences, and tokens of each one's prompt
DECODED = 32  # tokens of a measurement of decode steps
IN_A_GRAPH = 50  # sums that one graph holds
# Where Qwen3-8B's config.json differs from 4B's.
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
MODELS = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
EAGER = {"enforce_eager": True}
TWO = {"tensor_parallel_size": 2}
SIDES: dict[str, dict[str, Any]] = {
    "one GPU": {},
    "two GPUs": TWO,
    "one GPU, no graphs": EAGER,
    "two GPUs, no graphs": EAGER | TWO,
}
OPTIONS = {
    "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 8448, "max_num_seqs": 64,
    "max_num_batched_tokens": 8192, "tokenizer": "storyteller", "enable_prefix_caching": False,
}  # fmt: skip
SECONDS = 150  # that a process of one side may take


def measure(question: str, tiny: bool, out: Path) -> None:
    """All sides of all models, sides with graphs first; writes partA_devices_gpu.json into `out`."""
    repeats, models = (2, MODELS[:1]) if tiny else (ROUNDS, MODELS)
    found: dict[str, Any] = {"sums": _in_a_process("sums", repeats), "sides": {}}
    workload = {"rounds": repeats, "tiny": tiny, "tokens": TOKENS, "decoded": DECODED, "options": OPTIONS}
    for sides in (list(SIDES)[:2], list(SIDES)[2:]):
        for model in models:
            for side in sides:
                found["sides"][f"{model}, {side}"] = _in_a_process("side", model, SIDES[side], repeats)
                tables = tables_of(found)
                path = record("partA_devices_gpu", question, workload, found, tables, folder=out)
    show(path, tables)


def tables_of(found: dict[str, Any]) -> dict[str, dict[str, list]]:
    """The tables of what has been measured so far: sums, steps and held."""
    sums, steps, held = [], [], []
    us_of: dict[tuple[int, int, bool], float] = {}  # by T, D, and whether in a graph
    for tokens, width, alone, in_a_graph in found["sums"] or []:
        us_of[tokens, width, False], us_of[tokens, width, True] = map(statistics.median, (alone, in_a_graph))
        sums.append([tokens, width, *quartiles(alone).values(), *quartiles(in_a_graph).values()])
    for name, side in found["sides"].items():
        if side is None:  # it has failed, and said why
            continue
        model, kind = name.split(", ", 1)
        held.append([model, kind, side["cache_tokens"]])
        base = found["sides"].get(f"{model}, one GPU")
        for work, rounds in side["ms"].items():
            batch, prompt = map(int, work.split("x"))
            is_prompt = prompt > 64
            middle, share = statistics.median(rounds), None
            tokens = prompt if is_prompt else batch
            in_a_graph = not is_prompt and "no graphs" not in kind
            us = us_of.get((tokens, side["width"], in_a_graph))
            if kind.startswith("two") and us is not None:
                share = 2 * side["layers"] * us / 1e3 / middle
            speed = statistics.median(base["ms"][work]) / middle if base else None
            step = f"prompt of {prompt}" if is_prompt else f"decode, {batch} at once"
            steps.append([model, step, kind, *quartiles(rounds).values(), speed, share])
    three = ["median", "lower quartile", "upper quartile"]
    columns = ["T", "D", *(f"µs alone, {x}" for x in three), *(f"µs in a graph, {x}" for x in three)]
    columns_of_steps = [
        "model",
        "step",
        "side",
        *(f"ms, {x}" for x in three),
        "times as fast",
        "share in sums",
    ]
    return {
        "sums": {"columns": columns, "rows": sums},
        "steps": {"columns": columns_of_steps, "rows": steps},
        "held": {"columns": ["model", "side", "tokens in the cache"], "rows": held},
    }


def _in_a_process(*call: Any) -> Any:
    """What a function of this file returns in a process of its own; None if that fails, and says why."""
    name, *arguments = call
    code = f"import benchmarks.partA_gpus as m; m.answer(m.{name})"
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(arguments)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"{call}: not done in {SECONDS} s", flush=True)
        return None
    print(f"{call}: exit code {done.returncode}, {time.monotonic() - start:.0f} s", flush=True)
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])


def answer(function: Callable[..., Any]) -> None:
    """Print what `function` returns for this process's arguments, as the last line."""
    print(f"\n{json.dumps(function(*json.loads(sys.argv[1])))}", flush=True)


def side(model: str, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One side of one model: milliseconds of each round by kind of step, and tokens in the cache."""
    with tempfile.TemporaryDirectory() as folder:
        if model == "qwen3-8b":
            raw = json.loads((SHAPES / "qwen3-4b" / "config.json").read_text()) | QWEN3_8B
            Path(folder, "config.json").write_text(json.dumps(raw))
        name = folder if model == "qwen3-8b" else model
        llm = LLM(name, **OPTIONS | options)
        step_ms(llm, 1, 1)  # the other rank has read the folder, too
    executor = llm.engine.executor
    runner: Any = executor.runner if isinstance(executor, LeadingExecutor) else executor
    cache_tokens = runner.memory.num_blocks * runner.memory.block_size
    ms = {}
    for batch, prompt in WORK:
        step_ms(llm, batch, prompt)  # warms up
        ms[f"{batch}x{prompt}"] = [step_ms(llm, batch, prompt) for _ in range(rounds)]
    print(f"{model} {options}: {ms}", file=sys.stderr, flush=True)
    layers, width = llm.config.num_layers, llm.config.hidden_size
    found = {"cache_tokens": cache_tokens, "layers": layers, "width": width, "ms": ms}
    llm.shutdown()
    return found


def step_ms(llm: LLM, batch: int, prompt: int) -> float:
    """Milliseconds: of a decode step in which all take part, or of a prompt's only step with its token."""
    ids = [
        {"prompt_token_ids": [(17 * i + 31 * row) % 4000 + 5 for i in range(prompt)]} for row in range(batch)
    ]

    def seconds(max_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(ids, params, use_tqdm=False)
        return time.perf_counter() - start

    if prompt > 64:
        return 1e3 * seconds(1)
    short, long = seconds(2), seconds(2 + DECODED)
    return 1e3 * (long - short) / DECODED


def sums(rounds: int) -> list[list]:
    """Of each size [T, D]: T, D, and the microseconds of a sum in each round, alone and in a graph."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/ranks"
        code = "import sys, benchmarks.partA_gpus as m; m.ranks_sums(1, sys.argv[1], int(sys.argv[2]))"
        other = subprocess.Popen([sys.executable, "-c", code, store, str(rounds)], cwd=ROOT)
        try:
            return ranks_sums(0, store, rounds)
        finally:
            other.wait()


def ranks_sums(rank: int, store: str, rounds: int) -> list[list]:
    """`sums`, on one of the two ranks."""
    torch.cuda.set_device(rank)
    group = Group(rank, 2, store, torch.device(f"cuda:{rank}"), "nccl")
    rows = []
    for width in WIDTHS:
        for tokens in TOKENS:
            x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=group.device)

            def many(x: torch.Tensor = x) -> None:
                for _ in range(IN_A_GRAPH):
                    group.all_reduce_sum(x)

            many()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                many()
            rows.append([tokens, width, _sum_us(many, rounds), _sum_us(graph.replay, rounds)])
            torch.cuda.synchronize()
            graph.reset()  # NCCL does not end before the graphs that hold its sums
    group.close()
    return rows


def _sum_us(run: Callable[[], None], rounds: int, repeats: int = 10) -> list[float]:
    """Microseconds of one of the IN_A_GRAPH sums of `run`, of each round. The first round warms up."""
    found = []
    for _ in range(1 + rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / repeats / IN_A_GRAPH)
    return found[1:]
