"""How much faster are five requests together than in a row, and what does a step cost as the crowd grows?

    python -m benchmarks.part07_batching       # two minutes on a quiet machine

Whole generation on `storyteller`, greedy, end of sequence ignored; series and batch differ in the scheduler
alone, and each has its weights packed for its own number of rows. Beside it:

- a decode step against the number of sequences in it, for `storyteller` and for random weights in the shape
  of GPT-2 124M; what of it is linear layers, attention and the rest, timed inside one and the same step; how
  long a bare read of the weights' bytes is. `python -m benchmarks.part07_line` then fits a line to the steps;
- prompts read one by one, padded and packed, and the linear layers' time per row against the number of rows;
- what padding and static batches waste, which is counted and the same on every machine.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from benchmarks.record import middle, quartiles, record, show, spread, whole_numbers
from benchmarks.workloads import gpt2_like, jobs, rounds, run_engine
from engine.attention.interface import Attend
from engine.cache.slots import SlotCache, SlotMemory
from engine.layers.packed_linear import pack_linears
from engine.layers.prefill import run_prefill
from engine.layers.replace import linear_names
from engine.models.loader import load_model
from engine.requests.batch import Batch
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.static import StaticScheduler
from engine.text.tokenizer import Tokenizer

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
CROWDS = (1, 2, 5, 8, 16, 32)  # sequences in a decode step
ROWS = (1, 5, 32, 66, 330)  # of the linear layers: decode steps, a prompt of mean length, five such prompts
CONTEXT, STEPS = 64, 16  # of each sequence in a decode step: tokens in the cache, then new ones
SHAPES = {  # layers, hidden size, heads, vocabulary
    "storyteller": ("storyteller", None),
    "gpt2_shape": ("GPT-2 124M's shape", (12, 768, 12, 50257)),
}


def static(width: int) -> Callable[[SlotCache], StaticScheduler]:
    return partial(StaticScheduler, max_num_seqs=width)


@cache
def packed_for(rows: int) -> nn.Module:
    return load_model(MODEL, transform=partial(pack_linears, rows=rows))


def in_batches(items: Sequence, width: int) -> list[Sequence]:
    """In order of arrival, as static batches are filled."""
    return [items[i : i + width] for i in range(0, len(items), width)]


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


def warm(crowd: int) -> Callable[[SlotCache], StaticScheduler]:
    """Static batches over a cache that has all of a prompt but its last token: all steps are decode steps."""

    def make(cache: SlotCache) -> StaticScheduler:
        admit = cache.admit
        cache.admit = lambda seq: admit(seq) or len(seq.token_ids) - 1
        return StaticScheduler(cache, crowd)

    return make


class TimedSlots(SlotMemory):
    """Notes the seconds of each step spent on attention: its plan, and a call per layer."""

    def __init__(self, *size: object, seconds: list[float]) -> None:
        super().__init__(*size)
        self.seconds = seconds

    def attention(self, batch: Batch) -> Attend:
        start = time.perf_counter()
        attend = super().attention(batch)
        self.seconds.append(time.perf_counter() - start)

        def timed(*arguments: object) -> Tensor:
            start = time.perf_counter()
            out = attend(*arguments)
            self.seconds[-1] += time.perf_counter() - start
            return out

        return timed


def decode_step_ms(model: nn.Module, names: list[str], tokenizer: Tokenizer, crowd: int) -> dict[str, float]:
    """One decode step of `crowd` sequences: `step` is the quickest of STEPS without stopwatches. The parts
    are those of the quickest step with stopwatches: of one pass, so `rest` is what the others leave of it.
    """
    work = [([7 + i] * CONTEXT, STEPS) for i in range(crowd)]
    steps = run_engine(model, tokenizer, work, crowd, warm(crowd))[2].steps
    attention: list[float] = []
    with Stopwatch(model, names) as linear:
        slots = partial(TimedSlots, seconds=attention)
        watched = run_engine(model, tokenizer, work, crowd, warm(crowd), slots)[2].steps
    per_step = map(sum, in_batches(linear.seconds, len(names)))
    whole = [step.end - step.start for step in watched]
    total, in_linear, in_attention = min(zip(whole, per_step, attention, strict=True))
    return {
        "step": min(step.end - step.start for step in steps) * 1e3,
        "linear": in_linear * 1e3,
        "attention": in_attention * 1e3,
        "rest": (total - in_linear - in_attention) * 1e3,
    }


@torch.inference_mode()
def bare_read_ms(num_bytes: int) -> float:
    """The quickest way through so many bytes: a sum of integers, one pass after the other."""
    numbers, seconds = torch.ones(num_bytes // 8, dtype=torch.int64), []
    for _ in range(9):
        start = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - start)
    return min(seconds) * 1e3


def through_half(model: nn.Module) -> nn.Module:
    """The same weights as if they had come from fp16, as storyteller's do: all models are packed alike."""
    for parameter in model.parameters():
        parameter.data = parameter.half().float()
    return model


def split(name: str, repeats: int) -> dict:
    """A model's decode steps at each of CROWDS, in milliseconds, and what its weights weigh."""
    shape, folder = SHAPES[name][1], tempfile.TemporaryDirectory()
    where = gpt2_like(Path(folder.name), *shape) if shape else MODEL
    tokenizer = Tokenizer.from_pretrained(where)
    load = partial(load_model, where, load_format="dummy" if shape else "auto")
    names = linear_names(plain := load())
    weights = sum(plain.get_submodule(layer).weight.numel() for layer in names)
    found: dict[str, list] = {part: [] for part in ("step", "linear", "attention", "rest", "step_rounds")}
    models = {
        crowd: load(transform=lambda model, rows=crowd: pack_linears(through_half(model), rows))
        for crowd in CROWDS
    }
    taken: dict[int, list[dict[str, float]]] = {crowd: [] for crowd in CROWDS}
    for _ in range(repeats):
        for crowd, model in models.items():
            taken[crowd].append(decode_step_ms(model, names, tokenizer, crowd))
    for runs in taken.values():
        steps = [run["step"] for run in runs]
        found["step"].append(statistics.median(steps))
        found["step_rounds"].append({**quartiles(steps), "spread": spread(steps)})
        runs.sort(key=lambda run: run["linear"] + run["attention"] + run["rest"])
        middle_run = runs[len(runs) // 2]  # of one pass, so that the parts are of one whole
        for part in ("linear", "attention", "rest"):
            found[part].append(middle_run[part])
    folder.cleanup()
    step_5 = found["step"][CROWDS.index(WIDTH)]
    return {
        **{f"{part}_ms": found[part] for part in ("step", "linear", "attention", "rest")},
        "step_rounds_ms": found["step_rounds"],
        "weights": weights,
        "megabytes": weights * 2 / 1e6,
        "bare_read_ms": bare_read_ms(weights * 2),
        "step_5_ms": step_5,
        "saved_ms": WIDTH * found["step"][0] - step_5,  # by one step of five, against five of one
        "gain_at_5": WIDTH * found["step"][0] / step_5,
        "gain_at_32": CROWDS[-1] * found["step"][0] / found["step"][-1],
    }


@torch.inference_mode()
def linear_us_per_row(repeats: int) -> dict[int, list[float]]:
    """All of storyteller's linear layers on so many rows: microseconds for each row, the quickest of five
    passes in each round.
    """
    plain = load_model(MODEL)
    names = linear_names(plain)

    def quickest(rows: int) -> float:
        layers = [packed_for(rows).get_submodule(name) for name in names]
        inputs = [torch.ones(rows, plain.get_submodule(name).in_features) for name in names]
        passes = []
        for _ in range(5):
            start = time.perf_counter()
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)
            passes.append(time.perf_counter() - start)
        return min(passes) / rows * 1e6

    return rounds({rows: partial(quickest, rows) for rows in ROWS}, repeats)


def prefill_race(repeats: int) -> dict[str, dict]:
    """Thirty prompts of 8 to 128 tokens: passes, tokens and ms by round, for three ways to read them."""
    model = packed_for(64)  # prompts are many rows, whichever way they come
    prompts = [prompt for prompt, _ in jobs(30, model.config.vocab_size)]
    fives = in_batches(prompts, WIDTH)
    padded = [[[*p, *[0] * (max(map(len, five)) - len(p))] for p in five] for five in fives]
    ways: dict[str, list[list[list[int]]]] = {
        "one": in_batches(prompts, 1), "padded": padded, "packed": fives,
    }  # fmt: skip

    def read(batches: list) -> float:
        start = time.perf_counter()
        for batch in batches:
            run_prefill(model, batch)
        return (time.perf_counter() - start) * 1e3

    taken = rounds({name: partial(read, batches) for name, batches in ways.items()}, repeats)
    return {
        name: {
            "passes": len(batches),
            "tokens": sum(len(p) for batch in batches for p in batch),
            "ms": statistics.median(taken[name]),
            "rounds_ms": taken[name],
        }
        for name, batches in ways.items()
    }


def waste() -> dict[str, dict[str, float]]:
    """Of 3,000 seeded requests: the share of prompt tokens that is padding, and of places that are empty."""
    found, draw = {}, Random(0)  # the notebook draws the same
    prompts = [draw.randint(8, 128) for _ in range(3000)]
    outputs = [draw.randint(16, 128) for _ in range(3000)]
    for width in (1, 2, 5, 8, 32):
        found[str(width)] = {
            "padding": share_wasted(in_batches(prompts, width)),
            "empty_places": share_wasted(in_batches(outputs, width)),
        }
    return found


def share_wasted(batches: Sequence[Sequence[int]]) -> float:
    """All last as long as their batch's longest: how much of that is of no use."""
    return 1 - sum(map(sum, batches)) / sum(len(batch) * max(batch) for batch in batches)


def main() -> None:
    options = whole_numbers(__doc__.splitlines()[0], repeats=7, threads=1)
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
        in_rounds = [seconds for seconds, _, _ in runs[name]]
        found["rounds_seconds"] = quartiles(in_rounds)
        found["step_ms"] = found["seconds"] / found["steps"] * 1e3
        found["tokens_per_second"] = WIDTH * TOKENS / found["seconds"]
        rows.append([name, found["steps"], found["step_ms"], middle(in_rounds), found["tokens_per_second"]])
    figures["times_series"] = figures["series"]["seconds"] / figures["batch"]["seconds"]
    figures["step_costs"] = figures["batch"]["step_ms"] / figures["series"]["step_ms"]
    linear = linear_us_per_row(options.repeats)

    figures |= {
        "crowds": list(CROWDS),
        "split": {name: split(name, min(5, options.repeats)) for name in SHAPES},
        "linear_rows": list(ROWS),
        "linear_us_per_row": [statistics.median(us) for us in linear.values()],
        "linear_us_per_row_rounds": [quartiles(us) for us in linear.values()],
        "prefill": prefill_race(options.repeats),
        "waste": waste(),
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
            "columns": [
                "sequences in a step",
                *(column for title, _ in SHAPES.values() for column in (f"{title}, ms", "in rounds")),
            ],
            "rows": [
                [
                    crowd,
                    *(
                        cell
                        for split_of in figures["split"].values()
                        for cell in (split_of["step_ms"][i], split_of["step_rounds_ms"][i]["spread"])
                    ),
                ]
                for i, crowd in enumerate(CROWDS)
            ],
        },
        "rows": {
            "columns": ["rows", "linear layers, µs per row"],
            "rows": [[count, middle(us)] for count, us in linear.items()],
        },
        "prefill": {
            "columns": ["30 prompts read", "forward passes", "tokens computed", "ms"],
            "rows": [
                [WAYS[way], found["passes"], found["tokens"], middle(found["rounds_ms"])]
                for way, found in read.items()
            ],
        },
        "waste": {
            "columns": ["requests per batch", "of the prompt tokens, padding", "of the places, empty"],
            "rows": [
                [width, f"{found['padding']:.0%}", f"{found['empty_places']:.0%}"]
                for width, found in figures["waste"].items()
            ],
        },
    }
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
    show(record("part07_batching", question, workload, figures, tables), tables)


if __name__ == "__main__":
    main()
