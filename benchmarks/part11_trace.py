"""What does a trace cost: a step of 32 sequences, traced and not, and the bytes of a token in the file?

    python -m benchmarks.part11_trace [--sequences 32] [--rounds 4]

`storyteller`, all sequences decoding. One engine takes turns: WINDOW steps with a trace, WINDOW without.
Processor time of each window, of all threads, so that the thread which writes the file counts; the cost is
the median difference of neighbours. Beside it, the time inside the listener alone, which other people's work
on the machine disturbs least.
"""

import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import record, show, whole_numbers
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.machine.collector import rare_collections
from engine.models.loader import load_model
from engine.requests.listeners import Listeners, StepRecord
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.trace import Trace, open_trace
from engine.text.tokenizer import Tokenizer

MODEL = "storyteller"
PROMPT = [300] * 16
TOKENS = 400
WINDOW = 10  # steps


class Timed(Trace):
    """Also notes how long it takes to hear of a step."""

    took: list[float]

    def on_step(self, record: StepRecord) -> None:
        start = time.perf_counter()
        super().on_step(record)
        self.took.append(time.perf_counter() - start)


def play(tokenizer: Tokenizer, model, sequences: int, folder: Path) -> tuple[list[float], list[float], Timed]:
    """Processor seconds per step of each window: traced, untraced; and the trace."""
    memory = SlotMemory(model.config, sequences)
    budget = sequences * len(PROMPT)
    scheduler = ContinuousScheduler(memory.plan(), sequences, budget)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    trace = Timed(open_trace(folder / "trace.json"), scheduler.cache, budget=lambda: budget)
    trace.took = []
    engine = LLMEngine(tokenizer, model.config, scheduler, runner, Listeners([trace]))
    traced, untraced = engine.listeners, Listeners()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for i in range(sequences):
        engine.add_request(str(i), PROMPT, params)
    for _ in range(WINDOW):
        engine.step()
    seconds: dict[Listeners, list[float]] = {traced: [], untraced: []}
    for _ in range((TOKENS - 2 * WINDOW) // (2 * WINDOW)):
        for listeners in (traced, untraced):
            engine.listeners = scheduler.listeners = listeners
            start = time.process_time()
            for _ in range(WINDOW):
                engine.step()
            seconds[listeners].append((time.process_time() - start) / WINDOW)
    engine.listeners = scheduler.listeners = traced
    while engine.has_unfinished_requests():
        engine.step()
    trace.close()
    return seconds[traced], seconds[untraced], trace


@rare_collections()
def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], sequences=32, rounds=4)
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=args.sequences))
    traced, untraced, inside, sizes = [], [], [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            with_, without, trace = play(tokenizer, model, args.sequences, Path(folder))
            sizes.append(trace.file.path.stat().st_size / (len(trace.took) * args.sequences))
        traced += with_
        untraced += without
        inside += trace.took
    step = statistics.median(untraced) * 1e3
    difference = statistics.median(a - b for a, b in zip(traced, untraced, strict=True)) * 1e3
    listener = statistics.median(inside) * 1e3
    figures = {
        "step_ms": step,
        "difference_ms": difference,
        "difference_share": difference / step,
        "listener_ms": listener,
        "listener_share": listener / step,
        "bytes_per_token": statistics.median(sizes),
    }
    rows = [
        ["a step, not traced", round(step, 3), None],
        ["the same, traced: more by", round(difference, 4), f"{difference / step:.1%}"],
        ["of that, inside the listener", round(listener, 4), f"{listener / step:.1%}"],
    ]
    tables = {"cost": {"columns": ["what", "ms", "share of a step"], "rows": rows}}
    workload = {
        "model": MODEL, "sequences": args.sequences, "tokens": TOKENS, "rounds": args.rounds,
        "window": WINDOW,
    }  # fmt: skip
    show(record("part11_trace", __doc__.splitlines()[0], workload, figures, tables), tables)
    print(f"{figures['bytes_per_token']:.0f} bytes of the file for an output token")


if __name__ == "__main__":
    main()
