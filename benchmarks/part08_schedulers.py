"""How much does continuous batching save over FIFO and static batches of the same width?

    python -m benchmarks.part08_schedulers [--repeats 5]

One engine, one cache of 8 slots, 128 requests on `storyteller`, greedy, end of sequence ignored; only the
scheduler changes, and each has its best of 1 and 2 torch threads, its weights packed for its rows. Static
batches are run twice: as Part 7 does, where a request that has ended leaves its row, and as Hugging Face's
`generate` does, where all rows go on to the longest (only the tokens asked for count).
Then twelve short requests beside two long ones: how long do the short ones wait?
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import record, whole_numbers
from benchmarks.workloads import Job, jobs, rounds, run_engine
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


class Side:
    """A scheduler with a number of threads and a model packed for both."""

    def __init__(self, name: str, threads: int, tokenizer: Tokenizer) -> None:
        torch.set_num_threads(threads)
        self.name, self.threads, self.tokenizer = name, threads, tokenizer
        self.label = f"{name}, {threads} threads"
        self.rows, self.make = SCHEDULERS[name]
        self.model = load_model("storyteller", transform=partial(pack_linears, rows=self.rows))

    def run(self, work: list[Job]) -> tuple[float, dict[str, float], list]:
        """Seconds, finishing time of each request, and the steps' records."""
        torch.set_num_threads(self.threads)
        work = to_longest(work) if self.name == TO_LONGEST else work
        seconds, finished, records = run_engine(self.model, self.tokenizer, work, WIDTH, self.make)
        return seconds, finished, records.steps


def main() -> None:
    options = whole_numbers(__doc__.splitlines()[0], repeats=5)
    tokenizer = Tokenizer.from_pretrained("storyteller")
    sides = [Side(name, threads, tokenizer) for name in SCHEDULERS for threads in (1, 2)]
    work = jobs(128, sides[0].model.config.vocab_size)
    tokens = sum(output for _, output in work)

    races = {side.label: lambda side=side: side.run(work)[0] for side in sides}
    by_round = rounds(races, options.repeats)
    all_seconds = {label: statistics.median(values) for label, values in by_round.items()}
    best: dict[str, Side] = {}
    for name in SCHEDULERS:
        best[name] = min((s for s in sides if s.name == name), key=lambda s: all_seconds[s.label])
    seconds = {name: all_seconds[side.label] for name, side in best.items()}
    of_static = [
        ours / theirs
        for ours, theirs in zip(by_round[best[CONTINUOUS].label], by_round[best[STATIC].label], strict=True)
    ]
    steps = {name: len(side.run(work)[2]) for name, side in best.items()}

    # Two long requests arrive first, twelve short ones behind them; every place is taken by then.
    mixed = [([7] * 64, 180), ([9] * 64, 180)] + [([11 + i] * 16, 16) for i in range(12)]
    waits = {name: [] for name in SCHEDULERS if name != TO_LONGEST}
    for _ in range(options.repeats):
        for name, values in waits.items():
            finished = best[name].run(mixed)[1]
            values.append(statistics.mean(finished[str(i)] for i in range(2, len(mixed))))
    wait = {name: statistics.median(values) for name, values in waits.items()}

    # What the engine itself costs, beside the model: 32 sequences at once.
    side, shares = best[CONTINUOUS], []
    torch.set_num_threads(side.threads)
    for _ in range(options.repeats):
        make = partial(ContinuousScheduler, max_num_seqs=32, max_num_batched_tokens=BUDGET)
        some = jobs(64, side.model.config.vocab_size)
        records = run_engine(side.model, tokenizer, some, 32, make)[2]
        full = [step for step in records.steps if len(step.request_ids) == 32]
        shares.append(1 - sum(s.execute_seconds for s in full) / sum(s.end - s.start for s in full))
    share = statistics.median(shares)

    rows = [
        [name, best[name].threads, seconds[name], seconds[name] / seconds[FIFO], tokens / seconds[name],
         steps[name], wait[name] * 1e3 if name in wait else None]
        for name in SCHEDULERS
    ]  # fmt: skip
    record(
        "part08_schedulers",
        "How much does continuous batching save over FIFO and static batches of the same width?",
        {"requests": len(work), "prompt_tokens": "8 to 128", "output_tokens": "16 to 128", "slots": WIDTH,
         "max_num_batched_tokens": BUDGET, "repeats": options.repeats, "torch_threads": "best of 1 and 2",
         "mixed": "2 of 180 tokens, then 12 of 16"},
        {"continuous_over_fifo": seconds[CONTINUOUS] / seconds[FIFO],
         "continuous_over_static": seconds[CONTINUOUS] / seconds[STATIC],
         "continuous_over_static_least": min(of_static),
         "continuous_over_static_most": max(of_static),
         "continuous_over_to_longest": seconds[CONTINUOUS] / seconds[TO_LONGEST],
         "short_wait_over_static": wait[CONTINUOUS] / wait[STATIC],
         "bookkeeping_share_at_32": share, "seconds": all_seconds, "short_wait_seconds": wait},
        {"race": {"columns": ["scheduler", "threads", "seconds", "of FIFO's", "tokens/s", "steps",
                              "short requests' mean latency, ms"],
                  "rows": rows}},
    )  # fmt: skip
    for name, value in all_seconds.items():
        print(f"{name:48} {value:6.2f} s")
    for row in rows:
        print("{:32} {} threads {:6.2f} s  {:4.2f} of FIFO  {:6.0f} tokens/s  {:5} steps".format(*row))
    for name, value in wait.items():
        print(f"{name:32} short requests wait {value * 1e3:.0f} ms")
    print(f"continuous / static: {seconds[CONTINUOUS] / seconds[STATIC]:.2f} with rows that leave ", end="")
    print(f"({min(of_static):.2f} to {max(of_static):.2f} by round), ", end="")
    print(f"{seconds[CONTINUOUS] / seconds[TO_LONGEST]:.2f} with all rows to the longest")
    print(f"bookkeeping {share:.1%} of a step at 32 sequences")


if __name__ == "__main__":
    main()
