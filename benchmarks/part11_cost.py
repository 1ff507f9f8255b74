"""What does being watched cost: a step of 32 sequences, watched and unwatched, a scrape, a look at the page?

    python -m benchmarks.part11_cost [--sequences 32] [--rounds 4]

`storyteller`, all sequences decoding. One engine takes turns: WINDOW steps with a listener, WINDOW without.
Processor time of each window, in the same thread; the cost is the median difference of neighbours. Beside
it, the time inside the listener alone, which other people's work on the machine disturbs least.
"""

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from prometheus_client import generate_latest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import record, whole_numbers
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.machine.collector import rare_collections
from engine.models.loader import load_model
from engine.requests.listeners import Listeners
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.metrics import EngineMetrics
from engine.text.tokenizer import Tokenizer

MODEL = "storyteller"
PROMPT = [300] * 16
TOKENS = 400
WINDOW = 10  # steps
SCRAPES = 50


class Timed(EngineMetrics):
    """Also notes how long it takes to hear of a step."""

    def __init__(self, engine: LLMEngine, model_name: str) -> None:
        super().__init__(engine, model_name)
        self.took: list[float] = []

    def on_step(self, record) -> None:
        start = time.perf_counter()
        super().on_step(record)
        self.took.append(time.perf_counter() - start)


def play(tokenizer: Tokenizer, model, sequences: int) -> tuple[list[float], list[float], Timed]:
    """Processor seconds per step of each window: watched, unwatched; and who watched."""
    memory = SlotMemory(model.config, sequences)
    scheduler = ContinuousScheduler(memory.plan(), sequences, sequences * len(PROMPT))
    runner = ModelRunner([EagerWay(model, memory)], memory)
    engine = LLMEngine(tokenizer, model.config, scheduler, runner)
    metrics = Timed(engine, MODEL)
    watched, unwatched = engine.listeners, Listeners()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for i in range(sequences):
        engine.add_request(str(i), PROMPT, params)
    for _ in range(WINDOW):
        engine.step()
    took: dict[Listeners, list[float]] = {watched: [], unwatched: []}
    for _ in range((TOKENS - 2 * WINDOW) // (2 * WINDOW)):
        for listeners in (watched, unwatched):
            engine.listeners = scheduler.listeners = listeners
            start = time.process_time()
            for _ in range(WINDOW):
                engine.step()
            took[listeners].append((time.process_time() - start) / WINDOW)
    engine.listeners = scheduler.listeners = watched
    while engine.has_unfinished_requests():
        engine.step()
    return took[watched], took[unwatched], metrics


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
    args = whole_numbers(__doc__.splitlines()[0], sequences=32, rounds=4)
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=args.sequences))
    watched, unwatched, inside = [], [], []
    for _ in range(args.rounds):
        with_, without, metrics = play(tokenizer, model, args.sequences)
        watched += with_
        unwatched += without
        inside += metrics.took
    step = statistics.median(unwatched) * 1e3
    difference = statistics.median(a - b for a, b in zip(watched, unwatched, strict=True)) * 1e3
    listener = statistics.median(inside) * 1e3
    text = generate_latest(metrics.registry)
    metrics.history.start -= 200  # the page's three minutes are full
    figures = {
        "step_ms": step,
        "difference_ms": difference,
        "difference_share": difference / step,
        "listener_ms": listener,
        "listener_share": listener / step,
        "scrape_ms": milliseconds(lambda: generate_latest(metrics.registry)),
        "scrape_bytes": len(text),
        "snapshot_ms": milliseconds(metrics.snapshot),
    }
    rows = [
        ["a step, nobody listening", round(step, 3), None],
        ["the same, with metrics: more by", round(difference, 4), f"{difference / step:.1%}"],
        ["of that, inside the listener", round(listener, 4), f"{listener / step:.1%}"],
        ["one scrape of /metrics, when asked", round(figures["scrape_ms"], 2), None],
        ["one answer for the dashboard, when asked", round(figures["snapshot_ms"], 2), None],
    ]
    for row in rows:
        print(*row)
    record(
        "part11_cost",
        __doc__.splitlines()[0],
        {
            "model": MODEL, "sequences": args.sequences, "tokens": TOKENS, "rounds": args.rounds,
            "window": WINDOW,
        },
        figures,
        {"cost": {"columns": ["what", "ms", "share of a step"], "rows": rows}},
    )  # fmt: skip


if __name__ == "__main__":
    main()
