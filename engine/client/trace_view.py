"""The figures of a trace as a table for a terminal. Part 11."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.client.untrusted import printable


def trace_view(figures: dict[str, Any]) -> Group:
    """What `trace_figures` of engine/telemetry/trace_report.py returns, as five lines below a heading."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("milliseconds")
    for name in ("p50", "p95"):
        table.add_column(name, justify="right")
    table.add_column("of")
    for label, name, unit in (
        ("time to first token", "time_to_first_token", "requests"),
        ("time between tokens", "time_between_tokens", "gaps"),
        ("wait in the queue", "queue_wait", "requests"),
    ):
        table.add_row(label, *_spread(figures[name], unit))
    step = figures["step"]
    table.add_row("time of a step", *_spread(step, "steps"))
    lines: list[RenderableType] = [Text(_heading(figures)), Text(), table]
    if step is not None:
        lines += [Text(), Text(_shares(step)), Text(_batch(step, figures["preemptions"]))]
    if figures["counted"]:
        counted = ", ".join(f"{printable(name)} {count:,}" for name, count in figures["counted"].items())
        lines.append(Text(f"counted: {counted}"))
    return Group(*lines)


def _heading(figures: dict[str, Any]) -> str:
    """The trace's length, its requests and how they ended, and why the trace ended."""
    num_requests, ended = figures["requests"], figures["ended"]
    endings = [f"{printable(reason)} {count:,}" for reason, count in ended.items()]
    num_unfinished = num_requests - sum(ended.values())
    if num_unfinished:
        endings.append(f"unfinished {num_unfinished:,}")
    in_brackets = f" ({', '.join(endings)})" if endings else ""
    end = "cut off: its end is missing" if figures["end"] is None else printable(figures["end"])
    return (
        f"{figures['seconds']:,.1f} s, {num_requests:,} requests{in_brackets}, "
        f"{figures['output_tokens']:,} output tokens; end of the trace: {end}"
    )


def _spread(spread: dict[str, Any] | None, unit: str) -> tuple[str, str, str]:
    """The cells p50, p95 and "of" of a row; None: nothing was measured."""
    if spread is None:
        return "–", "–", f"0 {unit}"
    return f"{spread['p50']:,.2f}", f"{spread['p95']:,.2f}", f"{spread['count']:,} {unit}"


def _shares(step: dict[str, Any]) -> str:
    """How the time of a step is divided between device and host, and how many steps failed."""
    failed = f"; {step['failed']:,} failed" if step["failed"] else ""
    return (
        f"of a step's time: device {step['share_device']:.1%}, host {step['share_schedule']:.1%} to schedule "
        f"and {step['share_land']:.1%} to land{failed}"
    )


def _batch(step: dict[str, Any], num_preemptions: int) -> str:
    """How full a step is, and how many preemptions there were."""
    fill = "" if step["fill"] is None else f", {step['fill']:.1%} of the budget"
    size = f"{step['mean_sequences']:.1f} requests, {step['mean_tokens']:.1f} tokens{fill}"
    return f"in a step, on average: {size}; preemptions: {num_preemptions:,}"
