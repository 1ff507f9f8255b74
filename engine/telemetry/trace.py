"""A trace: what the engine does, as slices on a line of time, for Perfetto and chrome://tracing. Part 11.

`Trace` is a listener that writes events to a file while the engine runs. All times are microseconds since its
construction, by one clock. The file has

- the process "engine" with three tracks. Each step has a slice "schedule" (who runs), a slice "device" (from
  its launch, or from the end of the step before, until the host has its tokens) and a slice "land" (stop
  checks, outputs). One step ahead (Part 13), the host's slices lie beside the device's of another step.
- the process "requests" with numbered rows. A request has a row from its arrival to its end: the first that
  was free when it came. The outer slice has the request's id. In it lie, one behind the other, "waiting"
  (from the arrival to the launch of its first step), "prefill" (a chunk of the prompt), "decode" (an output
  token), "preempted", and "failed" (of a step that failed). Those of a step end when the host has the step's
  tokens.
- counters: requests that run and wait, the blocks of the cache, the tokens of a step against its budget, and
  what the engine's capabilities count, such as drafts (Part 16).

A "decode" without arguments has computed one token and brought one. Texts are in no trace, the ids of
requests are. At the size bound of its file the trace ends, with an event that says so.
"""

import atexit
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.cache.manager import KVCacheManager
from engine.requests.listeners import Listener, StepRecord
from engine.requests.request import Request
from engine.telemetry import trace_events
from engine.telemetry.trace_events import DEVICE, ENGINE, LAND, REQUESTS, SCHEDULE, slice_event
from engine.telemetry.trace_file import MAX_BYTES, TraceFile

logger = logging.getLogger(__name__)
TRACKS = {SCHEDULE: "host: schedule", DEVICE: "device", LAND: "host: land"}
MAX_TEXT = 200  # characters of an id, or of an error


@dataclass(slots=True)
class Gap:
    """What a request does outside of steps."""

    name: str  # "waiting" or "preempted"
    since: int  # in microseconds of the trace


@dataclass(slots=True)
class RequestRow:
    """The row of one request, while the request is in the engine. Times are microseconds of the trace."""

    number: int  # from 1
    request: Request
    end: int  # of the last slice, or the arrival
    prefill_end: int  # prompt tokens; after a preemption, all tokens that the request had by then
    gaps: list[Gap]  # while a step is under way there may be two: one before the step, and one behind it
    num_outputs: int = 0  # output tokens so far


@dataclass(frozen=True, slots=True)
class StepMoments:
    """The moments of a step, in microseconds of the trace."""

    start: int  # its scheduling begins
    scheduled: int  # it is launched
    landed: int  # the host has its tokens
    end: int  # its outputs are made


class Trace(Listener):
    """Writes the trace of one engine. The engine's thread calls the `on_…` methods."""

    def __init__(
        self,
        file: TraceFile,
        cache: KVCacheManager,
        block_size: int = 1,
        budget: Callable[[], int] | None = None,
        about: Mapping[str, object] | None = None,
    ) -> None:
        """`file`: as `open_trace` opens it. `block_size`: tokens in a block of the cache. `budget`: the most
        tokens that a step may have now; None if steps have no budget. `about`: what else the trace's first
        moment says, as JSON values.
        """
        self.file, self._cache, self._block_size, self._budget = file, cache, block_size, budget
        self._start = time.perf_counter()  # the clock of StepRecords
        self._rows: dict[str, RequestRow] = {}  # by `Request.id`
        self._free_since: list[int | None] = []  # by row: when its last request ended; None while it has one
        self._last_landed = 0  # when the last step's tokens came
        # By a counter's name: when its values were last written, and these values.
        self._last_values: dict[str, tuple[int, str]] = {}
        tracks = [
            trace_events.metadata(ENGINE, tid, "thread_name", {"name": name}) for tid, name in TRACKS.items()
        ]
        details = {"utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **(about or {})}
        requests = trace_events.metadata(REQUESTS, 0, "process_name", {"name": "requests"})
        file.write([*tracks, requests, trace_events.instant("begin", 0, details)])
        atexit.register(self.close)

    def _micros(self, seconds: float) -> int:
        """A time of `time.perf_counter`, in microseconds since the trace began."""
        return int((seconds - self._start) * 1e6)

    def _now(self) -> int:
        """Microseconds since the trace began."""
        return self._micros(time.perf_counter())

    def on_arrival(self, request: Request) -> None:
        """Begin the request's outer slice, in a row that was free when it arrived: before this call."""
        if not self.file.is_open:
            return
        arrival = max(self._micros(request.stats.arrival), 0)
        events: list[str] = []
        number = self._take_row(arrival, events)
        gaps = [Gap("waiting", arrival)]
        self._rows[request.id] = RequestRow(number, request, arrival, request.num_prompt_tokens, gaps)
        details = {"prompt": request.num_prompt_tokens, "max_tokens": request.output.limit}
        if request.priority:
            details["priority"] = request.priority
        events.append(trace_events.begin_slice(REQUESTS, number, arrival, request.id[:MAX_TEXT], details))
        self._write(events)

    def _take_row(self, arrival: int, events: list[str]) -> int:
        """The number of the first row that was free at `arrival`. A new row is named in `events`."""
        for index, free_since in enumerate(self._free_since):
            if free_since is not None and free_since <= arrival:
                self._free_since[index] = None
                return index + 1
        self._free_since.append(None)
        number = len(self._free_since)
        events.append(trace_events.metadata(REQUESTS, number, "thread_name", {"name": f"row {number}"}))
        events.append(trace_events.metadata(REQUESTS, number, "thread_sort_index", {"sort_index": number}))
        return number

    def on_preempt(self, request: Request) -> None:
        """From now on the request's row says "preempted"."""
        row = self._rows.get(request.id)
        if row is not None:
            row.gaps.append(Gap("preempted", self._now()))
            row.prefill_end = len(request.token_ids)

    def on_step(self, record: StepRecord) -> None:
        """Write the slices of a step that has landed or failed, and the counters that have changed."""
        if not self.file.is_open:
            return
        moments = StepMoments(
            start=self._micros(record.start),
            scheduled=self._micros(record.start + record.schedule_seconds),
            landed=self._micros(record.start + record.schedule_seconds + record.execute_seconds),
            end=self._micros(record.end),
        )
        budget = None if self._budget is None else self._budget()
        events = self._engine_slices(record, moments, budget)
        num_prefill = num_decode = 0
        for s, request_id in enumerate(record.request_ids):
            row = self._rows.get(request_id)
            # Without a row, the request has ended while the step was under way, or came before the trace.
            # Whether the step read its prompt is not known then; its tokens are counted with the decoded.
            is_prefill = False
            if row is not None:
                is_prefill = self._add_request_slices(events, row, record, s, moments)
            if is_prefill:
                num_prefill += record.tokens_computed[s]
            else:
                num_decode += record.tokens_computed[s]
        self._add_token_counter(events, moments.scheduled, num_prefill, num_decode, budget)
        self._add_state_counters(events, record, moments.end)
        self._last_landed = moments.landed
        self._write(events)

    def _engine_slices(self, record: StepRecord, moments: StepMoments, budget: int | None) -> list[str]:
        """The step's slices on the engine's tracks."""
        # The arguments of the three slices.
        step = f'"step":{record.number}'
        device = f'{step},"tokens":{sum(record.tokens_computed)},"sequences":{len(record.request_ids)}'
        if budget is not None:
            device += f',"budget":{budget}'
        if record.error is not None:
            device += f',"error":{json.dumps(record.error[:MAX_TEXT])}'
        land = step
        if any(record.counters.values()):
            land += f',"counted":{json.dumps(record.counters)}'
        device_start = max(moments.scheduled, self._last_landed)  # the device computes one step at a time
        return [
            slice_event(ENGINE, SCHEDULE, moments.start, moments.scheduled, "schedule", step),
            slice_event(ENGINE, DEVICE, device_start, moments.landed, "device", device),
            slice_event(ENGINE, LAND, moments.landed, moments.end, "land", land),
        ]

    def _add_request_slices(
        self, events: list[str], row: RequestRow, record: StepRecord, s: int, moments: StepMoments
    ) -> bool:
        """Add the slices of request `s` of a step. Returns whether the step computed tokens of the prompt, or
        of the output once more.
        """
        computed = record.tokens_computed[s]
        first = record.tokens_held[s] - computed  # the position of the first of these tokens
        # 1. What the request did before the step. A preemption may have come behind the step's launch.
        ends_gap = False
        if row.gaps and moments.scheduled >= row.gaps[0].since:
            ends_gap = True
            gap = row.gaps.pop(0)
            events.append(slice_event(REQUESTS, row.number, gap.since, moments.scheduled, gap.name))
            row.end = moments.scheduled
        begin = max(row.end, moments.scheduled)
        row.end = max(begin, moments.landed)
        for gap in row.gaps:  # it begins behind the step's slice, even if it came while the step ran
            gap.since = max(gap.since, row.end)
        # 2. The step. A request that comes back from the swap space lacks one token: that is no prefill.
        num_outputs = len(row.request.stats.token_times)
        num_new = num_outputs - row.num_outputs
        row.num_outputs = num_outputs
        is_prefill = first < row.request.num_prompt_tokens or (first < row.prefill_end and computed > 1)
        if record.error is None and not is_prefill:
            name = "decode"
            details = "" if computed == num_new == 1 else f'"tokens":{computed},"new":{num_new}'
        else:
            name = "prefill" if record.error is None else "failed"
            details = f'"tokens":{computed},"start":{first}'
            if ends_gap:  # the cache had the tokens before `first`
                details += f',"cached":{first}'
            details += f',"new":{num_new}'
        events.append(slice_event(REQUESTS, row.number, begin, row.end, name, details))
        return is_prefill

    def _add_state_counters(self, events: list[str], record: StepRecord, end: int) -> None:
        """Add the counters of what there is at the step's `end`."""
        usage = self._cache.usage()
        used, total = usage.tokens_held // self._block_size, usage.tokens_total // self._block_size
        running, waiting = record.num_running, record.num_waiting
        self._add_counter(events, "requests", end, f'"running":{running},"waiting":{waiting}')
        self._add_counter(events, "blocks of the cache", end, f'"used":{used},"free":{total - used}')
        if record.counters:
            values = json.dumps(record.counters)[1:-1]  # without the braces
            self._add_counter(events, "counted in a step", end, values)
        if not running and not waiting:  # the engine is idle until the next step
            budget = None if self._budget is None else 0
            self._add_token_counter(events, end, prefill=0, decode=0, budget=budget)

    def _add_token_counter(
        self, events: list[str], moment: int, prefill: int, decode: int, budget: int | None
    ) -> None:
        """Add the counter of a step's tokens. `budget`: how many there could have been; None: no bound."""
        tokens = f'"prefill":{prefill},"decode":{decode}'
        if budget is not None:
            tokens += f',"unused":{max(budget - prefill - decode, 0)}'
        self._add_counter(events, "tokens of a step", moment, tokens)

    def _add_counter(self, events: list[str], name: str, moment: int, values: str) -> None:
        """Add a counter's values (JSON, without the braces) if they have changed. Its times never go back."""
        last_written, last_values = self._last_values.get(name, (0, ""))
        if values != last_values:
            moment = max(moment, last_written)
            self._last_values[name] = moment, values
            events.append(trace_events.counter(name, moment, values))

    def on_finish(self, request: Request) -> None:
        """End the request's outer slice, with its finish reason and how many tokens it has got."""
        row = self._rows.pop(request.id, None)
        if row is None or not self.file.is_open:
            return
        output = request.output
        details: dict[str, object] = {"reason": output.finish_reason, "tokens": len(output.token_ids)}
        if request.error:
            details["error"] = request.error[:MAX_TEXT]
        events: list[str] = []
        self._end_row(events, row, details)
        self._write(events)

    def _end_row(self, events: list[str], row: RequestRow, details: Mapping[str, object]) -> None:
        """End the request's outer slice, and before it what the request did last outside of steps."""
        now = max(self._now(), row.end)
        for i, gap in enumerate(row.gaps):
            end = row.gaps[i + 1].since if i + 1 < len(row.gaps) else now  # where the next one begins
            events.append(slice_event(REQUESTS, row.number, gap.since, end, gap.name))
        events.append(trace_events.end_slice(REQUESTS, row.number, now, details))
        self._free_since[row.number - 1] = now

    def _write(self, events: list[str]) -> None:
        """Write events, and end the trace once its file is full."""
        self.file.write(events)
        if self.file.is_full:
            self._end(f"the size bound of {self.file.max_bytes:,} bytes is reached")
            logger.warning("trace=%r ends here: it has %d bytes", str(self.file.path), self.file.num_bytes)

    def _end(self, reason: str) -> None:
        """Write the last events: the ends of the outer slices that are open, and `reason`."""
        if not self.file.is_open:
            return
        events: list[str] = []
        for row in list(self._rows.values()):
            self._end_row(events, row, {"reason": "unfinished"})
        self._rows.clear()
        events.append(trace_events.instant("end", self._now(), {"reason": reason}))
        self.file.write(events)
        self.file.end()

    def close(self) -> None:
        """End the trace and close its file; the process's end does it, too. Any thread may call this once no
        step follows.
        """
        atexit.unregister(self.close)
        self._end("the engine was shut down")
        self.file.close()


def open_trace(path: str | Path, max_bytes: int = MAX_BYTES) -> TraceFile:
    """The file of a trace, opened for writing. Raises ValueError if no file can be written there."""
    try:
        return TraceFile(
            path, trace_events.metadata(ENGINE, 0, "process_name", {"name": "engine"}), max_bytes
        )
    except OSError as error:
        raise ValueError(f"trace={str(path)!r}: {error.strerror}") from None
