"""How much does continuous batching save over FIFO and static batches of the same width?

    python -m benchmarks.part08_schedulers [--repeats 5]      # two or three minutes

One engine, one cache of 8 slots, 128 requests on `storyteller`, greedy, end of sequence ignored; only the
scheduler changes, and each has its weights packed for its rows. One torch thread, as in Part 7, whose numbers
predict this race. The schedulers take turns. Static batches are run twice: as Part 7 does, where a request
that has ended leaves its row, and as Hugging Face's `generate` does, where all rows go on to the longest
(only the tokens asked for count).
In the same rounds, twelve short requests beside two long ones: how long do the short ones wait?
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import middle, quartiles, record, show, whole_numbers
from benchmarks.workloads import Job, jobs, ratios, rounds, run_engine
from engine.cache.slots import SlotCache
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.static import StaticScheduler
from engine.text.tokenizer import Tokenizer

WIDTH, BUDGET = 8, 512
FIFO, STATIC, CONTINUOUS = "FIFO (Part 6)", "static batches of 8 (Part 7)", "continuous, 8 at once (Part 8)"
TO_LONGEST = "static, all rows to the longest"
SCHEDULERS: dict[str, tuple[int, Callable[[SlotCache], Scheduler]]] = {  # rows of a step, scheduler
    FIFO: (1, FIFOScheduler),
    TO_LONGEST: (WIDTH, lambda cache: StaticScheduler(cache, WIDTH)),
    STATIC: (WIDTH, lambda cache: StaticScheduler(cache, WIDTH)),
    CONTINUOUS: (WIDTH, lambda cache: ContinuousScheduler(cache, WIDTH, BUDGET)),
}


def to_longest(work: list[Job]) -> list[Job]:
    """Each batch of 8, in order of arrival, with everybody's output as long as its longest."""
    batches = [work[i : i + WIDTH] for i in range(0, len(work), WIDTH)]
    return [(prompt, max(n for _, n in batch)) for batch in batches for prompt, _ in batch]


class Race:
    """Runs of each scheduler, with a model packed for its rows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.models = {
            name: load_model("storyteller", transform=partial(pack_linears, rows=rows))
            for name, (rows, _) in SCHEDULERS.items()
        }

    def run(self, name: str, work: list[Job]) -> tuple[float, dict[str, float], list]:
        """Seconds, finishing time of each request, and the steps' records."""
        work = to_longest(work) if name == TO_LONGEST else work
        make = SCHEDULERS[name][1]
        seconds, finished, records = run_engine(self.models[name], self.tokenizer, work, WIDTH, make)
        return seconds, finished, records.steps


def main() -> None:
    options = whole_numbers(__doc__.splitlines()[0], repeats=5, requests=128)
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_pretrained("storyteller")
    race, work = Race(tokenizer), jobs(options.requests, tokenizer.vocab_size)
    tokens = sum(output for _, output in work)
    for name in SCHEDULERS:  # to warm up
        race.run(name, work[: len(work) // 4])

    # Two long requests arrive first, twelve short ones behind them; every place is taken by then.
    mixed = [([7] * 64, 180), ([9] * 64, 180)] + [([11 + i] * 16, 16) for i in range(12)]
    steps: dict[str, int] = {}
    waits: dict[str, list[float]] = {name: [] for name in SCHEDULERS if name != TO_LONGEST}

    def side(name: str) -> float:
        seconds, _, records = race.run(name, work)
        steps[name] = len(records)
        if name in waits:
            finished = race.run(name, mixed)[1]
            waits[name].append(statistics.mean(finished[str(i)] for i in range(2, len(mixed))) * 1e3)
        return seconds

    seconds = rounds({name: partial(side, name) for name in SCHEDULERS}, options.repeats)
    of_fifo, of_continuous = ratios(seconds, FIFO), ratios(seconds, CONTINUOUS)
    of_static = ratios(seconds, STATIC)[CONTINUOUS]
    kept = {name: quartiles(values) for name, values in seconds.items()}
    wait = {name: quartiles(values) for name, values in waits.items()}
    rows = [
        [name, middle(seconds[name]), middle(of_fifo[name]), tokens / kept[name]["median"], steps[name],
         middle(waits[name]) if name in waits else ""]
        for name in SCHEDULERS
    ]  # fmt: skip
    columns = [
        "scheduler", "seconds", "of FIFO's", "tokens/s", "steps", "short requests' mean latency, ms",
    ]  # fmt: skip
    tables = {"race": {"columns": columns, "rows": rows}}
    workload = {
        "requests": len(work), "prompt_tokens": "8 to 128", "output_tokens": "16 to 128", "slots": WIDTH,
        "max_num_batched_tokens": BUDGET, "repeats": options.repeats,
        "mixed": "2 of 180 tokens, then 12 of 16",
    }  # fmt: skip
    figures = {
        "continuous_over_fifo": quartiles(of_fifo[CONTINUOUS])["median"],
        "continuous_over_static": quartiles(of_static)["median"],
        "continuous_over_static_least": min(of_static),
        "continuous_over_static_most": max(of_static),
        "continuous_over_to_longest": 1 / quartiles(of_continuous[TO_LONGEST])["median"],
        "short_wait_over_static": wait[CONTINUOUS]["median"] / wait[STATIC]["median"],
        "seconds": kept,
        "short_wait_ms": wait,
    }
    show(record("part08_schedulers", __doc__.splitlines()[0], workload, figures, tables), tables)


if __name__ == "__main__":
    main()
