"""How much does continuous batching save over FIFO and static batches of the same width?

    python benchmarks/part08_schedulers.py [--repeats 3]

One engine, one cache of 8 slots, 128 requests on `storyteller`, greedy, end of sequence ignored; only the
scheduler changes. Then twelve short requests beside two long ones: how long do the short ones wait?
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import record
from benchmarks.workloads import interleaved, jobs, run_engine
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.static import StaticScheduler
from engine.tokenizer import Tokenizer

WIDTH, BUDGET = 8, 512
SCHEDULERS = {
    "FIFO, one at a time (Part 6)": FIFOScheduler,
    "static batches of 8 (Part 7)": lambda cache: StaticScheduler(cache, WIDTH),
    "continuous, 8 at once (Part 8)": lambda cache: ContinuousScheduler(cache, WIDTH, BUDGET),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model("storyteller", transform=partial(pack_linears, rows=WIDTH))
    tokenizer = Tokenizer.from_pretrained("storyteller")
    work = jobs(128, model.config.vocab_size)
    tokens = sum(output for _, output in work)
    race = partial(run_engine, model, tokenizer)

    run_all = {name: lambda make=make: race(work, WIDTH, make)[0] for name, make in SCHEDULERS.items()}
    seconds = interleaved(run_all, options.repeats)
    steps = {name: len(race(work, WIDTH, make)[2].steps) for name, make in SCHEDULERS.items()}
    fifo, static, continuous = seconds.values()

    # Two long requests arrive first, twelve short ones behind them; every place is taken by then.
    mixed = [([7] * 64, 180), ([9] * 64, 180)] + [([11 + i] * 16, 16) for i in range(12)]
    waits = {name: [] for name in SCHEDULERS}
    for _ in range(options.repeats):
        for name, make in SCHEDULERS.items():
            finished = race(mixed, WIDTH, make)[1]
            waits[name].append(statistics.mean(finished[str(i)] for i in range(2, len(mixed))))
    wait = {name: statistics.median(values) for name, values in waits.items()}

    # What the engine itself costs, beside the model: 32 sequences at once.
    shares = []
    for _ in range(options.repeats):
        records = race(
            jobs(64, model.config.vocab_size), 32, lambda cache: ContinuousScheduler(cache, 32, BUDGET)
        )[2]
        full = [step for step in records.steps if len(step.request_ids) == 32]
        shares.append(1 - sum(s.execute_seconds for s in full) / sum(s.end - s.start for s in full))
    share = statistics.median(shares)

    rows = [
        [name, seconds[name], seconds[name] / fifo, tokens / seconds[name], steps[name], wait[name] * 1e3]
        for name in SCHEDULERS
    ]
    record(
        "part08_schedulers",
        "How much does continuous batching save over FIFO and static batches of the same width?",
        {"requests": len(work), "prompt_tokens": "8 to 128", "output_tokens": "16 to 128", "slots": WIDTH,
         "max_num_batched_tokens": BUDGET, "repeats": options.repeats,
         "mixed": "2 of 180 tokens, then 12 of 16"},
        {"continuous_over_fifo": continuous / fifo, "continuous_over_static": continuous / static,
         "short_wait_over_static": wait[list(SCHEDULERS)[2]] / wait[list(SCHEDULERS)[1]],
         "bookkeeping_share_at_32": share, "seconds": seconds, "short_wait_seconds": wait},
        {"race": {"columns": ["scheduler", "seconds", "of FIFO's", "tokens/s", "steps",
                              "short requests' mean latency, ms"],
                  "rows": rows}},
    )  # fmt: skip
    for row in rows:
        print("{:32} {:6.2f} s  {:4.2f} of FIFO  {:6.0f} tokens/s  {:5} steps  {:6.0f} ms".format(*row))
    print(f"continuous / static {continuous / static:.2f}, bookkeeping {share:.1%} of a step at 32 sequences")


if __name__ == "__main__":
    main()
