"""What does being watched cost: a step of 32 sequences, watched and unwatched, a scrape, a look at the page?

    python -m benchmarks.part11_cost [--sequences 32] [--rounds 5]

`storyteller`, all sequences decoding, with metrics and without in turns (part11_listening.py).
"""

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from prometheus_client import generate_latest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.part11_listening import (
    MODEL,
    Costs,
    engine_for,
    seconds_inside,
    take_turns,
    workload,
)
from benchmarks.record import middle, quartiles, record, show, whole_numbers
from engine.layers.packed_linear import pack_linears
from engine.machine.collector import rare_collections
from engine.models.loader import load_model
from engine.telemetry.metrics import EngineMetrics
from engine.text.tokenizer import Tokenizer

SCRAPES = 20  # of a round


def milliseconds(work, times: int = SCRAPES) -> float:
    """The median of so many calls."""
    took = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e3


@rare_collections()
def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], sequences=32, rounds=5)
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=args.sequences))
    costs, asked = Costs(), {"scrape": [], "snapshot": []}
    for _ in range(args.rounds):
        engine = engine_for(tokenizer, model, args.sequences)
        metrics = EngineMetrics(engine, MODEL)
        seconds = seconds_inside(metrics)
        costs.add(*take_turns(engine, args.sequences), seconds)
        metrics.history.start -= 200  # the page's three minutes are full
        asked["scrape"].append(milliseconds(partial(generate_latest, metrics.registry)))
        asked["snapshot"].append(milliseconds(metrics.snapshot))
    figures = costs.figures() | {"scrape_bytes": len(generate_latest(metrics.registry))}
    for name, values in asked.items():
        figures[f"{name}_ms"] = statistics.median(values)
        figures["rounds"][f"{name}_ms"] = quartiles(values)
    rows = [
        *costs.rows("a step, nobody listening", "the same, with metrics: more by"),
        ["one scrape of /metrics, when asked", middle(asked["scrape"]), None],
        ["one answer for the dashboard, when asked", middle(asked["snapshot"]), None],
    ]
    tables = {"cost": {"columns": ["what", "ms", "share of a step"], "rows": rows}}
    about = workload(args.sequences, args.rounds)
    show(record("part11_cost", __doc__.splitlines()[0], about, figures, tables), tables)


if __name__ == "__main__":
    main()
