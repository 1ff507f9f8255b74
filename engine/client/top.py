"""The dashboard for a terminal, which reads a server's /dashboard/data every second or so. Part 11.

The server may run on any machine. Below the exact percentiles of recent requests, the dashboard shows the
percentiles that a histogram's buckets give, which is how Prometheus estimates them.
"""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from threading import Thread
from typing import NamedTuple
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from engine.client.untrusted import (
    MAX_ANSWER_BYTES,
    ByteLimit,
    check_port,
    is_this_machine,
    parse_json,
    printable,
)
from engine.telemetry.histogram import quantile
from engine.telemetry.history import DATA_PATH, PERCENTILES

LEVELS = "▁▂▃▄▅▆▇█"
TIMEOUT = 10  # seconds for the server's whole answer
NOT_A_DASHBOARD = "does not answer with a dashboard's data"


class Measure(NamedTuple):
    """A row of the dashboard."""

    name: str
    latest: str  # the latest value, as it is shown
    values: Sequence[float | None]  # one for each of the last seconds
    colour: str
    highest: float | None = None  # as in `sparkline`


class NoAnswer(Exception):
    """The server sent no dashboard data. The message says which server, and why."""


def read_dashboard(url: str) -> dict:
    """The dashboard data of the server at `url`. Raises NoAnswer if they have not come within TIMEOUT, or if
    the answer is something else.
    """
    address = url.rstrip("/") + DATA_PATH
    content = Future[bytes]()
    # urllib's timeout bounds each read of the socket, but not their number: a thread bounds the whole.
    Thread(target=_fetch, args=(address, content), daemon=True).start()
    try:
        answer = parse_json(content.result(TIMEOUT))
    except urllib.error.HTTPError as error:
        reason = ": it has no dashboard, or not under this name" if error.code == 404 else ""
        raise NoAnswer(f"{address} answers {error.code}{reason}") from error
    except TimeoutError as error:
        raise NoAnswer(f"{address} has not answered in {TIMEOUT} s") from error
    except urllib.error.URLError as error:
        raise NoAnswer(f"{address}: {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswer(f"{address}: {error}") from error
    if not isinstance(answer, dict) or "seconds" not in answer:
        raise NoAnswer(f"{address} {NOT_A_DASHBOARD}")
    return answer


def _fetch(address: str, content: Future[bytes]) -> None:
    """Set `content` to the body of the answer, or to the exception that the request raised."""
    try:
        check_port(address)
        handlers: list[urllib.request.BaseHandler] = []
        if is_this_machine(urlsplit(address).hostname):
            handlers.append(urllib.request.ProxyHandler({}))  # no proxy
        opener = urllib.request.build_opener(*handlers)
        with opener.open(address, timeout=TIMEOUT) as response:
            content.set_result(ByteLimit().take(response.read(MAX_ANSWER_BYTES + 1)))
    except Exception as error:
        content.set_exception(error)


def growth(column: Sequence[float]) -> list[float]:
    """How much a counter grew from each entry to the next: n - 1 differences of n entries."""
    return [after - before for before, after in pairwise(column)]


def sparkline(values: Sequence[float | None], width: int, highest: float | None = None) -> str:
    """The last `width` values as a row of bars, `width` characters long. A value of `highest`, by default
    the largest of them, has the highest bar. None becomes a blank.
    """
    latest = values[-width:]
    if highest is None:
        highest = max((value for value in latest if value is not None), default=0)
    bars = []
    for value in latest:
        if value is None:
            bars.append(" ")
        else:
            level = int(value / highest * len(LEVELS)) if highest else 0
            bars.append(LEVELS[min(level, len(LEVELS) - 1)])
    return "".join(bars).rjust(width)


def dashboard(answer: dict, width: int) -> Panel:
    """The dashboard as a panel of `width` columns, from an answer of `read_dashboard`. Raises ValueError if a
    field is missing or has another type.
    """
    try:
        return _dashboard(answer, width)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"no dashboard data: {error!r}") from error


def _dashboard(answer: dict, width: int) -> Panel:
    """As `dashboard`, but an answer of another form raises whatever error it leads to."""
    title = Text(printable(f"{answer['model_name']}, up for {answer['uptime']:,.0f} s"))
    # Panels that other parts of the server add, such as those of several ranks.
    panels = [
        Text(printable(f"{panel['title']}: {panel['value']}; {panel['note']}"))
        for panel in answer.get("panels", ())
    ]
    bars, counts = _bars(answer, width), Text(_counts(answer), style="dim")
    return Panel(Group(bars, Text(), _latencies(answer), Text(), *panels, counts), title=title)


def _bars(answer: dict, width: int) -> Table:
    """A table with a row for each measure: its name, its latest value, and its last values as bars."""
    now, seconds = answer["now"], answer["seconds"]
    output, steps = growth(seconds["generation_tokens"]), growth(seconds["steps"])
    sequences = growth(seconds["step_sequences"])
    batch_sizes: list[float | None] = []  # requests per step; None for a second without a step
    for num_sequences, num_steps in zip(sequences, steps, strict=True):
        batch_sizes.append(num_sequences / num_steps if num_steps else None)
    latest_size = batch_sizes[-1] if batch_sizes else None
    shown_size = "–" if latest_size is None else f"{latest_size:.1f}"
    # `growth` has no value for the first second, so the other columns leave it out, too.
    measures = [
        Measure("output tokens/s", f"{output[-1]:,.0f}" if output else "–", output, "cyan"),
        Measure("running", f"{now['running']:,}", seconds["running"][1:], "green"),
        Measure("waiting", f"{now['waiting']:,}", seconds["waiting"][1:], "yellow"),
        Measure("requests per step", shown_size, batch_sizes, "magenta"),
        Measure("KV cache", f"{now['kv_usage']:.0%}", seconds["kv_usage"][1:], "blue", highest=1.0),
    ]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right", min_width=8)
    table.add_column()
    bar_columns = max(4, width - 40)  # the names and the values take about 40 columns
    for measure in measures:
        bars = sparkline(measure.values, bar_columns, measure.highest)
        table.add_row(measure.name, measure.latest, Text(bars, style=measure.colour))
    return table


def _counts(answer: dict) -> str:
    """How requests have ended since the start, and how many tokens and preemptions there were."""
    totals, ended = answer["totals"], answer["ended"]
    return (
        f"{ended['stop'] + ended['length']:,} requests done, {ended['abort']:,} aborted, {ended['error']:,} "
        f"failed, {ended['reject']:,} refused; {totals['vllm:prompt_tokens']:,} prompt and "
        f"{totals['vllm:generation_tokens']:,} output tokens; {totals['vllm:num_preemptions']:,} preemptions"
    )


def _latencies(answer: dict) -> Table:
    """A table of percentiles of both latencies: exact ones of recent requests, and estimates from the
    histograms' buckets since the server's start.
    """
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("milliseconds")
    for name in PERCENTILES:
        table.add_column(name, justify="right")
    for title, kind in (("time to first token", "ttft"), ("time per output token", "tpot")):
        columns, buckets = answer["seconds"][kind], answer["buckets"][kind]
        recent = [columns[name][-1] if columns[name] else None for name in PERCENTILES]
        estimates = [quantile(q, buckets["le"], buckets["cumulative"]) for q in PERCENTILES.values()]
        table.add_row(f"{title}, last {answer['window']:g} s", *map(_milliseconds, recent))
        table.add_row("  since the start, by buckets", *map(_milliseconds, estimates), style="dim")
    return table


def _milliseconds(value: float | None) -> str:
    """Seconds as milliseconds with one decimal; "–" for None."""
    return "–" if value is None else f"{value * 1e3:,.1f}"


def top(url: str, console: Console, enough: Callable[[], bool] = lambda: False) -> None:
    """Show the dashboard, and renew it one second after each answer, until Ctrl-C or until `enough` returns
    True. Raises NoAnswer if the server sends no dashboard data.
    """
    with Live(console=console, auto_refresh=False) as live:
        while True:
            answer = read_dashboard(url)
            try:
                panel = dashboard(answer, console.width)
            except ValueError as error:
                raise NoAnswer(f"{url} {NOT_A_DASHBOARD}") from error
            live.update(panel, refresh=True)
            if enough():
                break
            time.sleep(1)
    if not console.is_terminal:
        console.line()  # without a terminal, rich does not end the last line
