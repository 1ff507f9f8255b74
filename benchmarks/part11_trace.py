"""What does a trace cost: a step of 32 sequences, traced and not, and the bytes of a token in the file?

    python -m benchmarks.part11_trace [--sequences 32] [--rounds 5]

`storyteller`, all sequences decoding, with a trace and without in turns (part11_listening.py). The thread
which writes the file counts.
"""

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.part11_listening import (
    MODEL,
    PROMPT,
    Costs,
    engine_for,
    seconds_inside,
    take_turns,
    workload,
)
from benchmarks.record import record, show, whole_numbers
from engine.layers.packed_linear import pack_linears
from engine.machine.collector import rare_collections
from engine.models.loader import load_model
from engine.telemetry.trace import Trace, open_trace
from engine.text.tokenizer import Tokenizer


@rare_collections()
def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], sequences=32, rounds=5)
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=args.sequences))
    budget = args.sequences * len(PROMPT)
    costs, sizes = Costs(), []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            engine = engine_for(tokenizer, model, args.sequences)
            path = Path(folder) / "trace.json"
            trace = Trace(open_trace(path), engine.scheduler.cache, budget=lambda: budget)
            engine.listeners.add(trace)
            seconds = seconds_inside(trace)
            costs.add(*take_turns(engine, args.sequences), seconds)
            trace.close()
            sizes.append(path.stat().st_size / (len(seconds) * args.sequences))
    figures = costs.figures() | {"bytes_per_token": statistics.median(sizes)}
    rows = costs.rows("a step, not traced", "the same, traced: more by")
    tables = {"cost": {"columns": ["what", "ms", "share of a step"], "rows": rows}}
    about = workload(args.sequences, args.rounds)
    show(record("part11_trace", __doc__.splitlines()[0], about, figures, tables), tables)
    print(f"{figures['bytes_per_token']:.0f} bytes of the file for an output token")


if __name__ == "__main__":
    main()
