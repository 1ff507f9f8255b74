"""Two servers at the same price, one with a single guest, one full, and what a request pays.

python -m parts run 19                 # ends by itself; -- --serve stays up, with the cost on /dashboard
"""

import asyncio
import csv
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.part11_crowd import Crowd, come  # noqa: E402
from benchmarks.record import OUT, record  # noqa: E402
from engine.cache.memory import PageMemory  # noqa: E402
from engine.core.engine_thread import EngineThread  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.execution.runner import EagerWay, ModelRunner  # noqa: E402
from engine.layers.packed_linear import pack_linears  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.scheduling.continuous import ContinuousScheduler  # noqa: E402
from engine.server.app import create_app  # noqa: E402
from engine.server.protocol import Completions  # noqa: E402
from engine.server.telemetry_routes import OPEN_PATHS, telemetry_routes  # noqa: E402
from engine.server.usage_cost import usage_cost  # noqa: E402
from engine.telemetry.bill import PAID_KINDS, Bill, money  # noqa: E402
from engine.telemetry.cost_accounting import CostAccounting  # noqa: E402
from engine.telemetry.cost_metrics import KIND_TITLES  # noqa: E402
from engine.telemetry.metrics import EngineMetrics  # noqa: E402
from engine.telemetry.shares import share_out  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import HOST, asked_to_serve, served, title, yes  # noqa: E402

MODEL = "storyteller"
SEATS = 8
BLOCK = 8  # tokens: short, so that these short prompts have a beginning in common
PRICE, API = "2.50", "0.10,0.40,1.60"  # supposed: dollars an hour; for a million tokens elsewhere
SERVERS = {"one guest": ((9, 1),), "a crowd": ((9, 24),)}  # seconds, people
STORY = "Lily and her mom were in the kitchen. They wanted to bake a big cake for the party. " * 14
REQUESTS = {  # what is asked, one after the other: (prompt, tokens of the answer)
    "a long prompt, a short answer": (STORY + "Lily said", 4),
    "the same prompt again": (STORY + "Lily said", 4),
    "a short prompt, a long answer": ("Once upon a time", 250),
}
WIDTH = 34  # of a bar


def build(log: Path | None = None) -> tuple[CostAccounting, object]:
    """The meter's accounts, and the app that serves and shows them."""
    costs = CostAccounting.parse(PRICE, API, log and str(log))
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=SEATS))
    memory = PageMemory(model.config, SEATS * model.config.max_positions // BLOCK, BLOCK)
    scheduler = ContinuousScheduler(memory.plan(), SEATS, 256)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    engine = LLMEngine(tokenizer, model.config, scheduler, runner)
    metrics = EngineMetrics(engine, MODEL)
    costs.begin(engine, metrics)
    api = Completions()
    api.more_usage.append(usage_cost(costs.price, costs.api_price))
    app = create_app(
        EngineThread(engine, MODEL),
        [telemetry_routes(metrics)],
        open_paths=OPEN_PATHS,
        api=api,
    )
    return costs, app


def board(bill: Bill) -> Group:
    """The bill as it stands."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(min_width=34)
    lines.add_column(justify="right", min_width=7)
    lines.add_column(min_width=WIDTH)
    for kind, ns in bill.ns.items():
        if ns:
            share = ns / bill.total_ns
            colour = "green" if kind in PAID_KINDS else "yellow"
            lines.add_row(KIND_TITLES[kind], f"{share:.1%}", Text("█" * round(share * WIDTH), style=colour))
    said = f"{bill.total_ns / 1e9:5.1f} s at ${PRICE} an hour: {money(bill.total)}; "
    said += f"{money(bill.per_output_token)} per output token, idle time included"
    return Group(lines, Text(said, style="bold"))


def play(console: Console, waves: Sequence[tuple[float, int]], log: Path) -> tuple[Bill, Crowd]:
    """Serve these people, and show the bill grow; the bill when the server has stopped."""
    costs, app = build(log)
    with served(app) as address, ThreadPoolExecutor(1) as pool, Live(console=console) as live:
        crowd = pool.submit(asyncio.run, come(address, MODEL, waves))
        while not crowd.done():
            time.sleep(0.1)
            live.update(board(costs.meter.read()))
    bill = costs.end()
    return bill, crowd.result()


def main() -> None:
    serve_only = asked_to_serve(__doc__)
    torch.set_num_threads(1)
    console = Console(highlight=False)
    if serve_only:
        from engine.server.run import serve

        console.print(f"http://{HOST}:8000/dashboard, until Ctrl-C")
        serve(build()[1], HOST, 8000)
        return
    bills, same = {}, True
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, waves) in enumerate(SERVERS.items(), 1):
            title(console, f"{number}. A server with {name}")
            log = Path(folder) / f"{number}.csv"
            bill, _ = play(console, waves, log)
            bills[name] = bill
            same &= reconciled(console, bill, log)
    title(console, "3. What a request pays, as its answer says it")
    usages = ask_each()
    console.print(receipts(usages))
    title(console, "4. An hour like this, to the cent")
    console.print(hours(bills))
    console.print(
        f"\nThe lines of each hour add up to ${PRICE}, and each log to its bill: [bold]{yes(same)}[/]"
    )
    figures = {
        name: {
            "ns": dict(bill.ns),
            "tokens": dict(bill.tokens),
            "used": bill.utilization,
            "dollars_per_output_token": float(bill.per_output_token or 0),
        }
        for name, bill in bills.items()
    }
    figures["requests"] = usages
    path = record(
        "part19",
        "What does a token cost on a server that waits, and on a full one?",
        {"servers": SERVERS, "seats": SEATS, "price_per_hour": PRICE},
        figures | {"adds_up": same},
        folder=OUT,
    )
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def reconciled(console: Console, bill: Bill, log: Path) -> bool:
    """Whether the log's lines are the bill, to the nanosecond."""
    with open(log, newline="") as file:
        lines = list(csv.DictReader(file))
    logged = sum(int(line["ns"]) for line in lines)
    requests = sum(bool(line["request_id"]) for line in lines)
    console.print()  # the board ends without a line break where the output is no terminal
    console.print(
        f"Lines of requests in the log: {requests}; of time nobody pays for: {len(lines) - requests}. "
        f"Together {logged:,} ns. The bill: {bill.total_ns:,} ns."
    )
    return logged == bill.total_ns


def ask_each() -> dict[str, dict]:
    """The `usage` of each of REQUESTS, which are alone on their server."""
    usages = {}
    with served(build()[1]) as address, httpx.Client(base_url=address, timeout=60, trust_env=False) as http:
        for name, (prompt, tokens) in {"to warm up": ("The dog", 8), **REQUESTS}.items():
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            usages[name] = http.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    del usages["to warm up"]
    return usages


def receipts(usages: dict[str, dict]) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown.add_column("")
    for name in ("prompt", "found", "answer", "device, ms", "cost", "elsewhere"):
        shown.add_column(name, justify="right")
    for name, usage in usages.items():
        details = usage["cost_details"]
        found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        shown.add_row(
            name,
            *(f"{number:,}" for number in (usage["prompt_tokens"], found, usage["completion_tokens"])),
            f"{details['device_ns'] / 1e6:.0f}",
            f"${usage['cost']:.7f}",
            f"${details['api_cost']:.7f}",
        )
    return shown


def in_cents(bill: Bill) -> dict[str, int]:
    """An hour of the same mixture in whole cents, by kind: they add up to the price of an hour."""
    cents = share_out(int(bill.price.per_hour * 100), list(bill.ns.values()))
    return dict(zip(bill.ns, cents, strict=True))


def hours(bills: dict[str, Bill]) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown.add_column("dollars of an hour")
    for name in bills:
        shown.add_column(name, justify="right")
    cents = [in_cents(bill) for bill in bills.values()]
    for kind in KIND_TITLES:
        if any(one[kind] for one in cents):
            shown.add_row(KIND_TITLES[kind], *(f"{one[kind] / 100:.2f}" for one in cents))
    shown.add_row("together", *(f"[bold]{sum(one.values()) / 100:.2f}[/]" for one in cents))
    for name, value in (
        ("time that requests pay for", lambda bill: f"{bill.utilization:.0%}"),
        ("output tokens in that hour", lambda bill: f"{bill.tokens['output'] * 3600e9 / bill.total_ns:,.0f}"),
        ("a million output tokens, idle time included", lambda bill: _million(bill.per_output_token)),
        ("of that, what requests paid for them", lambda bill: _million(bill.per_token("output"))),
    ):
        shown.add_row(name, *map(value, bills.values()))
    return shown


def _million(dollars) -> str:
    return "–" if dollars is None else money(dollars * 10**6)


if __name__ == "__main__":
    main()
