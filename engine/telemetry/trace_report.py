"""What a trace says, in a few figures: reads a file that `Trace` has written, whole or cut off. Part 11.

The file may come from a stranger: what is no trace raises ValueError with the number of the line. A last line
that was cut off is left out, and so are steps and requests of which the trace does not have the end, as far
as it is missing.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.telemetry.history import percentile
from engine.telemetry.trace_events import DEVICE, ENGINE, LAND, REQUESTS, SCHEDULE

MAX_LINE = 2**16  # characters
MAX_NUMBER = 2**53  # up to here, all readers of JSON agree on whole numbers
Event = dict[str, Any]


@dataclass(slots=True)
class TracedRequest:
    """What a trace says of one request. Times are microseconds of the trace."""

    arrival: int
    waited: int = 0  # from the arrival to the launch of its first step
    num_steps: int = 0
    token_times: list[int] = field(default_factory=list)  # when tokens came; one time for several at once
    num_tokens: int = 0
    num_preemptions: int = 0
    reason: str | None = None  # why it ended; None: the trace does not have its end


@dataclass(slots=True)
class TracedStep:
    """One step: its times in microseconds, and its size."""

    start: int | None = None  # when its scheduling began
    schedule: int = 0
    device: int = 0
    land: int = 0
    end: int | None = None  # None: the trace does not have its end
    tokens: int = 0
    sequences: int = 0
    budget: int = 0  # the most tokens that it could have had; 0 if there was no bound
    failed: bool = False


@dataclass
class TraceContent:
    """The requests and the steps of one trace."""

    requests: list[TracedRequest] = field(default_factory=list)
    steps: dict[int, TracedStep] = field(default_factory=dict)  # by number
    counted: Counter[str] = field(default_factory=Counter)  # what the engine's capabilities counted, by name
    last_time: int = 0  # the latest time of an event, in microseconds
    end_reason: str | None = None  # why the trace ended; None: it was cut off


def read_trace(path: str | Path) -> TraceContent:
    """Read the file. Raises ValueError if it cannot be read, or if it is no trace."""
    content = TraceContent()
    open_rows: dict[int, TracedRequest] = {}  # by row: the request that has it
    try:
        for number, event in _events(path):
            try:
                _add_event(event, content, open_rows)
            except (KeyError, TypeError, AttributeError):
                raise ValueError(f"line {number} is no event of a trace") from None
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: no trace: {error}") from None
    if not content.last_time and not content.requests:
        raise ValueError(f"{path}: no trace: it has no event with a time")
    return content


def _events(path: str | Path) -> Iterator[tuple[int, Event]]:
    """The events of the file, each with the number of its line. Raises ValueError for a line that is no
    JSON, unless it is the last, which may be cut off.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        if file.readline(MAX_LINE).rstrip() != "[":
            raise ValueError("the first line of a trace is [")
        line = file.readline(MAX_LINE)
        number = 2
        while line:
            following = file.readline(MAX_LINE)
            if line.strip() not in ("]", ""):
                try:
                    event = json.loads(line.rstrip().removesuffix(","))
                except (ValueError, RecursionError):
                    if not following:
                        return
                    raise ValueError(f"line {number} is no JSON") from None
                yield number, event
            line, number = following, number + 1


def _add_event(event: Event, content: TraceContent, open_rows: dict[int, TracedRequest]) -> None:
    """Add an event to `content`, and keep in `open_rows` which request has a row. Of a counter, only its time
    counts. Raises KeyError, TypeError or AttributeError if it is no event of a trace, ValueError if a number
    in it is wrong.
    """
    kind, details = event["ph"], event.get("args", {})
    if kind == "M":  # a name, which has no time
        return
    start = _whole_number(event["ts"])
    end = start + _whole_number(event.get("dur", 0))
    content.last_time = max(content.last_time, end)
    if kind == "i" and event["name"] == "end":  # the trace ends
        content.end_reason = str(details["reason"])
    elif kind == "B":  # a request arrives
        request = TracedRequest(start)
        open_rows[_whole_number(event["tid"])] = request
        content.requests.append(request)
    elif kind == "E":  # a request ends, or the trace ends before it
        request = open_rows.pop(event["tid"])
        if details["reason"] != "unfinished":
            request.reason = str(details["reason"])
    elif kind == "X" and event["pid"] == REQUESTS:  # what a request did
        _add_request_slice(open_rows[event["tid"]], event["name"], start, end, details)
    elif kind == "X" and event["pid"] == ENGINE:  # what a track shows of a step
        step = content.steps.setdefault(_whole_number(details["step"]), TracedStep())
        _add_step_slice(step, event["tid"], start, end, details)
        for name, amount in details.get("counted", {}).items():
            content.counted[str(name)] += _whole_number(amount)


def _add_request_slice(request: TracedRequest, name: str, start: int, end: int, details: Event) -> None:
    """Add what a request did from `start` to `end`. `details` are the arguments of the slice `name`."""
    if name == "waiting":
        request.waited = end - start
    elif name == "preempted":
        request.num_preemptions += 1
    else:
        request.num_steps += 1
        # A slice without arguments has brought one token.
        num_new = _whole_number(details["new"]) if details else 1
        if num_new:
            request.token_times.append(end)
            request.num_tokens += num_new


def _add_step_slice(step: TracedStep, track: int, start: int, end: int, details: Event) -> None:
    """Add what `track` shows of a step, from `start` to `end`. `details` are the slice's arguments."""
    if track == SCHEDULE:
        step.start, step.schedule = start, end - start
    elif track == LAND:
        step.end, step.land = end, end - start
    elif track == DEVICE:
        step.device, step.failed = end - start, "error" in details
        step.tokens, step.sequences = _whole_number(details["tokens"]), _whole_number(details["sequences"])
        step.budget = _whole_number(details.get("budget", 0))


def _whole_number(value: Any) -> int:
    """A whole number from a trace. Raises ValueError for another value."""
    if type(value) not in (int, float) or not 0 <= value <= MAX_NUMBER or value != int(value):
        raise ValueError(f"{str(value)[:40]!r} where a whole number from 0 on is expected")
    return int(value)


def trace_figures(content: TraceContent) -> dict[str, Any]:
    """The figures as JSON values. `seconds` is the trace's length; spreads are in milliseconds; shares and
    `fill` are fractions of 1. A spread is None where nothing was observed.

    Queue waits are of the requests that were in a step. Times between tokens are of a request's successive
    steps with tokens, however many tokens came at once, as in Part 11's metrics.
    """
    requests = content.requests
    waits: list[int] = []
    first_tokens: list[int] = []  # microseconds from the arrival to the first tokens
    gaps: list[int] = []
    reasons: Counter[str] = Counter()
    for request in requests:
        if request.num_steps:
            waits.append(request.waited)
        if request.token_times:
            first_tokens.append(request.token_times[0] - request.arrival)
        gaps += [later - earlier for earlier, later in pairwise(request.token_times)]
        if request.reason is not None:
            reasons[request.reason] += 1
    return {
        "seconds": content.last_time / 1e6,
        "end": content.end_reason,
        "requests": len(requests),
        "ended": dict(sorted(reasons.items())),
        "output_tokens": sum(request.num_tokens for request in requests),
        "time_to_first_token": spread(first_tokens),
        "time_between_tokens": spread(gaps),
        "queue_wait": spread(waits),
        "step": _step_figures(content.steps.values()),
        "preemptions": sum(request.num_preemptions for request in requests),
        "counted": dict(sorted(content.counted.items())),
    }


def _step_figures(steps: Collection[TracedStep]) -> dict[str, Any] | None:
    """The time of a step, the shares of device and host in it, and how full a step is. None without a
    complete step.

    A step's time runs from the start of its scheduling to its end. The time in which an earlier step had not
    ended is not counted again. So the times of all steps add up to the time in which at least one step ran.
    """
    landed: list[TracedStep] = []
    spans: list[tuple[int, int]] = []  # (start, end) of each step in `landed`
    for step in steps:
        if step.start is not None and step.end is not None:
            landed.append(step)
            spans.append((step.start, step.end))
    times, last_end = [], 0
    for start, end in sorted(spans):
        times.append(max(end - max(start, last_end), 0))
        last_end = max(last_end, end)  # a stranger's step may lie within another
    spread_of_times = spread(times)
    if spread_of_times is None:
        return None
    total = max(sum(times), 1)  # steps in a stranger's trace may have taken no time
    fills = [step.tokens / step.budget for step in landed if step.budget]
    return {
        **spread_of_times,
        "failed": len([step for step in landed if step.failed]),
        "share_device": sum(step.device for step in landed) / total,
        "share_schedule": sum(step.schedule for step in landed) / total,
        "share_land": sum(step.land for step in landed) / total,
        "mean_sequences": sum(step.sequences for step in landed) / len(landed),
        "mean_tokens": sum(step.tokens for step in landed) / len(landed),
        "fill": sum(fills) / len(fills) if fills else None,
    }


def spread(micros: Sequence[int]) -> dict[str, float] | None:
    """p50 and p95 in milliseconds, and the number of observations; None if there are none."""
    if not micros:
        return None
    values = sorted(micros)
    p50, p95 = percentile(values, 0.5) / 1e3, percentile(values, 0.95) / 1e3
    return {"p50": p50, "p95": p95, "count": len(values)}
