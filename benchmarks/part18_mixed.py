"""What do unmerged adapters cost a step, beside a merged one and beside none?

    python -m benchmarks.part18_mixed [--rounds 5] [--device cpu]

Greedy requests with prompts of 16 tokens, 32 tokens each; the median time of a decode step in a round, and of
these the median. The sides take turns in every round. Four slots of rank 16; adapters of rank 8 in all linear
layers but the output layer.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.part18_engines import ADAPTERS, add, engine_with_slots, engine_without
from benchmarks.record import quartiles, record, show, spread
from benchmarks.workloads import ratios
from engine.lora.adapter import read_adapter

CROWDS = (1, 4, 16)  # requests at once
TOKENS = 32


def decode_steps(engine, names, device: str) -> list[float]:
    """Seconds of each step in which everybody has one token."""
    prompts = [[3 + (7 * i + j) % 4000 for j in range(16)] for i in range(len(names))]
    add(engine, prompts, names, TOKENS)
    engine.step()
    seconds = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, figures, spreads = [], {}, {}
    for crowd in CROWDS:
        plain = engine_without(crowd, device=options.device)
        full = engine_without(crowd, full=True, device=options.device)
        merged = engine_without(crowd, ADAPTERS / "poetry", device=options.device)
        engine, manager = engine_with_slots(crowd, device=options.device)
        names = []
        for i in range(4):  # four adapters, by turns the one and the other
            folder = ADAPTERS / ("poetry", "business")[i % 2]
            names.append(f"{folder.name}{i}")
            manager.load(names[i], read_adapter(folder, engine.config))
        sides = {
            "no slots, base": (plain, [None] * crowd),
            "no slots, base, in fp32": (full, [None] * crowd),
            "merged, one adapter": (merged, [None] * crowd),
            "slots, base alone": (engine, [None] * crowd),
            "slots, one adapter": (engine, [names[0]] * crowd),
        }
        if crowd > 1:
            sides["slots, base and two adapters"] = (engine, [([None, *names][i % 3]) for i in range(crowd)])
            sides["slots, four adapters"] = (engine, [names[i % 4] for i in range(crowd)])
        found: dict[str, list[float]] = {side: [] for side in sides}  # ms a step, of each round
        for number in range(options.rounds + 1):
            for side, (one, adapters) in sides.items():
                seconds = decode_steps(one, adapters, options.device)
                if number:  # the first round warms up
                    found[side].append(statistics.median(seconds) * 1e3)
        times = ratios(found, "no slots, base")
        for side, ms in found.items():
            step, ratio = statistics.median(ms), statistics.median(times[side])
            rows.append([crowd, side, round(step, 2), round(ratio, 2), spread(times[side])])
        figures[str(crowd)] = {side: round(statistics.median(of), 3) for side, of in times.items()}
        spreads[str(crowd)] = {side: quartiles(ms) for side, ms in found.items()}
    figures["rounds_ms"] = spreads
    columns = ["requests", "side", "ms a decode step", "times the base without slots", "in rounds"]
    tables = {"steps": {"columns": columns, "rows": rows}}
    name = "part18_mixed" + ("" if options.device == "cpu" else "_gpu")
    workload = {"model": "storyteller", "rank": 8, "slots": 4, "slot_rank": 16, "rounds": options.rounds}
    show(record(name, __doc__.splitlines()[0], workload, figures, tables), tables)


if __name__ == "__main__":
    main()
