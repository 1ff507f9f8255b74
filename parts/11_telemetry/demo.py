"""A crowd comes in waves, and the board in the terminal shows what it does to the engine.

python -m parts run 11                 # ends by itself; -- --serve stays up, with /dashboard and /metrics
"""

import asyncio
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.part11_crowd import Crowd, come  # noqa: E402
from benchmarks.record import OUT, record  # noqa: E402
from engine.cache.slots import SlotMemory  # noqa: E402
from engine.client.top import read_dashboard, top  # noqa: E402
from engine.client.trace_view import trace_view  # noqa: E402
from engine.core.engine_thread import EngineThread  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.execution.runner import EagerWay, ModelRunner  # noqa: E402
from engine.layers.packed_linear import pack_linears  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.scheduling.continuous import ContinuousScheduler  # noqa: E402
from engine.server.app import create_app  # noqa: E402
from engine.server.telemetry_routes import OPEN_PATHS, telemetry_routes  # noqa: E402
from engine.telemetry.histogram import quantile  # noqa: E402
from engine.telemetry.history import percentile  # noqa: E402
from engine.telemetry.metric_names import TTFT  # noqa: E402
from engine.telemetry.metrics import EngineMetrics  # noqa: E402
from engine.telemetry.trace import Trace, open_trace  # noqa: E402
from engine.telemetry.trace_report import read_trace, trace_figures  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import HOST, asked_to_serve, served, title, yes  # noqa: E402

MODEL = "storyteller"
SEATS, BUDGET = 8, 256
TRACE = OUT / "part11_trace.json"
WAVES = ((5, 6), (5, 24), (5, 4))  # seconds, people
PERCENTS = (50, 95, 99)


def build() -> tuple[EngineMetrics, object]:
    """The metrics of an engine, and the app that serves both."""
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=SEATS))
    memory = SlotMemory(model.config, SEATS)
    scheduler = ContinuousScheduler(memory.plan(), SEATS, BUDGET)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    engine = LLMEngine(tokenizer, model.config, scheduler, runner)
    metrics = EngineMetrics(engine, MODEL)
    app = create_app(EngineThread(engine, MODEL), [telemetry_routes(metrics)], open_paths=OPEN_PATHS)
    return metrics, app


def main() -> None:
    serve_only = asked_to_serve(__doc__)
    torch.set_num_threads(1)
    console = Console(highlight=False)
    metrics, app = build()
    if serve_only:
        from engine.server.run import serve

        console.print(f"http://{HOST}:8000/dashboard and /metrics, until Ctrl-C")
        serve(app, HOST, 8000)
        return

    OUT.mkdir(exist_ok=True)
    trace = Trace(open_trace(TRACE), metrics.engine.scheduler.cache, budget=lambda: BUDGET)
    metrics.engine.listeners.add(trace)
    crowds = ", then ".join(f"{people} people" for _, people in WAVES)
    title(console, f"1. {crowds}, for an engine with {SEATS} places")
    with served(app) as address, ThreadPoolExecutor(1) as pool:
        crowd_comes = pool.submit(asyncio.run, come(address, MODEL, WAVES))
        top(address, console, enough=crowd_comes.done)
        crowd = crowd_comes.result()
        answer = at_rest(address, crowd)

    title(console, "2. The same waits by stopwatch, by stamp and by bucket")
    stamped = sorted(value for _, value in metrics.history.copy().samples["ttft"])
    own, histogram = sorted(crowd.first_pieces), metrics.histograms[TTFT]
    waits = {
        "clients' own, until the first text": [percentile(own, p / 100) for p in PERCENTS],
        "time to first token, one by one": [percentile(stamped, p / 100) for p in PERCENTS],
        "estimated from the histogram's buckets": [
            quantile(p / 100, histogram.bounds, histogram.cumulative()) for p in PERCENTS
        ],
    }
    console.print(table(waits))
    console.print(
        "\nThe first two differ by the way through HTTP. The third knows only in which bucket a wait lay: "
        "it is all that Prometheus is told."
    )

    title(console, "3. Where the time went, from the trace")
    trace.close()
    console.print(trace_view(trace_figures(read_trace(TRACE))))
    console.print(f"\nEach step and each request: open {TRACE.relative_to(ROOT)} at https://ui.perfetto.dev")

    title(console, "4. Does it add up?")
    same = add_up(console, crowd, answer)
    figures = {"waits_seconds": waits, "adds_up": same, "ended": answer["ended"], "totals": answer["totals"]}
    path = record(
        "part11", "Does what is measured add up?", {"waves": WAVES, "seats": SEATS}, figures, folder=OUT
    )
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def at_rest(address: str, crowd: Crowd) -> dict:
    """The server's data once it has noticed that everybody has left, or after ten seconds."""
    for _ in range(100):
        answer = read_dashboard(address)
        if sum(answer["ended"].values()) == crowd.finished + crowd.left:
            break
        time.sleep(0.1)
    return answer


def table(waits: dict[str, list[float]]) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown.add_column("milliseconds")
    for percent in PERCENTS:
        shown.add_column(f"p{percent}", justify="right")
    for name, values in waits.items():
        shown.add_row(name, *(f"{value * 1e3:,.0f}" for value in values))
    return shown


def add_up(console: Console, crowd: Crowd, answer: dict) -> bool:
    """Compare what the clients counted with what the engine did."""
    ended, totals = answer["ended"], answer["totals"]
    done = ended["stop"] + ended["length"]
    console.print(f"Answers read to their end: {crowd.finished}; requests that ended well: {done}")
    console.print(f"Clients that left: {crowd.left}; aborted requests: {ended['abort']}")
    tokens = totals["vllm:generation_tokens"]
    console.print(
        f"Tokens of answers: {crowd.tokens:,}; of the engine, with those for clients that left: {tokens:,}"
    )
    # A client that left may have had its whole answer by then.
    left = done + ended["abort"] == crowd.finished + crowd.left and ended["abort"] <= crowd.left
    spent = crowd.tokens <= tokens <= crowd.tokens + 160 * crowd.left
    observed = answer["buckets"]["ttft"]["cumulative"][-1]
    same = left and spent and math.isclose(observed, done + ended["abort"], abs_tol=crowd.left)
    console.print(f"It adds up: [bold]{yes(same)}[/]")
    return same


if __name__ == "__main__":
    main()
