"""How much faster are five requests together than in a row, and what does a step cost as the crowd grows?

    python -m benchmarks.part07_batching       # under a minute on a quiet machine

Whole generation on `storyteller`, greedy, end of sequence ignored; series and batch differ in the scheduler
alone, and each has its weights packed for its own number of rows. Beside it: the time of a decode step
against the number of sequences in it, prompts read one by one, padded and packed, and what padding and
static batches waste, which is counted and the same on every machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from rich import print
from rich.table import Table
from torch import nn

from benchmarks.record import record
from benchmarks.workloads import Records, interleaved, jobs, run_engine
from engine.cache.slots import SlotCache
from engine.layers.packed_linear import pack_linears
from engine.layers.replace import linear_names
from engine.models.loader import load_model
from engine.prefill import run_prefill
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.static import StaticScheduler
from engine.tokenizer import Tokenizer

MODEL = "storyteller"
PROMPTS = (
    "Once upon a time, there was a little dog named Max. Max had a red ball",
    "One day, a cat",
    "Lily and her mom went to the park. They saw a big tree and",
    "Tom was sad because",
    "The sun was warm. A small bird sat on the",
)
WIDTH, TOKENS = len(PROMPTS), 128
SERIES, BATCH = "five in series (FIFO, Part 6)", "five together (static batch, Part 7)"
WAYS = {"one": "one at a time", "padded": "padded, by fives", "packed": "packed, by fives"}
CROWDS = (1, 2, 3, 5, 8, 12, 16, 24, 32)  # sequences in a decode step
CONTEXT, STEPS = 64, 24  # of each of them: prompt, new tokens


def static(width: int) -> Callable[[SlotCache], StaticScheduler]:
    return partial(StaticScheduler, max_num_seqs=width)


@cache
def packed_for(rows: int) -> nn.Module:
    return load_model(MODEL, transform=partial(pack_linears, rows=rows))


def in_batches(items: Sequence, width: int) -> list[Sequence]:
    """In order of arrival, as static batches are filled."""
    return [items[i : i + width] for i in range(0, len(items), width)]


def step_ms(steps: Records) -> float:
    """The quickest decode step (short ones are easily disturbed); the first step reads the prompts."""
    return min(s.end - s.start for s in steps.steps[1:]) * 1e3


class Stopwatch:
    """While open, times a model's linear layers, where its weights are read."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.layers = [model.get_submodule(name) for name in names]
        self.seconds: list[float] = []  # of every call

    def __enter__(self) -> "Stopwatch":
        self.hooks = [layer.register_forward_pre_hook(self._start) for layer in self.layers]
        self.hooks += [layer.register_forward_hook(self._stop) for layer in self.layers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _start(self, *_: object) -> None:
        self.started = time.perf_counter()

    def _stop(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self.started)

    def step_ms(self) -> float:
        """The quickest decode step's; the first step reads the prompts."""
        return min(map(sum, in_batches(self.seconds, len(self.layers))[1:])) * 1e3


def crowd_steps(tokenizer: Tokenizer, repeats: int) -> tuple[list[float], list[float]]:
    """For each of CROWDS: milliseconds of a decode step, and how many of them are spent in linear layers."""
    names = linear_names(load_model(MODEL))
    whole: dict[int, list[float]] = {crowd: [] for crowd in CROWDS}
    linear: dict[int, list[float]] = {crowd: [] for crowd in CROWDS}
    for _ in range(repeats):
        for crowd in CROWDS:
            work = [([7 + i] * CONTEXT, STEPS) for i in range(crowd)]
            play = partial(run_engine, packed_for(crowd), tokenizer, slots=crowd)
            whole[crowd].append(step_ms(play(work, make_scheduler=static(crowd))[2]))
            with Stopwatch(packed_for(crowd), names) as watch:
                play(work, make_scheduler=static(crowd))
            linear[crowd].append(watch.step_ms())
    return [min(found) for found in whole.values()], [min(found) for found in linear.values()]


def prefill_race(repeats: int) -> dict[str, dict[str, float]]:
    """Thirty prompts of 8 to 128 tokens: passes, tokens and time, for three ways to read them."""
    model = packed_for(64)  # prompts are many rows, whichever way they come
    prompts = [prompt for prompt, _ in jobs(30, model.config.vocab_size)]
    fives = in_batches(prompts, WIDTH)
    padded = [[[*p, *[0] * (max(map(len, five)) - len(p))] for p in five] for five in fives]
    ways = {"one": in_batches(prompts, 1), "padded": padded, "packed": fives}

    def read(batches: list) -> float:
        start = time.perf_counter()
        for batch in batches:
            run_prefill(model, batch)
        return time.perf_counter() - start

    seconds = interleaved({name: partial(read, batches) for name, batches in ways.items()}, repeats)
    return {
        name: {
            "passes": len(batches),
            "tokens": sum(len(p) for batch in batches for p in batch),
            "ms": seconds[name] * 1e3,
        }
        for name, batches in ways.items()
    }


def waste(vocab_size: int) -> dict[str, dict[str, float]]:
    """Of 960 seeded requests: the share of prompt tokens that is padding, and of places that stand empty."""
    found = {}
    work = jobs(960, vocab_size)
    for width in (1, 2, 5, 8, 32):
        batches = in_batches(work, width)
        prompts = [[len(prompt) for prompt, _ in batch] for batch in batches]
        outputs = [[tokens for _, tokens in batch] for batch in batches]
        found[str(width)] = {"padding": share_wasted(prompts), "empty_places": share_wasted(outputs)}
    return found


def share_wasted(batches: list[list[int]]) -> float:
    """All last as long as their batch's longest: how much of that is of no use."""
    return 1 - sum(map(sum, batches)) / sum(len(batch) * max(batch) for batch in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    work = [(tokenizer.encode(prompt), TOKENS) for prompt in PROMPTS]

    sides = {
        SERIES: partial(run_engine, packed_for(1), tokenizer, work, 1, FIFOScheduler),
        BATCH: partial(run_engine, packed_for(WIDTH), tokenizer, work, WIDTH, static(WIDTH)),
    }
    for side in sides.values():
        side()  # warm up
    runs: dict[str, list] = {name: [] for name in sides}
    for _ in range(options.repeats):
        for name, side in sides.items():
            runs[name].append(side())
    rows, figures = [], {}
    for name, key in ((SERIES, "series"), (BATCH, "batch")):
        found = figures[key] = {
            "seconds": statistics.median(seconds for seconds, _, _ in runs[name]),
            "steps": len(runs[name][0][2].steps),
            "mean_wait_seconds": statistics.median(
                statistics.mean(finished.values()) for _, finished, _ in runs[name]
            ),
        }
        found["step_ms"] = found["seconds"] / found["steps"] * 1e3
        found["tokens_per_second"] = WIDTH * TOKENS / found["seconds"]
        rows.append([name, found["steps"], found["step_ms"], found["seconds"], found["tokens_per_second"]])
    figures["times_series"] = figures["series"]["seconds"] / figures["batch"]["seconds"]
    figures["step_costs"] = figures["batch"]["step_ms"] / figures["series"]["step_ms"]

    whole, linear = crowd_steps(tokenizer, max(2, options.repeats // 2))
    five = CROWDS.index(WIDTH)
    figures |= {
        "crowds": list(CROWDS),
        "crowd_step_ms": whole,
        "crowd_linear_ms": linear,
        "linear_costs_at_5": linear[five] / linear[0],
        "rest_costs_at_5": (whole[five] - linear[five]) / (whole[0] - linear[0]),
        "ms_per_token_alone": whole[0],
        "ms_per_token_at_32": whole[-1] / CROWDS[-1],
        "prefill": prefill_race(options.repeats),
        "waste": waste(4096),
    }
    read = figures["prefill"]
    figures["padded_over_one"] = read["padded"]["ms"] / read["one"]["ms"]
    figures["packed_over_one"] = read["packed"]["ms"] / read["one"]["ms"]
    tables = {
        "race": {
            "columns": ["five prompts", "steps", "ms per step", "seconds", "tokens/s"],
            "rows": rows,
        },
        "crowd": {
            "columns": ["sequences in a step", "ms per step", "of that in linear layers", "ms per token"],
            "rows": [[s, w, n, w / s] for s, w, n in zip(CROWDS, whole, linear, strict=True)],
        },
        "prefill": {
            "columns": ["30 prompts read", "forward passes", "tokens computed", "ms"],
            "rows": [[WAYS[way], *found.values()] for way, found in read.items()],
        },
        "waste": {
            "columns": ["requests per batch", "of the prompt tokens, padding", "of the places, empty"],
            "rows": [
                [width, f"{found['padding']:.0%}", f"{found['empty_places']:.0%}"]
                for width, found in figures["waste"].items()
            ],
        },
    }
    for title, table in tables.items():
        shown = Table(*table["columns"], title=title)
        for row in table["rows"]:
            shown.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
        print(shown)
    print(f"together: {figures['times_series']:.2f} times the throughput of five in series")
    question = "How much faster are five requests together than five in a row, and why?"
    workload = {
        "model": MODEL,
        "prompts": WIDTH,
        "prompt_tokens": [len(prompt) for prompt, _ in work],
        "new_tokens": TOKENS,
        "crowd_context": [CONTEXT, CONTEXT + STEPS],
        "prefill_and_waste": "prompts of 8 to 128 tokens, outputs of 16 to 128, seeded",
        "repeats": options.repeats,
    }
    print(record("part07_batching", question, workload, figures, tables))


if __name__ == "__main__":
    main()
